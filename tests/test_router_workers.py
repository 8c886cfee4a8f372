"""What the router knows of its workers: who takes work, why nobody does, whose layout counts."""

from __future__ import annotations

from engine.messages import CacheChange, KvLayout, Node, WorkerHello, WorkerLoad
from router.workers import MAX_CACHED_HASHES, Role, Worker, Workers, layout_difference

LAYOUT = KvLayout(b"\x01" * 32, "float32", 16, 2, 2, 64, 8192, "torch 2")


def hello(name: str, layout: KvLayout = LAYOUT, blocks: int = 10, length: int = 4096) -> WorkerHello:
    return WorkerHello(Node(name, 1, name), layout, blocks, 8, length)


def test_a_layout_is_compared_field_by_field() -> None:
    other = LAYOUT._replace(dtype="bfloat16", model_digest=b"\x02" * 32)
    assert layout_difference(LAYOUT, LAYOUT) == ""
    assert layout_difference(other, LAYOUT) == (
        "model_digest is 0202020202020202, not 0101010101010101, dtype is bfloat16, not float32"
    )


def test_the_worker_that_is_up_longest_sets_the_layout_whatever_its_role() -> None:
    workers = Workers()
    workers.up("d1", Role.DECODE, hello("d1"), 0.0)
    workers.up("p1", Role.PREFILL, hello("p1", LAYOUT._replace(block_size=32)), 1.0)
    assert [worker.address for worker in workers.eligible(Role.DECODE)] == ["d1"]
    assert not workers.eligible(Role.PREFILL)
    assert "p1 has another KV layout than d1: block_size is 32, not 16" in workers.why_none(Role.PREFILL)


def test_when_the_last_worker_of_a_layout_leaves_the_next_layout_takes_over() -> None:
    workers = Workers()
    new = LAYOUT._replace(model_digest=b"\x02" * 32)
    workers.up("d1", Role.DECODE, hello("d1"), 0.0)
    workers.up("d2", Role.DECODE, hello("d2", new), 1.0)
    workers.up("p2", Role.PREFILL, hello("p2", new), 1.0)
    workers.down("d1", Role.DECODE, 2.0)
    assert workers.ready()
    assert workers.empty_since(Role.DECODE) is None


def test_a_stray_worker_that_came_first_does_not_take_the_service_away() -> None:
    workers = Workers()
    workers.up("stray", Role.DECODE, hello("stray", LAYOUT._replace(block_size=32)), 0.0)
    workers.up("p1", Role.PREFILL, hello("p1"), 1.0)
    assert not workers.ready(), "nothing fits together yet"
    workers.up("d1", Role.DECODE, hello("d1"), 2.0)
    assert [worker.address for worker in workers.eligible(Role.DECODE)] == ["d1"] and workers.ready()
    assert "block_size is 32, not 16" in workers.get("stray", Role.DECODE).mismatch  # type: ignore[union-attr]
    workers.up("p2", Role.PREFILL, hello("p2", LAYOUT._replace(block_size=32)), 3.0)
    assert [worker.address for worker in workers.eligible(Role.PREFILL)] == ["p1"], "the layout in use stays"
    workers.down("d1", Role.DECODE, 4.0)
    assert workers.ready() and workers.get("p1", Role.PREFILL).mismatch, "the other one can serve, this one cannot"  # type: ignore[union-attr]


def test_since_when_a_role_is_empty_is_known() -> None:
    workers = Workers(now=5.0)
    assert workers.empty_since(Role.PREFILL) == 5.0 and not workers.ever_up(Role.PREFILL)
    worker = workers.up("p1", Role.PREFILL, hello("p1"), 6.0)
    assert workers.empty_since(Role.PREFILL) is None and workers.ever_up(Role.PREFILL)
    workers.report(worker, WorkerLoad(draining=True), 7.0)
    assert workers.empty_since(Role.PREFILL) == 7.0
    assert workers.why_none(Role.PREFILL) == "no prefill worker takes work: p1 is draining"
    workers.down("p1", Role.PREFILL, 8.0)
    assert workers.empty_since(Role.PREFILL) == 7.0
    assert workers.why_none(Role.PREFILL) == "no prefill worker is up"


def test_a_gap_in_cache_changes_forgets_what_was_believed() -> None:
    worker = Worker("p1", Role.PREFILL, hello("p1"))
    worker.cache_changed(CacheChange([b"a", b"b"], [], 4))
    worker.cache_changed(CacheChange([b"c"], [b"a"], 5))
    assert list(worker.hashes) == [b"b", b"c"]
    worker.cache_changed(CacheChange([b"d"], [], 7))
    assert list(worker.hashes) == [b"d"]


def test_a_snapshot_may_come_in_several_messages_of_one_sequence() -> None:
    worker = Worker("p1", Role.PREFILL, hello("p1"))
    worker.cache_changed(CacheChange([b"a"], [], 4))
    worker.cache_changed(CacheChange([b"b"], [], 4))
    assert list(worker.hashes) == [b"a", b"b"]


def test_what_is_remembered_of_a_cache_is_bounded() -> None:
    worker = Worker("p1", Role.PREFILL, hello("p1"))
    names = [index.to_bytes(4, "big") for index in range(MAX_CACHED_HASHES + 5)]
    worker.cache_changed(CacheChange(names, [], 1))
    assert len(worker.hashes) == MAX_CACHED_HASHES and names[0] not in worker.hashes

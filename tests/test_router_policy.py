"""Which worker gets a request."""

from __future__ import annotations

import random
from collections import Counter

from engine.messages import CacheChange, KvLayout, Node, WorkerHello, WorkerLoad
from router import policy
from router.workers import Role, Worker

LAYOUT = KvLayout(b"\x01" * 32, "float32", 16, 2, 2, 64, 8192, "torch 2")


def report(each: Worker, load: WorkerLoad) -> None:
    each.load, each.reported = load, True


def worker(name: str, blocks: int = 100) -> Worker:
    return Worker(name, Role.PREFILL, WorkerHello(Node(name, 1, name), LAYOUT, blocks, 8, 4096))


def test_prefill_goes_where_the_least_tokens_wait() -> None:
    one, two = worker("p1"), worker("p2")
    one.load = WorkerLoad(waiting_tokens=500)
    assert policy.pick_prefill([one, two], range(100), []) is two
    two.jobs = {1: 400, 2: 200}
    assert policy.pick_prefill([one, two], range(100), []) is one


def test_a_cached_prefix_outweighs_a_shorter_queue_but_not_a_much_shorter_one() -> None:
    one, two = worker("p1"), worker("p2")
    tokens = list(range(160))
    hashes = policy.prompt_hashes(one, b"", tokens)
    one.cache_changed(CacheChange(hashes[:8], [], 1))
    one.load = WorkerLoad(waiting_tokens=100)
    assert policy.pick_prefill([one, two], tokens, hashes) is one  # 100 + 32 against 160
    one.load = WorkerLoad(waiting_tokens=200)
    assert policy.pick_prefill([one, two], tokens, hashes) is two


def test_a_prefix_counts_only_as_far_as_it_is_unbroken_and_never_wholly() -> None:
    one = worker("p1")
    hashes = policy.prompt_hashes(one, b"", list(range(64)))
    one.cache_changed(CacheChange([hashes[0], hashes[2]], [], 1))
    assert policy.cached_tokens(one, hashes, 64) == 16
    one.cache_changed(CacheChange(hashes, [], 2))
    assert policy.cached_tokens(one, hashes, 64) == 48


def test_tenants_do_not_share_prefixes() -> None:
    one = worker("p1")
    assert not set(policy.prompt_hashes(one, b"a", range(64))) & set(policy.prompt_hashes(one, b"b", range(64)))


def test_decode_stays_where_the_prompt_was_computed_if_that_process_decodes_too() -> None:
    workers = [worker(f"d{i}") for i in range(4)]
    for each in workers:
        report(each, WorkerLoad(running=1, free_blocks=10 if each.address == "d2" else 90))
    for _ in range(20):
        chosen = policy.pick_decode(workers, random.Random(), Node("d2", 1, "d2"))
        assert chosen is workers[2], "nothing has to move, although its pool is the fullest"
    elsewhere = Node("d2", 2, "d2")  # the process before this one
    assert {policy.pick_decode(workers, random.Random(seed), elsewhere) is workers[2] for seed in range(9)} == {False}


def test_decode_prefers_the_emptier_of_two_random_workers() -> None:
    workers = [worker(f"d{i}") for i in range(3)]
    report(workers[0], WorkerLoad(running=1, free_blocks=10))
    report(workers[1], WorkerLoad(running=1, free_blocks=50))
    report(workers[2], WorkerLoad(running=1, free_blocks=90))
    rng = random.Random(1)
    picked = Counter(chosen.address for _ in range(300) if (chosen := policy.pick_decode(workers, rng)))
    assert picked["d0"] == 0 and picked["d2"] > picked["d1"] > 50


def test_requests_just_placed_count_before_the_next_load_report() -> None:
    one, two = worker("d1"), worker("d2")
    report(one, WorkerLoad(running=1, free_blocks=100))
    report(two, WorkerLoad(running=1, free_blocks=100))
    one.jobs = {1: 160}
    assert policy.pick_decode([one, two], random.Random(1)) is two


def test_nobody_to_choose_from_is_no_error() -> None:
    assert policy.pick_decode([], random.Random(1)) is None
    assert policy.pick_prefill([], range(3), []) is None

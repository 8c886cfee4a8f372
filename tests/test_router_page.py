"""The page at `/`: what it is made of, who may read what, and that its numbers are the router's."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import httpx
import pytest
from cluster import Cluster
from router_front import HELLO

from engine.messages import FirstToken, PrefillAccepted, RequestKey, Ticket, WorkerLoad
from engine.types import SamplingParams, Token
from router.actions import RouterRequest
from router.admission import RouterConfig
from router.dispatch import Dispatcher
from router.page.state import MAX_REQUESTS, snapshot
from router.workers import Role

PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=8)


@pytest.fixture
def web(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.topology.url, timeout=10) as client:
        yield client


def dispatcher() -> Dispatcher:
    made = Dispatcher(RouterConfig(), random.Random(1), 0.0)
    for role, address in ((Role.PREFILL, "p:1"), (Role.DECODE, "d:1")):
        made.worker_up(address, role, HELLO, 0.0)
    return made


def test_the_page_asks_no_other_host_for_anything(web: httpx.Client) -> None:
    page = web.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert "page/app.js" in named and not [each for each in named if "//" in each]
    for each in named:
        if not each.startswith("data:"):
            asset = web.get(f"/{each}")
            assert asset.status_code == 200 and "://" not in asset.text, each


def test_the_state_names_the_workers_of_the_cluster(web: httpx.Client, cluster: Cluster) -> None:
    state = web.get("/page/state").json()
    assert state["ready"] is True and state["model"] == "random:tiny"
    addresses = {(each["role"], each["address"]) for each in state["workers"]}
    assert addresses == {
        ("prefill", cluster.programs["prefill-1"].address),
        ("decode", cluster.programs["decode-1"].address),
    }
    assert state["requests"] == []


def test_the_first_token_is_timed_when_it_comes_and_not_when_the_answer_ends(web: httpx.Client) -> None:
    def counted() -> tuple[float, float]:
        """First tokens, and choices that ended."""
        lines = web.get("/metrics").text.splitlines()
        names = ("pagewire_time_to_first_token_seconds_count", "pagewire_e2e_request_latency_seconds_count")
        first, ended = (
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in names
        )
        return first, ended

    first, ended = counted()
    body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with web.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        assert counted() == (first + 1, ended)


def test_a_worker_that_gets_no_work_is_shown_with_the_reason() -> None:
    made = dispatcher()
    made.on_event("d:1", Role.DECODE, WorkerLoad(refuses="has no path to p:1"), 0.0)
    absent = {(Role.DECODE, "d:2"): "connection refused"}
    shown = snapshot(made, absent, 0.0)
    assert [each["state"] for each in shown["workers"]] == ["serving", "has no path to p:1"]
    assert shown["absent"] == [{"role": "decode", "address": "d:2", "why": "connection refused"}]


def test_each_block_is_in_one_state() -> None:
    made = dispatcher()
    load = WorkerLoad(free_blocks=HELLO.total_blocks - 5, leased_blocks=3, cached_blocks=2)
    made.on_event("p:1", Role.PREFILL, load, 0.0)
    made.on_event("d:1", Role.DECODE, load, 0.0)
    prefill, decode = snapshot(made, {}, 0.0)["workers"]
    # A ticket's blocks are held; what a decode worker has promised is not taken yet.
    assert prefill["blocks"] == {"in use": 2, "leased": 3, "cached": 2, "free": HELLO.total_blocks - 7}
    assert decode["blocks"] == {"in use": 5, "leased": 3, "cached": 2, "free": HELLO.total_blocks - 10}


def test_a_request_is_shown_in_the_stage_that_it_is_in() -> None:
    made = dispatcher()
    number, _ = made.submit(RouterRequest((1, 2, 3), PARAMS, 60.0), 1.0)
    (shown,) = snapshot(made, {}, 1.5)["requests"]
    assert (shown["stage"], shown["age"], shown["prompt_tokens"], shown["workers"]) == (
        "prefill",
        0.5,
        3,
        {"prefill": "p:1"},
    )
    ticket = Ticket(1, HELLO.node, 3, 1, 60.0)
    made.on_event("p:1", Role.PREFILL, PrefillAccepted(RequestKey(number, 1), ticket, 0), 2.0)
    (shown,) = snapshot(made, {}, 2.0)["requests"]
    assert shown["workers"] == {"prefill": "p:1", "decode": "d:1"} and shown["tokens"] == 0
    made.on_event("p:1", Role.PREFILL, FirstToken(RequestKey(number, 1), Token(0, 5)), 3.0)
    (shown,) = snapshot(made, {}, 3.5)["requests"]
    assert (shown["stage"], shown["tokens"]) == ("transfer", 1)
    made.on_event("d:1", Role.DECODE, FirstToken(RequestKey(number, 1, 1), Token(0, 5)), 4.0)
    (shown,) = snapshot(made, {}, 4.5)["requests"]
    assert (shown["stage"], shown["stage_seconds"], shown["workers"]) == ("decode", 0.5, {"decode": "d:1"})
    json.dumps(shown)


def test_a_page_of_many_requests_stays_small() -> None:
    made = dispatcher()
    for at in range(MAX_REQUESTS + 5):
        made.submit(RouterRequest((1, 2, 3), PARAMS, 60.0), float(at))
    shown = snapshot(made, {}, 1000.0)
    assert shown["running"] + shown["waiting"] == MAX_REQUESTS + 5
    assert len(shown["requests"]) == MAX_REQUESTS and shown["requests"][0]["age"] == 1000.0

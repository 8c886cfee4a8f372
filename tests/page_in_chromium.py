"""The page at `/` as a person meets it, in headless Chromium. `make test-page` runs it: it needs the browser."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, running_cluster
from playwright.sync_api import Browser, Page, expect, sync_playwright

KEY = "a key"
SHOTS = Path(os.environ.get("PAGEWIRE_SCREENSHOTS", tempfile.gettempdir()))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Cluster]:
    os.environ["PAGEWIRE_API_KEY"] = KEY
    with running_cluster(tmp_path_factory.mktemp("protected"), decode=2, cache_dir=model_cache) as cluster:
        yield cluster
    del os.environ["PAGEWIRE_API_KEY"]


@contextmanager
def others_at_work(cluster: Cluster) -> Iterator[None]:
    """Four clients that ask for long answers, one after the other, until the test has seen what it wants."""
    over = threading.Event()
    body = {"prompt": "once upon a time", "max_tokens": 400, "ignore_eos": True}

    def ask() -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            while not over.is_set():
                answer = client.post(f"{cluster.topology.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask) for _ in range(4)]
        try:
            yield
        finally:
            over.set()
            for each in asking:
                each.result()


@pytest.fixture
def page(browser: Browser, protected: Cluster) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1300, "height": 1100})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(protected.topology.url)
    yield page
    page.close()
    assert not wrong, wrong
    assert hosts == {f"127.0.0.1:{protected.topology.http_port}"}


def unlock(page: Page, workers: int = 3) -> None:
    page.fill("input[name=key]", KEY)
    page.click("#key button")
    expect(page.locator(".worker")).to_have_count(workers)


def test_without_the_key_it_tells_nothing_and_asks_for_it(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("an API key is needed")
    expect(page.locator(".worker")).to_have_count(0)
    page.fill("input[name=key]", KEY)
    page.click("#key button")
    expect(page.locator(".worker")).to_have_count(3)
    expect(page.locator("#key")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("ready, version")


def await_an_answer(page: Page) -> None:
    """Some of it, or the words that there is none: random weights may end an answer at once."""
    expect(page.locator("#turns p[data-who=model]:not(:empty), #turns p.faint")).to_have_count(1, timeout=20_000)


def test_a_chat_streams_and_requests_and_their_speed_are_shown(page: Page, protected: Cluster) -> None:
    unlock(page)
    with others_at_work(protected):
        expect(page.locator("#requests tr").first).to_be_visible(timeout=20_000)
        expect(page.locator("#speed")).not_to_have_text("0.0", timeout=20_000)
        expect(page.locator("#first")).not_to_have_text("–", timeout=20_000)
        page.screenshot(path=SHOTS / "page.png")
    expect(page.locator("#requests tr")).to_have_count(0, timeout=10_000)
    page.fill("textarea", "Tell me a story <b>now</b>")
    page.press("textarea", "Enter")
    await_an_answer(page)
    expect(page.locator("#turns p[data-who=you]")).to_have_text("Tell me a story <b>now</b>")  # text, not markup
    assert page.locator(".map").count() == 3
    page.click("#forget")
    expect(page.locator("#turns p")).to_have_count(0)


def test_a_new_chat_is_new_though_the_old_one_was_still_answering(page: Page) -> None:
    unlock(page)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or "") if "chat" in request.url else None)
    page.fill("textarea", "Tell me a long story")
    page.press("textarea", "Enter")
    await_an_answer(page)
    page.click("#forget")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#turns p")).to_have_count(0)
    page.fill("textarea", "And another")
    page.click("#send")
    await_an_answer(page)
    assert "another" in sent[-1] and "story" not in sent[-1]


def test_on_a_narrow_screen_only_the_table_is_wider_than_the_window(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    unlock(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    inside = "([...document.querySelectorAll('.worker')].map((card) => card.getBoundingClientRect().right))"
    assert max(page.evaluate(inside)) <= 350
    page.screenshot(path=SHOTS / "narrow.png", full_page=True)


def test_the_map_is_coloured_by_state(page: Page) -> None:
    unlock(page)
    expect(page.locator(".map")).to_have_count(3)
    free = page.evaluate("color('free')")
    pixel = page.evaluate("[...document.querySelector('.map').getContext('2d').getImageData(1, 1, 1, 1).data]")
    assert pixel[3] == 255 and free.startswith("rgb")
    assert len({page.evaluate(f"color('{state}')") for state in ("in use", "leased", "cached", "free")}) == 4


def test_a_worker_that_dies_is_shown_as_away_and_a_router_that_ends_as_silent(
    browser: Browser, protected: Cluster, tmp_path: Path, model_cache: Path
) -> None:
    with running_cluster(tmp_path, cache_dir=model_cache) as cluster, browser.new_page() as page:
        page.goto(cluster.topology.url)
        unlock(page, workers=2)
        cluster.kill("decode-1")
        expect(page.locator(".worker .bad")).to_have_text("away: nothing listens there", timeout=20_000)
        expect(page.locator(".worker")).to_have_count(2)
        expect(page.locator("#status")).to_contain_text("not ready")
        cluster.kill("router")
        expect(page.locator("#status")).to_have_text("the router does not answer", timeout=20_000)

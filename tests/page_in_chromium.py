"""The page at `/` as a person meets it, in headless Chromium. `make test-page` runs it: it needs the browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running_cluster
from playwright.sync_api import Browser, Page, expect, sync_playwright

KEY = "a key"
SHOTS = Path(os.environ.get("PAGEWIRE_SCREENSHOTS", "."))


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


def test_without_the_key_it_tells_nothing_and_asks_for_it(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("an API key is needed")
    expect(page.locator(".worker")).to_have_count(0)
    page.fill("input[name=key]", KEY)
    page.click("#key button")
    expect(page.locator(".worker")).to_have_count(3)
    expect(page.locator("#key")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("ready, version")


def test_a_chat_streams_and_its_request_and_speed_are_shown(page: Page) -> None:
    page.fill("input[name=key]", KEY)
    page.click("#key button")
    expect(page.locator(".worker")).to_have_count(3)
    page.fill("textarea", "Tell me a story <b>now</b>")
    page.press("textarea", "Enter")
    answer = page.locator("#turns p[data-who=model]")
    expect(answer).not_to_be_empty(timeout=20_000)
    expect(page.locator("#turns p[data-who=you]")).to_have_text("Tell me a story <b>now</b>")  # text, not markup
    expect(page.locator("#requests tr")).to_have_count(1, timeout=10_000)
    expect(page.locator("#speed")).not_to_have_text("0.0", timeout=10_000)
    expect(page.locator("#first")).not_to_have_text("–", timeout=10_000)
    page.screenshot(path=SHOTS / "page.png")
    if page.locator("#stop").is_visible():
        page.click("#stop")
    expect(page.locator("#requests tr")).to_have_count(0, timeout=10_000)
    said = answer.text_content()
    assert said and page.locator(".map").count() == 3
    page.click("#forget")
    expect(page.locator("#turns p")).to_have_count(0)


def test_the_map_is_coloured_by_state(page: Page) -> None:
    page.fill("input[name=key]", KEY)
    page.click("#key button")
    expect(page.locator(".map")).to_have_count(3)
    free = page.evaluate("color('free')")
    pixel = page.evaluate("[...document.querySelector('.map').getContext('2d').getImageData(1, 1, 1, 1).data]")
    assert pixel[3] == 255 and free.startswith("rgb")
    assert len({page.evaluate(f"color('{state}')") for state in ("in use", "leased", "cached", "free")}) == 4

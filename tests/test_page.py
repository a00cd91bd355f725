"""The page of a report in a browser: what a click, a key and a search do, and that it asks for nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import te_transform
from tests.conversions import ALL

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium is installed, whose engine the page is opened in"
    ),
]
sync_api = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=["llama", "gpt2", "t5", "vit", "deep"])
def page(request: pytest.FixtureRequest, browser: object, tmp_path: Path) -> Iterator[object]:
    """The page of a model, of whose scripts no error and no request is left when the test ends."""
    case = ALL["llama" if request.param == "deep" else request.param]
    model = case.build(num_hidden_layers=32) if request.param == "deep" else case.build()
    report = te_transform.inspect(model, case.sample(), backend="torch")
    report.to_html(tmp_path / "report.html")
    opened, wrong = browser.new_page(viewport={"width": 1280, "height": 900}), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("request", lambda asked: asked.url.startswith("file:") or wrong.append(asked.url))
    opened.goto((tmp_path / "report.html").as_uri())
    yield opened
    opened.close()
    assert wrong == []


def test_a_click_shows_what_an_operation_is(page: object) -> None:
    detail, fused = page.locator("#detail"), page.locator(".operation.fused").first
    assert not detail.is_visible()
    fused.click()
    assert detail.is_visible()
    assert fused.locator("text").first.text_content() in detail.text_content()
    page.keyboard.press("Escape")
    assert not detail.is_visible()
    fused.focus()
    page.keyboard.press("Enter")
    assert detail.is_visible()
    page.locator("h1").click()
    assert not detail.is_visible()


def test_a_search_leaves_what_has_all_words(page: object) -> None:
    page.keyboard.press("/")
    page.keyboard.type("linear float32")
    found = page.locator(".operation.found")
    assert 0 < found.count() < page.locator(".operation").count()
    assert all("linear" in each.get_attribute("data-detail") for each in found.all())
    page.keyboard.press("Escape")
    assert page.locator("body.searching").count() == 0


def test_equal_blocks_are_drawn_once_and_nothing_is_wider_than_a_phone(page: object) -> None:
    captions = page.locator("figcaption").all_text_contents()
    assert len(captions) < 20
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

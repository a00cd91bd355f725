"""The page of a report in a browser: what a click, a key and a search do, and that it asks for nothing."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import te_transform
from te_transform.execution.timing import duration
from te_transform.plan.memory import size_text
from te_transform.report.report import Report
from tests.conversions import ALL, as_built
from tests.models.llama import llama_of_8b

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


CORNER = {"x": 8, "y": 8}  # of a box: the middle of a frame has other boxes
SIZES = {"phone": (390, 844), "laptop": (1280, 800), "large": (2560, 1440)}


@contextmanager
def opened_page(
    browser: object, report: Report, folder: Path, size: str = "laptop", **options: object
) -> Iterator[object]:
    """The page of a report, of whose scripts no error and no request is left in the end."""
    report.to_html(folder / "report.html")
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    opened, wrong = context.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("request", lambda asked: asked.url.startswith("file:") or wrong.append(asked.url))
    opened.goto((folder / "report.html").as_uri())
    if options.get("java_script_enabled", True):  # blocks are drawn when they come into view
        opened.locator(".block[open]").first.scroll_into_view_if_needed()
        opened.locator(".operation.fused").first.wait_for()
    yield opened
    context.close()
    assert wrong == []


@cache
def report_of(name: str, **config: int) -> Report:
    """The report of a model of the tests, once for all tests."""
    case = ALL[name]
    return te_transform.inspect(case.build(**config), case.sample(), backend="torch")


@pytest.fixture(params=["llama", "gpt2", "t5", "vit", "deep"])
def page(request: pytest.FixtureRequest, browser: object, tmp_path: Path) -> Iterator[object]:
    """The page of a model."""
    is_deep = request.param == "deep"
    report = report_of("llama", num_hidden_layers=32) if is_deep else report_of(request.param)
    with opened_page(browser, report, tmp_path) as opened:
        yield opened


def test_a_print_has_all_open_blocks(browser: object, tmp_path: Path) -> None:
    """On a screen, blocks are drawn when they come near to the window."""
    with opened_page(browser, report_of("t5"), tmp_path, "phone") as opened:
        opened.evaluate("dispatchEvent(new Event('beforeprint'))")
        empty = "[...document.querySelectorAll('.block[open]')].filter(block => !block.querySelector('svg'))"
        assert opened.evaluate(f"{empty}.length") == 0


def test_a_click_shows_the_predicted_time_and_memory(browser: object, tmp_path: Path) -> None:
    model, inputs = llama_of_8b()
    report = te_transform.inspect(model.train(), inputs, backend="te", recipe="fp8-delayed")
    with opened_page(browser, report, tmp_path) as page:
        page.locator(".operation.fused", has_text="layernorm_mlp").first.click(position=CORNER)
        told = page.locator("#detail .chosen").text_content().splitlines()
        (mlp,) = (site for site in report.fused if site.rule == "layernorm_mlp")
        fused, before = duration(mlp.fused_seconds), duration(mlp.seconds)
        assert f"predicted time of a call on an H100: {fused}, {before} unfused" in told
        assert f"predicted memory kept for the backward: {size_text(mlp.kept)}" in told
        assert "in fp8-delayed" in told
        assert f"{duration(mlp.saved)}" in page.locator("table.fused").text_content()


def test_a_click_shows_the_errors_of_the_check(browser: object, tmp_path: Path) -> None:
    report = as_built("llama").report
    with opened_page(browser, report, tmp_path) as page:
        page.locator(".operation.fused", has_text="layernorm_mlp").first.click(position=CORNER)
        told = page.locator("#detail").text_content()
    off = next(site for site in report.fused if site.rule == "layernorm_mlp").deviations
    assert len(off) > 3
    assert all(f"{one.name}: error {one.converted:.1e}, unfused {one.original:.1e}" in told for one in off)


def test_wide_blocks_stay_readable_on_a_phone(browser: object, tmp_path: Path) -> None:
    with opened_page(browser, report_of("t5"), tmp_path, "phone") as page:
        page.get_by_role("button", name="open all").click()
        scale = "e => e.getBoundingClientRect().width / e.viewBox.baseVal.width"
        drawn = page.locator(".drawing svg").all()
        assert min(picture.evaluate(scale) for picture in drawn) > 0.59
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_is_dark_where_the_reader_wants_it(browser: object, tmp_path: Path) -> None:
    with opened_page(browser, report_of("gpt2"), tmp_path) as page:
        color = "getComputedStyle(document.querySelector('svg text')).fill"
        colors = [page.evaluate(color)]
        page.emulate_media(color_scheme="dark")
        colors.append(page.evaluate(color))
    assert colors == ["rgb(28, 32, 36)", "rgb(230, 233, 237)"]


def test_a_click_shows_what_an_operation_is(page: object) -> None:
    detail, fused = page.locator("#detail"), page.locator(".operation.fused").first
    assert not detail.is_visible()
    fused.click(position=CORNER)
    assert detail.is_visible()
    assert fused.locator("text").first.text_content() == detail.locator("h3").text_content()
    page.keyboard.press("Escape")
    assert not detail.is_visible()
    fused.focus()
    page.keyboard.press("Enter")
    assert detail.is_visible()
    page.locator("h1").click()
    assert not detail.is_visible()


@pytest.mark.parametrize("size", SIZES)
def test_the_detail_does_not_cover_what_was_clicked(browser: object, tmp_path: Path, size: str) -> None:
    with opened_page(browser, report_of("llama"), tmp_path, size) as page:
        for fused in page.locator(".operation.fused").all():
            fused.click(position=CORNER)
            operation, detail = (each.bounding_box() for each in (fused, page.locator("#detail")))
            below = operation["y"] + operation["height"] <= detail["y"]
            assert below or operation["x"] + operation["width"] <= detail["x"]


def test_a_pair_is_marked_on_both_sides(page: object) -> None:
    fused = page.locator(".operation.fused").first
    fused.hover(position=CORNER)
    pair, drawing = fused.get_attribute("data-pair"), page.locator(".drawing", has=page.locator(".lit")).first
    assert drawing.locator(".operation.lit").count() > 1
    assert {each.get_attribute("data-pair") for each in drawing.locator(".operation.lit").all()} == {pair}
    fused.click(position=CORNER)
    assert drawing.locator(".operation.open").count() == drawing.locator(".operation.lit").count()


def test_a_search_leaves_what_has_all_words(page: object) -> None:
    page.keyboard.press("/")
    page.keyboard.type("linear float32")
    found = page.locator(".operation.found")
    assert 0 < found.count() < page.locator(".operation").count()
    texts = """found => found.map(each => each.closest(".block").querySelector(
        `.listing [data-operation="${each.dataset.operation}"]`).textContent)"""
    assert all("linear" in text and "float32" in text for text in found.evaluate_all(texts))
    edges = page.locator("path[data-ends]")
    assert page.locator("path[data-ends].found").count() < edges.count()
    page.keyboard.press("Escape")
    assert page.locator("body.searching").count() == 0


def test_bookkeeping_is_shown_on_demand(page: object) -> None:
    page.locator(".operation.fused").first.wait_for()
    assert page.locator(".operation.minor").count() == 0
    page.locator("#minor").check()
    page.locator(".operation.minor").first.wait_for()
    page.locator("#minor").uncheck()
    page.locator(".operation.fused").first.wait_for()
    assert page.locator(".operation.minor").count() == 0


def test_equal_layers_open_one_by_one(browser: object, tmp_path: Path) -> None:
    with opened_page(browser, report_of("llama", num_hidden_layers=3), tmp_path) as page:
        page.locator(".equal > summary").click()
        layer = page.locator(".equal li").nth(2)
        layer.locator("summary").click()
        assert layer.locator("summary").text_content() == "model.layers.2"
        layer.locator(".operation.fused").first.wait_for()


@pytest.mark.parametrize("size", SIZES)
def test_equal_blocks_are_drawn_once_and_nothing_is_wider_than_the_page(page: object, size: str) -> None:
    assert page.locator(".block").count() < 20
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.locator("#every").click()
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = """drawn => drawn.filter(each => {
        const frame = each.ownerSVGElement.getBoundingClientRect(), box = each.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
    }).length"""
    drawn = page.locator(".drawing g.operation, .drawing path[data-ends]")
    assert drawn.count() > 0
    assert drawn.evaluate_all(cut) == 0


HIDDEN_EDGES = """drawings => drawings.flatMap(drawing => {
    const boxes = [...drawing.querySelectorAll('g.operation:not(.frame)')];
    const isIn = ({ x, y }, box) => Math.abs(x - box.x - box.width / 2) < box.width / 2 - 3
        && Math.abs(y - box.y - box.height / 2) < box.height / 2 - 3;
    return [...drawing.querySelectorAll('path[data-ends]')].filter(path => {
        const others = boxes.filter(box => !path.dataset.ends.split(' ').includes(box.dataset.operation));
        const rects = others.map(box => box.querySelector('rect').getBBox()), length = path.getTotalLength();
        const points = Array.from({ length: length / 3 }, (_, n) => path.getPointAtLength(3 * n));
        return points.some(point => rects.some(box => isIn(point, box)));
    }).map(path => path.dataset.ends);
})"""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_no_edge_passes_behind_an_operation(browser: object, tmp_path: Path, name: str, size: str) -> None:
    """In BERT, residuals leave a fused norm in front of its linears."""
    with opened_page(browser, report_of(name), tmp_path, size) as page:
        page.locator("#every").click()
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator(".drawing svg").evaluate_all(HIDDEN_EDGES) == []


def test_everything_is_in_tables_without_scripts(browser: object, tmp_path: Path) -> None:
    with opened_page(browser, report_of("gpt2"), tmp_path, java_script_enabled=False) as page:
        text = page.locator(".block[open]").first.inner_text()
        assert "layernorm_mlp" in text
        assert "captured as: " in text


def test_names_are_text(browser: object, tmp_path: Path) -> None:
    name = "<script>throw 1</script>"
    model = nn.Sequential(OrderedDict([(name, nn.Linear(8, 8)), ("</script><b>", nn.Linear(8, 8))]))
    report = te_transform.inspect(model, torch.zeros(2, 8), backend="torch")
    with opened_page(browser, report, tmp_path) as page:
        page.locator(".operation.fused").first.click(position=CORNER)
        assert name in page.locator("#detail").text_content()
        assert page.title() == report.title


def test_inactive_sites_look_inactive_and_say_why(page: object) -> None:
    inactive = page.locator(".operation.fused.inactive").first
    active = page.locator(".operation.fused:not(.inactive)").first
    fill, transparent = "e => getComputedStyle(e.querySelector('rect')).fill", "rgba(0, 0, 0, 0)"
    assert inactive.evaluate(fill) == transparent
    assert active.evaluate(fill) != transparent
    inactive.click(position=CORNER)
    assert "\ninactive: " in page.locator("#detail .chosen").text_content()
    active.click(position=CORNER)
    assert "inactive: " not in page.locator("#detail .chosen").text_content()


def test_a_shortened_label_has_its_text_as_a_title(browser: object, tmp_path: Path) -> None:
    with opened_page(browser, report_of("gpt2"), tmp_path) as page:
        port = page.locator(".operation.port", has_text="\u2026").first
        told = "from transformer.drop, the layer before"
        assert port.locator("title").text_content() == f"hidden_states\n{told}"
        port.click()
        assert told in page.locator("#detail .chosen").text_content()

"""The report in a real browser: does it open, tell the run's numbers, zoom, go dark, and run nothing of the run's?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import report_runs as runs
from flopmeter.compare import compare
from flopmeter.record import load_run
from flopmeter.report import write_report
from flopmeter.report._charts import figures_of
from flopmeter.report._compare_page import comparison_page
from flopmeter.report._facts import facts_of
from flopmeter.report._page import body_of
from flopmeter.report._series import series_of
from made_runs import make_run, noisy
from test_report import decoder_lines

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DESKTOP, PHONE = {"width": 1180, "height": 800}, {"width": 390, "height": 844}

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opener]:
    """Opens a page and waits until it is drawn; at the end nothing may have been complained of or asked for."""
    contexts, complaints, requests = [], [], []

    def open_page(path: Path, viewport: dict[str, int] = DESKTOP, theme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport=viewport, color_scheme=theme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn=yes]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def report_of(folder: Path) -> Path:
    return write_report(load_run(folder), folder)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = list(runs.ordinary_lines(200))
    return report_of(runs.write_run(tmp_path_factory.mktemp("runs") / "mine", lines))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(runs.write_run(tmp_path_factory.mktemp("runs") / "hostile", runs.hostile_lines()))


def demo(folder: Path, *arguments: str) -> Path:
    """The report that a real demo run leaves."""
    command = [sys.executable, "-m", "flopmeter", "demo", "--seconds", "3", "--json", "-o", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    "fault",
    [pytest.param((), id="demo"), pytest.param(("--plant", "slow_disk=0.5"), id="planted", marks=pytest.mark.slow)],
)
def test_a_real_run_opens_and_shows_the_waterfall_of_its_record(
    opened: Opener, tmp_path: Path, fault: tuple[str, ...]
) -> None:
    folder = demo(tmp_path, *fault)
    page = opened(folder / "report.html")
    fall = load_run(folder).waterfall()
    rows = page.locator("[data-live=waterfall-table] tbody tr")
    shown = [float(text.split()[0]) for text in rows.locator("td:nth-child(2)").all_text_contents()]
    assert shown == pytest.approx([100 * part.share for part in fall.parts], abs=0.006)
    bars = page.evaluate("document.querySelector('[data-figure=waterfall]').data[0].x")
    assert bars[0] == 100
    assert bars[-1] == pytest.approx(100 * fall.mfu)
    assert bars[1:-1] == pytest.approx([100 * part.share for part in fall.parts if part.name != "ideal" and part.share])
    assert page.locator("[data-figure=waterfall] .bars path").count() == len(bars)


def test_every_chart_of_a_run_is_drawn_with_a_name_and_a_table(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    for name in ("waterfall", "timeline", "phases", "modules", "operators"):
        chart = page.locator(f"[data-figure={name}]")
        assert chart.locator("svg").count() > 0
        assert chart.get_attribute("role") == "img"
        assert len(chart.get_attribute("aria-label")) > 10
        assert page.locator(f"[data-live={name}-table] tbody tr").count() > 0
    assert page.locator("#ranks").is_hidden()


def test_headings_lead_through_the_page_in_order(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((heading) => Number(heading.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    sections = [text for text in page.locator("section:not([hidden]) > h2").all_text_contents() if text.strip()]
    assert sections == [
        "Headline",
        "From peak to observed",
        "What would help",
        "MFU and step time",
        "Where a step goes",
        "Where the FLOPs go",
        "How this number was made",
    ]


def steps_in_view(page: Any) -> tuple[float, float]:
    low, high = page.evaluate("document.querySelector('[data-figure=timeline]').layout.xaxis.range.map(Number)")
    return low, high


def test_dragging_zooms_and_a_double_click_shows_all_again(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    before = steps_in_view(page)
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("[data-figure=timeline] .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 22, steps=4)
    page.mouse.up()
    page.wait_for_function("() => document.querySelector('[data-figure=timeline]').layout.xaxis.autorange !== true")
    low, high = steps_in_view(page)
    width = before[1] - before[0]
    assert low == pytest.approx(before[0] + 0.25 * width, abs=0.02 * width)
    assert high == pytest.approx(before[0] + 0.5 * width, abs=0.02 * width)
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 20)
    page.wait_for_function("() => document.querySelector('[data-figure=timeline]').layout.xaxis.autorange === true")
    assert steps_in_view(page) == pytest.approx(before)


def test_the_keyboard_zooms_and_opens_tables(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    low, high = steps_in_view(page)
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('[data-figure=timeline]').layout.xaxis.autorange !== true")
    zoomed = steps_in_view(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 2)
    summary = page.locator("#waterfall summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#waterfall table").is_visible()


def colours(page: Any) -> tuple[int, int]:
    """Brightness of the paper and of a chart's text, 0 to 765."""
    read = (
        "(selector, name) => getComputedStyle(document.querySelector(selector))[name].match(/[0-9]+/g).slice(0, 3)"
        ".map(Number).reduce((a, b) => a + b)"
    )
    paper = page.evaluate(f"({read})('body', 'backgroundColor')")
    return paper, page.evaluate(f"({read})('[data-figure=timeline] .xtick text', 'fill')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_follows_the_system_and_the_button_turns_it_over(opened: Opener, ordinary: Path, theme: str) -> None:
    page = opened(ordinary, theme=theme)
    paper, text = colours(page)
    assert (paper < 150) == (theme == "dark")
    assert (text > 400) == (theme == "dark")
    page.locator("#theme").click()
    turned_paper, turned_text = colours(page)
    assert (turned_paper > 600) == (theme == "dark")
    assert (turned_text < 300) == (theme == "dark")


@pytest.mark.parametrize("name", ["ordinary", "hostile"])
def test_a_phone_needs_no_horizontal_scroll(opened: Opener, name: str, request: pytest.FixtureRequest) -> None:
    page = opened(request.getfixturevalue(name), viewport=PHONE)
    for details in page.locator("details").all():
        details.evaluate("(element) => { element.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_on_a_phone_the_labels_of_the_waterfall_are_whole(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary, PHONE)
    edges = page.evaluate(
        """[...document.querySelectorAll('[data-figure=waterfall] .bartext')].map((text) =>
           [text.textContent, text.getBoundingClientRect().right])"""
    )
    assert sum(text.endswith("pts") for text, _ in edges) >= 4
    assert all(right <= PHONE["width"] for _, right in edges)


def test_on_a_phone_the_table_of_conventions_is_read_without_scrolling(opened: Opener, tmp_path: Path) -> None:
    page = opened(report_of(runs.write_run(tmp_path, decoder_lines())), PHONE)
    assert page.evaluate("(() => { const t = document.querySelector('table.stacked'); return t.offsetWidth; })()") < 390
    page = opened(tmp_path / "report.html", DESKTOP)
    assert page.evaluate("getComputedStyle(document.querySelector('table.stacked thead')).position") == "static"


def test_three_runs_side_by_side_have_the_width_of_the_window(opened: Opener, tmp_path: Path) -> None:
    loaded = [make_run(tmp_path / name, noisy(0.1, 60, 1), 0.1) for name in ("before-all", "with-prefetch", "compiled")]
    (tmp_path / "compare.html").write_text(comparison_page(compare(loaded), [series_of(run) for run in loaded]))
    page = opened(tmp_path / "compare.html", {"width": 1400, "height": 900})
    assert (
        page.evaluate(
            "(() => { const e = document.querySelector('.scroll'); return e.scrollWidth - e.clientWidth; })()"
        )
        == 0
    )


def test_paper_gets_dark_text_on_white_without_buttons(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary, theme="dark")
    page.emulate_media(media="print")
    page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.xtick text')).fill.match(/[0-9]+/)[0] < 100"
    )
    assert colours(page)[0] == 3 * 255
    assert page.locator("#theme").is_hidden()
    for chart in page.locator("[data-figure]:visible").all():
        assert chart.evaluate("(place) => place.clientHeight >= place.querySelector('svg').clientHeight")
    assert len(page.pdf()) > 10_000


def test_nothing_of_a_hostile_run_runs(opened: Opener, hostile: Path) -> None:
    page = opened(hostile)
    for chart in page.locator("[data-figure]:visible").all():
        chart.hover()
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("[...document.querySelectorAll('main img, main script, main iframe')].length") == 0
    assert runs.SCRIPT in page.locator(".meta").inner_text()


def test_the_policy_stops_a_script_that_somebody_slips_in(browser: Any, ordinary: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.html"
    text = ordinary.read_text(encoding="utf-8")
    spoiled.write_text(
        text.replace("<main", "<script>window.pwned=1</script><img src=x onerror='window.pwned=1'><main")
    )
    context = browser.new_context()
    page = context.new_page()
    page.goto(spoiled.as_uri())
    page.wait_for_selector("html[data-drawn=yes]", state="attached")
    assert page.evaluate("window.pwned") is None
    context.close()


def test_a_page_takes_fresh_facts_and_keeps_its_zoom_and_open_tables(
    opened: Opener, ordinary: Path, tmp_path: Path
) -> None:
    page = opened(ordinary)
    page.locator("#waterfall summary").click()
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function("() => document.querySelector('[data-figure=timeline]').layout.xaxis.autorange !== true")
    zoomed = steps_in_view(page)
    grown = facts_of(load_run(runs.write_run(tmp_path, runs.ordinary_lines(400))))
    page.evaluate(
        "([body, figures]) => window.flopmeterPage.update(body, figures)",
        [body_of(grown, figures_of(grown)), figures_of(grown)],
    )
    assert "400 steps" in page.locator(".meta").inner_text()
    assert page.evaluate("Math.max(...document.querySelector('[data-figure=timeline]').data[0].x)") == 400
    assert steps_in_view(page) == pytest.approx(zoomed)
    assert page.locator("#waterfall table").is_visible()

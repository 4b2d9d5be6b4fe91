"""The report in a real browser: does it open, tell the run's numbers, zoom, go dark, and run nothing of the run's?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import report_runs as runs
from browser import open_browser, wait_until
from flopmeter.compare import compare
from flopmeter.record import load_run
from flopmeter.report import report_of, write_report
from flopmeter.report._compare import comparison_document
from flopmeter.report._model import timeline_of
from flopmeter.report._page import body_of, data_of
from flopmeter.text import percent, utilisation
from made_runs import make_run, noisy
from test_report_model import decoder_lines

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DESKTOP, PHONE = {"width": 1180, "height": 800}, {"width": 390, "height": 844}

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens a page and waits until it is drawn; at the end nothing may have been complained of or asked for."""
    contexts, complaints, requests = [], [], []

    def open_page(path: Path, viewport: dict[str, int] = DESKTOP, theme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport=viewport, color_scheme=theme))  # type: ignore[arg-type]
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
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def page_of(folder: Path) -> Path:
    return write_report(load_run(folder), folder)


def slow_loader(num_steps: int) -> Iterator[dict[str, Any]]:
    """The ordinary run, a fifth of whose steps is waiting for data."""
    for line in runs.ordinary_lines(num_steps):
        if line.get("kind", "step") == "step":
            line["metrics"] |= {"perf/data_wait_share": 0.2, "perf/forward_share": 0.2}
        yield line


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(runs.write_run(tmp_path_factory.mktemp("runs") / "mine", slow_loader(200)))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(runs.write_run(tmp_path_factory.mktemp("runs") / "hostile", runs.hostile_lines()))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen ranks, the seventh slow from step 50 on; memory is sampled, a step was profiled."""
    lines: list[dict[str, Any]] = [runs.header(world_size=16), runs.peak(), runs.count(2)]
    for place in range(1, 101):
        lines.append(runs.step(place, **{"training/loss": 3 / place, "perf/exposed_communication_share": 0.1}))
        if place % 10 == 0:
            own_s = [0.4 + (0.1 if rank == 7 and place > 50 else 0.0) for rank in range(16)]
            stats = {"own_s": {"min": 0.4, "mean": 0.41, "max": max(own_s), "argmax": 7}}
            lines.append(runs.event("ranks", place, world_size=16, own_s_by_rank=own_s, stats=stats))
            lines.append(runs.event("resources", place, metrics={"resource/gpu_memory_bytes": 6e9}))
    top = [["flash_fwd_kernel", 0.2, 32], ["ncclDevKernel_AllReduce", 0.1, 4]]
    lines.append(runs.event("profile", 90, device="cuda", step_s=0.5, matmul_s=0.2, top=top))
    slow = {"rank": 7, "host": "node-7", "phase": "forward", "extra_s": 0.1, "since_step": 50}
    lines.append(runs.event("straggler", 60, cause="slow_peer", **slow))
    return page_of(runs.write_run(tmp_path_factory.mktemp("runs") / "ranks", lines))


def demo(folder: Path, *arguments: str) -> Path:
    """The report that a real demo run leaves."""
    command = [sys.executable, "-m", "flopmeter", "demo", "--seconds", "3", "--json", "-o", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    "fault",
    [pytest.param((), id="demo"), pytest.param(("--fault", "slow_disk"), id="faulty", marks=pytest.mark.slow)],
)
def test_a_real_run_opens_and_its_bar_is_the_waterfall_of_its_record(
    opened: Opener, tmp_path: Path, fault: tuple[str, ...]
) -> None:
    folder = demo(tmp_path, *fault)
    page = opened(folder / "report.html")
    run = load_run(folder)
    parts = [part for part in run.waterfall().parts if part.share >= 0.0005]
    bars = page.locator("#waterfall .stack button")
    labels = [bar.get_attribute("aria-label").replace("\xa0", " ") for bar in bars.all()]
    assert labels == [f"{part.label} {percent(part.share)}" for part in parts]
    widths = [bar.bounding_box()["width"] for bar in bars.all()]
    wide = [(width, part.share) for width, part in zip(widths, parts, strict=True) if part.share > 0.1]
    for width, share in wide:  # but for the gaps between them, as wide as they are long
        assert width / sum(widths) == pytest.approx(share / sum(part.share for part in parts), abs=0.02)
    assert page.locator("#mfu").inner_text().replace("\xa0", " ") == utilisation(report_of(run).number.mfu)


def test_the_first_screen_holds_the_number_the_fix_and_the_bar(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    for selector in ("#mfu", "#fix .do", "#fix [data-copy]", "#waterfall .stack", "#findings summary >> nth=0"):
        assert page.locator(selector).first.bounding_box()["y"] < DESKTOP["height"]
    assert page.evaluate("document.querySelectorAll('svg path').length") > 0


def test_pressing_a_part_shows_its_evidence_and_pressing_again_hides_it(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    part, panel = page.locator("[data-part=data_wait]"), page.locator("#part-data_wait")
    assert panel.is_hidden()
    part.focus()
    page.keyboard.press("Enter")
    assert panel.is_visible()
    assert part.get_attribute("aria-expanded") == "true"
    page.locator("[data-part=ideal]").click()
    assert panel.is_hidden()
    page.locator("[data-part=ideal]").click()
    assert page.locator(".panel:visible").count() == 0


def test_every_section_of_a_job_is_drawn_with_names_and_tables(opened: Opener, ranks: Path) -> None:
    page = opened(ranks)
    for name in ("waterfall", "timeline", "phases", "operators", "work", "ranks"):
        assert page.locator(f"#{name} tbody tr").count() > 0, name
    for name in ("chart", "heat"):
        assert page.locator(f"#{name}").get_attribute("role") == "img"
        assert len(page.locator(f"#{name}").get_attribute("aria-label")) > 10
    assert page.locator("#chart .mean").count() == 4  # MFU, step time, loss, memory
    canvas = page.locator("#heat canvas")
    assert (canvas.evaluate("c => c.width"), canvas.evaluate("c => c.height")) == (10, 16)
    shade = "c => ([x, y]) => [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
    quick = canvas.evaluate(f"c => ({shade})(c)([9, 3])")
    slow = canvas.evaluate(f"c => ({shade})(c)([9, 7])")
    assert sum(slow) > sum(quick) + 200  # brighter is slower
    canvas.hover(position={"x": 2, "y": 2})
    assert "Rank 0, up to step 10: own work 400 ms" in page.locator("#heat-readout").inner_text()


def test_ranks_that_hardly_differ_do_not_look_like_a_disaster(opened: Opener, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [runs.header(world_size=2), runs.peak()]
    for place in range(1, 21):
        lines += [runs.step(place), runs.event("ranks", place, world_size=2, own_s_by_rank=[0.1, 0.101])]
    page = opened(page_of(runs.write_run(tmp_path, lines)))
    read = "y => [...document.querySelector('#heat canvas').getContext('2d').getImageData(0, y, 1, 1).data]"
    first, second = (page.evaluate(read, rank) for rank in (0, 1))
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < 20


def test_headings_lead_through_the_page_in_order(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((heading) => Number(heading.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    sections = [text.replace("\xa0", " ") for text in page.locator("section[id] > h2").all_text_contents()]
    assert sections == [
        "Where 101 s of 198 steps went",
        "All that was found",
        "Over time",
        "Phases of a step",
        "FLOPs of a step",
        "The whole run",
        "How the number was made",
    ]


def in_view(page: Any) -> tuple[float, float]:
    low, high = page.evaluate("window.flopmeterPage.inView()")
    return low, high


def test_dragging_zooms_offers_the_command_and_a_double_click_shows_all_again(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    assert in_view(page) == (1, 200)
    assert page.locator("#window").is_hidden()
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#chart").bounding_box()
    left, width = 64, box["width"] - 64 - 8  # the steps lie between the labels and the edge
    page.mouse.move(box["x"] + left + 0.25 * width, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + left + 0.5 * width, box["y"] + 42, steps=4)
    page.mouse.up()
    low, high = in_view(page)
    assert low == pytest.approx(1 + 0.25 * 199, abs=1)
    assert high == pytest.approx(1 + 0.5 * 199, abs=1)
    command = page.locator("#window code").inner_text()
    assert command == f"flopmeter report mine --window {int(low)}:{-int(-high // 1) + 1}"
    page.mouse.dblclick(box["x"] + 300, box["y"] + 40)
    assert in_view(page) == (1, 200)
    assert page.locator("#window").is_hidden()


def test_the_cursor_tells_every_value_with_its_unit_and_what_happened(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    page.locator("#chart").focus()
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    told = page.locator("#readout").inner_text()
    assert "Step 10" in told
    assert "MFU 40 %" in told
    assert "Step time 500 ms" in told
    assert "Pause checkpoint, 2 s" in told
    page.locator("#chart").hover(position={"x": 400, "y": 40})
    assert "Step 10 " not in page.locator("#readout").inner_text()


def test_the_keyboard_zooms_and_opens_tables(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary)
    low, high = in_view(page)
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Enter")
    zoomed = in_view(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 2)
    page.locator("#chart").focus()
    page.keyboard.press("-")
    assert in_view(page) == (low, high)
    for _ in range(20):
        page.keyboard.press("+")
    zoomed = in_view(page)
    assert zoomed[1] - zoomed[0] == pytest.approx(8)  # closer there is nothing to see
    page.keyboard.press("0")
    assert in_view(page) == (low, high)
    summary = page.locator("#waterfall summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#waterfall table").is_visible()


def test_a_button_copies_the_line_beside_it(browser: Browser, ordinary: Path) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(ordinary.as_uri())
    page.wait_for_selector("html[data-drawn=yes]", state="attached")
    button, line = page.locator("#fix [data-copy]"), page.locator("#fix .code code").inner_text()
    button.focus()
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#fix [data-copy]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == line
    context.close()


def colours(page: Any) -> tuple[int, int]:
    """Brightness of the paper and of a chart's text, 0 to 765."""
    read = (
        "(selector, name) => getComputedStyle(document.querySelector(selector))[name].match(/[0-9]+/g).slice(0, 3)"
        ".map(Number).reduce((a, b) => a + b)"
    )
    paper = page.evaluate(f"({read})('body', 'backgroundColor')")
    return paper, page.evaluate(f"({read})('#chart text.name', 'fill')")


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


CONTRAST = """([selector, behind]) => {
  const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((value) => Number(value) / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  return [...document.querySelectorAll(selector)].map((element) => {
    const own = getComputedStyle(element);
    const back = behind ? getComputedStyle(document.querySelector(behind)) : own;
    const [a, b] = [light(own.color), light(back.backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_the_contrast_that_reading_needs(opened: Opener, ranks: Path, theme: str) -> None:
    page = opened(ranks, theme=theme)
    for selector, behind in ((".lead", "body"), (".card.number p", ".card.number"), (".legend li", "body")):
        assert min(page.evaluate(CONTRAST, [selector, behind])) >= 4.5, selector
    # What is written on the parts of the bar, whose hatched one has no single colour.
    assert min(page.evaluate(CONTRAST, [".stack button:not(.c-unexplained)", ""])) >= 4.5


@pytest.mark.parametrize("name", ["ordinary", "hostile", "ranks"])
def test_a_phone_needs_no_horizontal_scroll(opened: Opener, name: str, request: pytest.FixtureRequest) -> None:
    page = opened(request.getfixturevalue(name), viewport=PHONE)
    for details in page.locator("details").all():
        details.evaluate("(element) => { element.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_number_is_told_under_the_names_of_others(opened: Opener, tmp_path: Path) -> None:
    page = opened(page_of(runs.write_run(tmp_path, decoder_lines(64))))
    card = page.locator(".card.number").inner_text()
    for name in ("PaLM", "torchtitan", "Megatron", "6N"):
        assert name in card


def test_three_runs_side_by_side_have_the_width_of_the_window(opened: Opener, tmp_path: Path) -> None:
    loaded = [make_run(tmp_path / name, noisy(0.1, 60, 1), 0.1) for name in ("before-all", "with-prefetch", "compiled")]
    page_path = tmp_path / "compare.html"
    page_path.write_text(comparison_document(compare(loaded), [timeline_of(run) for run in loaded]))
    page = opened(page_path, {"width": 1400, "height": 900})
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((e) => e.scrollWidth <= e.clientWidth)")
    assert page.locator("#chart .mean").count() == 3 * 3  # MFU, step time and loss of each


def test_paper_gets_dark_text_on_white_without_buttons(opened: Opener, ordinary: Path) -> None:
    page = opened(ordinary, theme="dark")
    page.emulate_media(media="print")
    assert colours(page)[0] == 3 * 255
    assert colours(page)[1] < 300
    for selector in ("#theme", "[data-zoom]", "[data-copy]"):
        assert page.locator(selector).first.is_hidden()
    assert page.locator("#waterfall .stack").is_visible()
    assert len(page.pdf()) > 10_000


def test_nothing_of_a_hostile_run_runs(opened: Opener, hostile: Path) -> None:
    page = opened(hostile)
    for details in page.locator("details").all():
        details.evaluate("(element) => { element.open = true; }")
    for chart in page.locator(".chart:visible, .stack button").all():
        chart.hover()
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("[...document.querySelectorAll('main img, main script, main iframe')].length") == 0
    assert runs.SCRIPT in page.locator(".meta").inner_text()


def test_the_policy_stops_a_script_that_somebody_slips_in(browser: Browser, ordinary: Path, tmp_path: Path) -> None:
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


def test_a_page_takes_news_and_keeps_its_zoom_its_focus_and_what_is_open(
    opened: Opener, ordinary: Path, tmp_path: Path
) -> None:
    page = opened(ordinary)
    page.locator("#waterfall summary").click()
    page.locator("[data-part=data_wait]").click()
    page.get_by_role("button", name="Zoom in").click()
    zoomed = in_view(page)
    page.locator("#fix [data-copy]").focus()
    grown = report_of(load_run(runs.write_run(tmp_path, slow_loader(400))))
    page.evaluate(
        "([body, data]) => window.flopmeterPage.update(body, data)",
        [body_of(grown), data_of(grown)],
    )
    assert "400 steps" in page.locator(".meta").inner_text()
    assert in_view(page) == pytest.approx(zoomed)
    assert page.locator("#waterfall table").is_visible()
    assert page.locator("#part-data_wait").is_visible()
    assert page.evaluate("document.activeElement.dataset.copy !== undefined")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="All steps").click()
    assert in_view(page) == (1, 400)

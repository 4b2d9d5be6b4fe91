"""The served pages in a real browser: they grow with the run, and nothing that a run contains can do anything."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import open_browser, open_page, wait_until
from flopmeter.compare import compare
from flopmeter.record import RunWriter
from flopmeter.report import _compare as words
from flopmeter.report._compare import comparison_document
from flopmeter.report._model import timeline_of
from flopmeter.text import percent
from flopmeter.waterfall import LABELS
from made_runs import HEADER, PEAK, STARTED_AT, make_run, noisy, run_lines, step_line, write_run
from test_serve import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("starlette", reason="starlette is not installed")

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
PHONE = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "before", noisy(0.10, 120, 1), 0.3)
    make_run(root / "after", noisy(0.07, 120, 2), 0.0, started_at=STARTED_AT + 9)
    lines = run_lines([0.1] * 40, model=HOSTILE, host=HOSTILE, device=HOSTILE, versions={HOSTILE: HOSTILE})
    for line in lines[2:-1]:
        line["metrics"][f"dataset/{HOSTILE}/loss"] = 1.0
    lines.insert(9, {"kind": "event", "event": "warning", "message": HOSTILE})
    lines.insert(9, {"kind": "event", "event": "pause", "name": HOSTILE, "duration_s": 1.0, "time": STARTED_AT + 1})
    by_module = {HOSTILE: 1e10, f"a.{HOSTILE}": 3e10}
    count = {"kind": "event", "event": "count", "model_flop": 4e10, "by_module": by_module, "by_op": {HOSTILE: 4e10}}
    lines.insert(9, count | {"by_dtype": {HOSTILE: 4e10}, "method": HOSTILE, "left_out": [HOSTILE]})
    write_run(root / "<img src=x onerror=alert(3)>", lines)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[str]:
    with serving(root) as (address, _):
        yield address.rstrip("/")


def settle(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]")


def addresses(page: Page, server: str) -> dict[str, str]:
    """Where each run's page is."""
    settle(page, server)
    links = page.eval_on_selector_all(".title a", "links => links.map(a => [a.textContent, a.href])")
    return dict(links)


def is_as_wide_as_the_screen(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def num_points(page: Page) -> int:
    """Of the drawn line of MFU: what moves the pen, to or along."""
    return int(
        page.evaluate("(document.querySelector('#chart .mean')?.getAttribute('d') ?? '').split(/[ML]/).length - 1")
    )


def test_the_page_grows_while_the_run_is_written(browser: Browser, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "mine" / "run.jsonl")
    for line in (HEADER, PEAK, *(step_line(n, 0.1, STARTED_AT + n) for n in range(1, 31))):
        writer.write(line)
    writer.flush()
    with serving(tmp_path) as (address, _), open_page(browser) as page:
        settle(page, next(iter(addresses(page, address.rstrip("/")).values())))
        assert num_points(page) == 30
        assert page.inner_text("#pulse") == "Live"
        assert page.inner_text("#mfu").startswith("40.0")
        page.click("text=Zoom in")
        zoomed = page.evaluate("window.flopmeterPage.inView()")
        page.focus("#waterfall summary")
        for number in range(31, 61):
            writer.write(step_line(number, 0.05, STARTED_AT + number))
        writer.flush()
        wait_until(page, "document.querySelector('.meta').textContent.includes('60 steps')")
        # 30 steps of 0.1 s and 30 of 0.05 s: 60 x 4e10 FLOP in 4.5 s of a peak of 1e12 FLOP/s are 53.3 %.
        assert page.inner_text("#mfu").startswith("53.3")
        assert page.evaluate("window.flopmeterPage.inView()") == zoomed
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        page.click("text=All steps")
        assert page.evaluate("window.flopmeterPage.inView()") == [1, 60]
        assert num_points(page) == 60
        writer.write({"kind": "summary", "time": STARTED_AT + 61, "metrics": {}})
        writer.close()
        wait_until(page, "document.getElementById('pulse').textContent === 'Finished'")


def test_the_list_grows_and_keeps_what_was_chosen(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "first", [0.1] * 30)
    with serving(tmp_path) as (address, _), open_page(browser) as page:
        settle(page, address)
        assert page.is_disabled("#compare")
        page.check("input[name=run]")
        page.focus(".title a")
        make_run(tmp_path / "second", [0.08] * 30, started_at=STARTED_AT + 9)
        wait_until(page, "document.querySelectorAll('.title a').length === 2")
        assert page.eval_on_selector_all("input:checked", "boxes => boxes.length") == 1
        assert page.inner_text("#theme") == "Dark theme"
        assert page.evaluate("document.activeElement.textContent") == "first"
        page.check("[aria-label='Compare second']")
        page.click("#compare")
        page.wait_for_selector("html[data-drawn=yes]")
        assert "second is better than first" in page.inner_text(".verdict")
        page.click("text=make it the baseline")
        page.wait_for_selector("html[data-drawn=yes]")
        assert "first is worse than second" in page.inner_text(".verdict")


def test_no_page_scrolls_sideways_on_a_phone(browser: Browser, server: str) -> None:
    with open_page(browser, viewport=PHONE) as page:
        runs = addresses(page, server)
        assert len(runs) == 3
        assert is_as_wide_as_the_screen(page)
        names = [address.rpartition("/")[2] for address in runs.values()]
        for address in (*runs.values(), f"{server}/compare?" + "&".join(f"run={name}" for name in names)):
            settle(page, address)
            assert is_as_wide_as_the_screen(page), address


def test_the_list_is_sorted_and_filtered_and_stays_so(browser: Browser, tmp_path: Path) -> None:
    for name, step_s in (("slow", 0.2), ("quick", 0.05), ("middling", 0.1)):
        make_run(tmp_path / name, [step_s] * 30)
    with serving(tmp_path) as (address, _), open_page(browser) as page:
        settle(page, address)

        def order() -> list[str]:
            return [link.inner_text() for link in page.locator(".title a:visible").all()]

        page.click("[data-sort='2']")  # MFU, the highest first: it falls with the time that the same work takes
        assert order() == ["quick", "middling", "slow"]
        assert page.get_attribute("th:has([data-sort='2'])", "aria-sort") == "descending"
        page.click("[data-sort='2']")
        assert order() == ["slow", "middling", "quick"]
        page.fill("#filter", "q")
        assert order() == ["quick"]
        page.fill("#filter", "")
        make_run(tmp_path / "quickest", [0.04] * 30)
        wait_until(page, "document.querySelectorAll('.title a').length === 4")
        assert order() == ["slow", "middling", "quick", "quickest"]


def brightness(page: Page, selector: str, quality: str) -> float:
    colour = page.eval_on_selector(selector, f"element => getComputedStyle(element).{quality}")
    red, green, blue = (int(value) for value in re.findall(r"\d+", colour)[:3])
    return (red + green + blue) / 765


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_follow_the_theme(browser: Browser, server: str, scheme: str) -> None:
    is_dark = scheme == "dark"
    with open_page(browser, color_scheme=scheme) as page:
        run = addresses(page, server)["before"]
        for address in (server, run):
            settle(page, address)
            assert (brightness(page, "body", "backgroundColor") < 0.3) is is_dark
            assert (brightness(page, "h1", "color") > 0.7) is is_dark
        assert (brightness(page, "#chart text.name", "fill") > 0.5) is is_dark
        page.click("#theme")
        assert (brightness(page, "body", "backgroundColor") < 0.3) is not is_dark


def test_nothing_that_a_run_contains_is_run(browser: Browser, server: str) -> None:
    with open_page(browser) as page:
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        runs = addresses(page, server)
        hostile = next(address for title, address in runs.items() if "img" in title)
        names = [address.rpartition("/")[2] for address in (hostile, runs["before"])]
        for address in (server, hostile, f"{server}/compare?run={names[0]}&run={names[1]}"):
            settle(page, address)
            page.wait_for_timeout(300)
            assert page.eval_on_selector_all("img", "found => found.length") == 0
            assert "<img src=x" in page.inner_text("body")
            assert "49" not in page.inner_text("h1")
        assert dialogs == []


def test_the_token_in_the_address_lets_the_browser_in_for_good(browser: Browser, root: Path) -> None:
    with serving(root, "--token") as (address, _), open_page(browser) as page:
        settle(page, address)
        page.wait_for_selector(".title a")
        assert "token" not in page.url
        assert page.evaluate("document.cookie") == ""
        settle(page, next(iter(addresses(page, page.url.rstrip("/")).values())))


class _OtherSite(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>other</title>")

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


def test_another_site_can_read_nothing(browser: Browser, server: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OtherSite) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{other.server_port}/")
        read = "url => fetch(url).then(answer => answer.text(), () => 'refused')"
        load = (
            "url => new Promise(done => { const s = document.createElement('script'); s.onload = () => done('loaded');"
        )
        load += " s.onerror = () => done('refused'); s.src = url; document.head.append(s); })"
        assert page.evaluate(read, f"{server}/news") == "refused"
        assert page.evaluate(load, f"{server}/news") == "refused"
        page.close()
        other.shutdown()


def test_a_server_that_goes_away_is_told_and_the_page_stays(browser: Browser, root: Path) -> None:
    with serving(root) as (address, process):
        page = browser.new_page()
        settle(page, next(iter(addresses(page, address.rstrip("/")).values())))
        process.terminate()
        process.wait(30)
        wait_until(page, "document.getElementById('pulse').dataset.state === 'lost'")
        assert page.inner_text("#pulse") == "No connection; trying again"
        assert num_points(page) > 0
        page.close()


def test_the_page_of_a_comparison_works_offline_and_says_what_the_comparison_says(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / "a", noisy(0.1, 100, 1), 0.2), make_run(tmp_path / "b", noisy(0.08, 100, 2), 0.0)]
    comparison = compare(runs)
    document = comparison_document(comparison, [timeline_of(run) for run in runs])
    (tmp_path / "page.html").write_text(document, encoding="utf-8")
    with open_page(browser, offline=True, viewport=PHONE, color_scheme="dark") as page:
        settle(page, f"file://{tmp_path}/page.html")
        assert is_as_wide_as_the_screen(page)
        page.evaluate("for (const more of document.querySelectorAll('details')) more.open = true")
        shown = {
            cells[0]: cells[1:]
            for cells in page.eval_on_selector_all(
                "table.compare tbody tr",
                "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.replaceAll('\\u00a0', ' ')))",
            )
        }
        for row in comparison.rows:
            before, after = shown[row.quantity.label]
            assert before == words.value_text(row.quantity, row.values[0])
            assert after.startswith(words.value_text(row.quantity, row.values[1]))
        bars = [
            [bar.get_attribute("title") for bar in stack.locator("> span").all()]
            for stack in page.locator(".stack").all()
        ]
        told = [[text.replace("\xa0", " ") for text in bar] for bar in bars]
        expected = [
            [
                f"{LABELS[name]} {percent(shares[place])}"
                for name, shares in comparison.parts.items()
                if (shares[place] or 0) >= 0.0005
            ]
            for place in (0, 1)
        ]
        assert told == expected

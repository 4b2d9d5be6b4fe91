"""A real browser for tests of pages: Debian's chromium, driven by playwright; tests skip where either is missing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """One browser for many tests."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("there is no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, **settings: Any) -> Iterator[Page]:
    """A page of its own context (`viewport`, `color_scheme`); console errors and uncaught exceptions fail the test."""
    context = browser.new_context(**settings)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        yield page
    finally:
        context.close()
    assert not problems, problems


def wait_until(page: Page, expression: str, timeout_s: float = 60.0) -> None:
    """Ask the page again and again, from outside: our pages forbid the `eval` that playwright's waiting needs."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"it did not come about: {expression}"
        page.wait_for_timeout(100)

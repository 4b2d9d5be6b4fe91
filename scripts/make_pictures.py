"""Makes the pictures of the README from real runs on this machine: report, terminal, comparison and live page.

    python scripts/make_pictures.py [--seconds 40] [--output docs/pictures]

Needs Chromium and `pip install 'flopmeter[serve,torch]' playwright`. Two demo runs are trained, one of them with
a slow disk; a third one is watched while it grows. On a busy machine the runs are slow, and look it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FAULT = "slow_disk"
WIDTH, COLUMNS = 1100, 104
FLOPMETER = [sys.executable, "-m", "flopmeter"]


def flopmeter(*arguments: str | Path) -> None:
    subprocess.run([*FLOPMETER, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def terminal_output(*arguments: str | Path) -> str:
    """What the command shows on a terminal, colours included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    command = [*FLOPMETER, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    text = b"".join(_chunks(ours)).decode()
    os.close(ours)
    if process.wait():
        sys.exit(f"{' '.join(command)} failed")
    return text.replace("\r\n", "\n")


def _chunks(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # the other end of a terminal is gone when its last writer is
            return
        if not chunk:
            return
        yield chunk


def terminal_page(title: str, text: str) -> str:
    """A window with the text in it, as rich draws one."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(f"$ {title}\n{text}"))
    svg = console.export_svg(title="flopmeter")
    # The picture is made offline: the fonts that rich would fetch are left out, a local one takes their place.
    local = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    return f"<!doctype html><meta charset=utf-8><body style='margin:0'>{local}"


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


def shoot(chromium: Any, address: str, picture: Path, *, height: int, theme: str = "light") -> None:
    """The upper part of a page, when its charts are drawn."""
    page = chromium.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=theme)
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=60_000)
    keep(page, page, picture)


def shoot_terminal(chromium: Any, text: str, picture: Path) -> None:
    page = chromium.new_page(viewport={"width": WIDTH, "height": 900})
    page.set_content(terminal_page("flopmeter report runs/slow-disk", text))
    keep(page, page.locator("svg").first, picture)


def keep(page: Any, part: Any, picture: Path) -> None:
    part.screenshot(path=picture)
    page.close()
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KB")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a live server over the runs of a folder."""
    command = [*FLOPMETER, "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            sys.exit("flopmeter serve gave no address")
        yield found[0].rstrip("/")
    finally:
        process.terminate()
        process.wait()


def shoot_live(chromium: Any, folder: Path, seconds: float, picture: Path) -> None:
    """The page of a run that is still going on."""
    command = [*FLOPMETER, "demo", "--seconds", str(10 * seconds), "-o", str(folder / "running"), "--json"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with served(folder) as address:
        page = chromium.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(address)
        page.get_by_role("link", name="running").first.wait_for(timeout=120_000)
        page.wait_for_timeout(1000 * seconds)
        page.get_by_role("link", name="running").first.click()
        page.wait_for_selector("#chart svg", timeout=60_000)
        page.wait_for_timeout(3000)
        page.wait_for_selector("#waterfall .stack", timeout=60_000)
        keep(page, page, picture)
    training.terminate()
    training.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each run")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "pictures")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        slow, fixed = folder / "slow-disk", folder / "fixed"
        flopmeter("demo", "--seconds", str(arguments.seconds), "-o", slow, "--fault", FAULT, "--json")
        flopmeter("demo", "--seconds", str(arguments.seconds), "-o", fixed, "--fault", "none", "--json")
        flopmeter("compare", slow, fixed, "-o", folder / "compare.html")
        text = terminal_output("report", slow).replace(str(slow), "runs/slow-disk")
        report = (slow / "report.html").as_uri()
        shoot(chromium, report, arguments.output / "report.png", height=1180)
        shoot(chromium, (folder / "compare.html").as_uri(), arguments.output / "compare.png", height=1000)
        shoot_terminal(chromium, text, arguments.output / "terminal.png")
        shoot_live(chromium, folder, arguments.seconds, arguments.output / "live.png")


if __name__ == "__main__":
    main()

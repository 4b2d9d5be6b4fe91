"""The pages under docs/ can be followed: what they mark to run does run, and what any page links to is there.

A fenced `bash` or `python` block after `<!-- run -->` is run, in the page's order, in a folder of the page's own that
shows the repository's examples. `<!-- run, needs a b -->` skips it where a or b is not installed.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"<!-- run(?:, needs (?P<needs>[\w ]+))? -->\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
TEXTS = [*PAGES, *sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"""(?:\]\(|(?:src|href)=["'])(?!\w+:)(?P<path>[^)#\s"']*)#?(?P<anchor>[^)\s"']*)""")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


class Block(NamedTuple):
    """Something that a page asks its reader to run."""

    language: str
    code: str
    needs: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    return [Block(m["language"], m["code"], tuple((m["needs"] or "").split())) for m in BLOCK.finditer(text)]


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    command = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TRACKIO_DIR": str(folder / "trackio")}
    return subprocess.run(
        [*command, block.code], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=280
    )


def parts(page: Path) -> list[tuple[str, ...]]:
    """What the blocks of a page need: those of the same needs are one part, which may use what it has made."""
    return list(dict.fromkeys(block.needs for block in blocks(page.read_text("utf-8"))))


@pytest.mark.parametrize(
    ("page", "needs"),
    [pytest.param(page, needs, id="-".join([page.stem, *needs])) for page in PAGES for needs in parts(page)],
)
def test_what_a_page_marks_to_run_runs(page: Path, needs: tuple[str, ...], tmp_path: Path) -> None:
    if missing := [library for library in needs if find_spec(library) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    for name in ("examples", "docs", "configs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(page.read_text("utf-8")):
        if block.needs == needs:
            answer = run(block, tmp_path)
            assert answer.returncode == 0, f"{block.code}\n{answer.stdout}\n{answer.stderr}"


def test_the_recipe_for_swanlab_is_read_back_by_its_own_reader(tmp_path: Path) -> None:
    store = pytest.importorskip("swanlab.sdk.internal.core_python.store", reason="needs swanlab")
    records = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2", reason="needs swanlab")
    (recipe,) = (b for b in blocks((ROOT / "docs/logging.md").read_text("utf-8")) if b.needs == ("swanlab",))
    answer = run(recipe, tmp_path)
    assert answer.returncode == 0, answer.stderr
    reader = store.DataStoreReader()
    reader.open(next(tmp_path.glob("swanlog/*/*.swanlab")))
    found = [record.scalar for record in map(records.Record.FromString, reader) if record.HasField("scalar")]
    reader.close()
    times = {scalar.step: scalar.value.number for scalar in found if scalar.key == "perf/step_time"}
    assert times.keys() == {50, 100}  # as `detail_every` has it
    assert all(step_s > 0 for step_s in times.values())


def test_the_recipe_for_opentelemetry_reaches_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="needs flopmeter[recipes]"
    )
    found: dict[str, float] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = service.ExportMetricsServiceRequest.FromString(
                gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            )
            scopes = [scope for resource in sent.resource_metrics for scope in resource.scope_metrics]
            found.update({m.name: m.gauge.data_points[0].as_double for scope in scopes for m in scope.metrics})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    code = re.search(
        r"needs opentelemetry -->\n```python\n(.*?)```", (ROOT / "docs/logging.md").read_text("utf-8"), re.S
    )
    assert code is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        answer = run(Block("python", code[1], ()), tmp_path)
        server.shutdown()
    assert answer.returncode == 0, answer.stderr
    assert found["perf.step_time"] > 0
    assert found["perf.mfu"] > 0


@pytest.mark.parametrize(
    "name", ["measure_a_trainer_run", "measure_a_cluster", "add_a_device", "add_a_sink", "vision_language"]
)
def test_a_page_that_tells_how_has_something_to_run(name: str) -> None:
    assert blocks((ROOT / "docs" / f"{name}.md").read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link to a heading may name, as GitHub writes it: lower case, hyphens for blanks, no other signs."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, root: Path = ROOT) -> list[str]:
    """Links and pictures that lead out of the repository, to no file, or to no heading."""
    dead = []
    for link in LINK.finditer(FENCED.sub("", page.read_text("utf-8"))):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        is_there = target.exists() and target.is_relative_to(root)
        if not is_there or (link["anchor"] and link["anchor"] not in anchors(target)):
            dead.append(f"{link['path']}#{link['anchor']}")
    return dead


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    assert dead_links(page) == []


def test_the_link_test_finds_what_is_dead(tmp_path: Path) -> None:
    page, root = tmp_path / "repository" / "page.md", tmp_path / "repository"
    root.mkdir()
    (tmp_path / "outside.md").touch()
    page.write_text(
        "# One `heading`, two words\n"
        "[good](page.md) [good](#one-heading-two-words) [good](https://example.org/#x) ![good](page.md)\n"
        "[dead](none.md) ![dead](none.png) <img src='none.svg'>\n"
        "[dead](#two) [dead](page.md#two) [dead](../outside.md)\n"
        "```\n# no heading\n[no link](none.md)\n```\n"
    )
    assert dead_links(page, root) == ["none.md#", "none.png#", "none.svg#", "#two", "page.md#two", "../outside.md#"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_mark_has_its_block(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(blocks(text)) == text.count("<!-- run")
    assert {block.language for block in blocks(text)} <= {"bash", "python"}


def test_the_runner_fails_on_a_command_that_fails(tmp_path: Path) -> None:
    page = "<!-- run, needs json -->\n```bash\nfalse | true\n```\n\n<!-- run -->\n```python\nassert 1 == 2\n```\n"
    first, second = blocks(page)
    assert first.needs == ("json",)
    assert run(first, tmp_path).returncode != 0
    assert "AssertionError" in run(second, tmp_path).stderr

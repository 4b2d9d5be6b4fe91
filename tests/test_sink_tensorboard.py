"""Event files are read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopmeter.config import MonitorConfig
from flopmeter.errors import MissingLibraryError
from flopmeter.schema import METRICS
from flopmeter.sinks import SinkContext, open_sink

KEYS = [metric.key.replace("<name>", "org/web") for metric in METRICS]


@pytest.fixture
def context(tmp_path: Path) -> SinkContext:
    pytest.importorskip("tensorboard", reason="needs flopmeter[tensorboard]")
    return SinkContext(config=MonitorConfig(), output_dir=tmp_path / "runs" / "mine")


def read(context: SinkContext) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(context.output_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def scalars(context: SinkContext, key: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(context).Scalars(key)]


def test_every_key_of_the_schema_comes_back_with_its_value_and_nothing_else_does(context: SinkContext) -> None:
    metrics = {key: index + 0.5 for index, key in enumerate(KEYS)}  # halves are exact in single precision
    sink = open_sink("tensorboard", context)
    sink.log(7, metrics)
    sink.close()
    tags = read(context).Tags()
    assert set(tags.pop("scalars")) == set(KEYS)
    assert not any(tags.values())
    assert {key: scalars(context, key) for key in KEYS} == {key: [(7, value)] for key, value in metrics.items()}


def test_a_key_has_points_only_at_the_steps_it_was_logged_at(context: SinkContext) -> None:
    sink = open_sink("tensorboard", context)
    for step in range(100):
        details = {"perf/mfu": 0.25} if step % 50 == 0 else {}
        sink.log(step, {"training/loss": float(step), **details})
    sink.close()
    assert scalars(context, "training/loss") == [(step, float(step)) for step in range(100)]
    assert scalars(context, "perf/mfu") == [(0, 0.25), (50, 0.25)]


def test_nan_and_infinity_and_numbers_past_single_precision_are_written(context: SinkContext) -> None:
    sink = open_sink("tensorboard", context)
    sink.log(1, {"training/loss": math.nan, "training/grad_norm": math.inf, "mine": -math.inf, "large": 1e300})
    sink.close()
    assert math.isnan(scalars(context, "training/loss")[0][1])
    assert scalars(context, "training/grad_norm") == [(1, math.inf)]
    assert scalars(context, "mine") == [(1, -math.inf)]
    assert scalars(context, "large") == [(1, math.inf)]


def test_what_was_logged_can_be_read_while_the_run_goes_on(context: SinkContext) -> None:
    sink = open_sink("tensorboard", context)
    sink.log(1, {"training/loss": 2.0})
    assert scalars(context, "training/loss") == [(1, 2.0)]
    sink.close()


def test_a_file_torn_in_its_last_event_keeps_the_others(context: SinkContext) -> None:
    sink = open_sink("tensorboard", context)
    for step in range(3):
        sink.log(step, {"training/loss": 2.0})
    sink.close()
    (path,) = (context.output_dir / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert scalars(context, "training/loss") == [(0, 2.0), (1, 2.0)]


def test_a_restart_at_an_earlier_step_adds_to_the_run_and_loses_nothing(context: SinkContext) -> None:
    for first in (0, 2):
        sink = open_sink("tensorboard", context)
        for step in range(first, first + 4):
            sink.log(step, {"training/loss": float(step)})
        sink.close()
    assert [step for step, _ in scalars(context, "training/loss")] == [0, 1, 2, 3, 2, 3, 4, 5]


def test_two_sinks_in_one_folder_write_two_files(context: SinkContext) -> None:
    sinks = [open_sink("tensorboard", context) for _ in range(2)]
    for sink in sinks:
        sink.log(1, {"training/loss": 2.0})
        sink.close()
    assert len(list((context.output_dir / "tensorboard").iterdir())) == 2


def test_closing_twice_is_harmless(context: SinkContext) -> None:
    sink = open_sink("tensorboard", context)
    sink.close()
    sink.close()
    assert len(list((context.output_dir / "tensorboard").iterdir())) == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from flopmeter.config import MonitorConfig
from flopmeter.sinks import SinkContext, open_sink

sink = open_sink("tensorboard", SinkContext(config=MonitorConfig(), output_dir=Path(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for step in range(100):
    try:
        sink.log(step, {"training/loss": 2.0})
    except OSError:
        sys.exit(0)
sys.exit("a hundred events in a thousand bytes?")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX's")
def test_a_disk_that_takes_no_more_is_an_error_and_not_silence(context: SinkContext) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(context.output_dir)], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


NO_TORCH = """
import sys
from pathlib import Path
from flopmeter.config import MonitorConfig
from flopmeter.sinks import SinkContext, open_sink

sink = open_sink("tensorboard", SinkContext(config=MonitorConfig(), output_dir=Path(sys.argv[1])))
sink.log(1, {"training/loss": 2.0})
sink.close()
print([name for name in ("torch", "tensorflow") if name in sys.modules])
"""


def test_neither_torch_nor_tensorflow_is_imported(context: SinkContext) -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH, str(context.output_dir)], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_the_command_in_the_docs_lists_what_was_logged(context: SinkContext) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "logging.md").read_text("utf-8")
    (command,) = re.findall(r"```console\ntensorboard (.*)\n```", page)
    sink = open_sink("tensorboard", context)
    sink.log(1, {"training/loss": 2.0})
    sink.close()
    done = subprocess.run(
        [sys.executable, "-m", "tensorboard.main", *command.split()],
        cwd=context.output_dir.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "scalars\n   training/loss\n" in done.stdout


def test_without_the_library_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'flopmeter\[tensorboard\]'"):
        open_sink("tensorboard", SinkContext(config=MonitorConfig(), output_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []

"""Does a delay show in its own part of the waterfall, in full, and in no other?

    python benchmarks/waterfall.py [--pairs 8] [--quick] [--record FILE]

One real run of a small GPT. In every other stretch of steps something sleeps for a known time: in the loader, in a copy
to the device, in the optimizer, in a pause, in the loop's own code. `Run.waterfall(start, stop)` splits each stretch,
which is compared with the one beside it; the figures are medians of the differences, in units of what was planted.
Stretches alternate within seconds, so that the machine's slow moments hit both. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, IterableDataset

from flopmeter import Run, load_run, watch
from flopmeter.demo import GPT, GPTConfig, SyntheticText
from flopmeter.waterfall import PART_NAMES
from outcome import add_record_option, finish

BENCHMARK_VERSION = 2
SIZES = GPTConfig(num_layers=2, hidden=128, num_heads=4, length=64)
BATCH_SIZE = 8
DELAY_S = 0.05
STRETCH = 16
START_STEPS = 40
"""The warm-up, the observed step and the first sampled one."""
PLANTED = ("data_wait", "host_to_device", "optimizer", "pauses", "unexplained")


class Late(IterableDataset[Any]):
    """Samples that come late while `delay_s` says so; one wait per batch."""

    def __init__(self) -> None:
        self.delay_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        samples = iter(DataLoader(SyntheticText(SIZES.length, 0), batch_size=BATCH_SIZE))
        while True:
            time.sleep(self.delay_s)
            yield next(samples)


class Training:
    """One run, with a place for each delay."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = GPT(SIZES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.late = Late()
        self.fault: str | None = None
        loader = DataLoader(self.late, batch_size=None)
        config = {"monitoring": {"sinks": [], "report": False}}
        self.monitor = watch(self.model, self.optimizer, loader, folder, config)
        self.optimizer.register_step_pre_hook(lambda *_: self._sleep("optimizer"))
        self._batches = iter(loader)

    def _sleep(self, fault: str) -> None:
        if self.fault == fault:
            time.sleep(DELAY_S)

    def step(self) -> None:
        self.late.delay_s = DELAY_S if self.fault == "data_wait" else 0.0
        batch = next(self._batches)
        with self.monitor.phase("host_to_device"):
            self._sleep("host_to_device")
        self.model(**batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.fault == "pauses":
            with self.monitor.pause("checkpoint"):
                time.sleep(DELAY_S)
        self._sleep("unexplained")


def train(folder: Path, num_pairs: int) -> dict[str, list[tuple[range, range]]]:
    """Positions of the stretches with and without each delay, after the run."""
    training = Training(folder)
    for _ in range(START_STEPS):
        training.step()
    stretches: dict[str, list[tuple[range, range]]] = {fault: [] for fault in PLANTED}
    for pair in range(num_pairs):
        for fault in PLANTED:
            places = {}
            for is_on in (True, False) if pair % 2 else (False, True):
                training.fault = fault if is_on else None
                first = training.monitor.num_steps
                for _ in range(STRETCH):
                    training.step()
                # What is planted between two steps falls to either; the first and the last are left out.
                places[is_on] = range(first + 1, training.monitor.num_steps - 1)
            stretches[fault].append((places[True], places[False]))
    training.fault = None
    training.monitor.finish_training()
    return stretches


def rises(run: Run, fault: str, stretches: list[tuple[range, range]]) -> dict[str, float]:
    """By part: how much more is spent on it for every delay that lies in the stretch, in units of the delay."""
    found: dict[str, list[float]] = {name: [] for name in PART_NAMES}
    for on, off in stretches:
        seconds = []
        for places in (on, off):
            split = run.waterfall(places.start, places.stop)
            num_delays = split.num_steps - (fault == "pauses")  # between the first step and the last is one fewer
            seconds.append({part.name: part.seconds / num_delays for part in split.parts})
        for name in found:
            found[name].append((seconds[0].get(name, 0.0) - seconds[1].get(name, 0.0)) / DELAY_S)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="stretches with and without each delay")
    parser.add_argument("--quick", "--short", action="store_true", help="one pair, to see that it runs")
    add_record_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stretches = train(Path(folder), 1 if arguments.quick else arguments.pairs)
        run = load_run(folder)
    found = {fault: rises(run, fault, stretches[fault]) for fault in PLANTED}
    table = Table(title=f"Rise of each part, planted = 1 ({DELAY_S * 1e3:g} ms a step)")
    for heading in ("part", *(f"in {fault}" for fault in PLANTED)):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for name in PART_NAMES:
        table.add_row(name, *(f"{found[fault][name]:.3f}" for fault in PLANTED))
    Console(width=120).print(table)
    own = {fault: found[fault][fault] for fault in PLANTED}
    others = {fault: max(abs(found[fault][name]) for name in PART_NAMES if name != fault) for fault in PLANTED}
    figures = {"delay_s": DELAY_S, "own": own, "largest_other": others, "rises": found}
    finish("waterfall", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()

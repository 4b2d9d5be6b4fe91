"""How often is the diagnosis right? Every planted fault at random sizes, and what removing it really brought.

    python benchmarks/planted.py [--seconds 15] [--runs 3] [--plants slow_disk,fp64] [--workloads gpt,conv,hf]
                                 [--none-runs 20] [--pairs 10] [--loops sleep,item] [--quick]
                                 [--record benchmarks/results/planted.json]

Each run with a fault stands between two twins without it, half as long, in the same setting: the work per second with
the fault and the mean of that without say what it really cost, also on a machine that gets slower or faster meanwhile.
The rules' thresholds were set on the GPT; the other workloads only score them. Text is compared by tokens that are not
padding, images by samples. Ordinary loops (`ordinary_loops.py`) have no fault in them: one that is accused of what it
does in passing is a false alarm. On a machine that is busy with other things, `cpu_contention` is true of every run:
then the finding after it is judged, and the run counts as starved. Training has one thread, so that a loader that
computes does not take it away. Sizes come from a fixed seed. The last line printed is JSON; failures are in it.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flopmeter import load_run
from flopmeter.diagnosis import Finding, diagnose
from flopmeter.record import Run
from ordinary_loops import TRUTH
from outcome import add_record_option, finish
from plant_training import run_demo
from plants import PLANTS, WORKLOADS, Plant, Planted, WorkloadName, find_plant

BENCHMARK_VERSION = 4
SEED = 20
TUNED_ON = "gpt"
NONE = "none"
MAX_GAIN_ERROR = 0.3
MIN_STEPS = 40
"""Also on a busy machine: the first steps warm up and are observed, and one is profiled."""
QUIET: dict[str, dict[str, list[str]]] = {"monitoring": {"sinks": []}}
UNEVEN = {"gc_storm"}
"""Faults that hit some steps and not others: their mean counts, not their median."""
LOOP = "loop"
STARVED = "cpu_contention"
BUSY_SECONDS = 30.0
"""The process's CPU time is sampled every ten seconds, and its first sample has no rate."""
ALONE = (NONE, "tiny_batch")
"""Not for pairs: the one is no fault, the other changes all sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What to run."""

    workload: WorkloadName
    """The model."""
    faults: tuple[tuple[str, float], ...]
    """Plants and sizes; more than one in a pair."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of a trial."""

    workload: str
    """The model."""
    planted: dict[str, float]
    """Faults and sizes."""
    wanted: list[str]
    """Rules that would be right as the first verdict."""
    verdict: str = ""
    """The first finding."""
    findings: list[tuple[str, float | None]] = field(default_factory=list)
    """All rules that found something, with the gain that they predict."""
    twin_verdict: str = ""
    """The first finding of the runs without the faults: of the one that is not healthy, if any."""
    real_gain: float | None = None
    """Work per second without the faults over that with them, minus one."""
    is_starved: bool = False
    """Whether the machine kept the run from its core, and the verdict is the finding after that."""
    num_steps: int = 0
    """Steady steps of the run with the faults."""
    error: str = ""
    """Why there is no verdict."""

    @property
    def is_right(self) -> bool:
        """Whether the first verdict names a planted fault."""
        return self.verdict in self.wanted

    @property
    def predicted_gain(self) -> float | None:
        """What the rule that was wanted predicts."""
        return next((gain for rule, gain in self.findings if rule in self.wanted), None)


def trials(arguments: argparse.Namespace) -> Iterator[Trial]:
    """All runs, in an order that spreads each plant over the time."""
    draw = random.Random(SEED)
    plants = [find_plant(name) for name in arguments.plants]
    for _ in range(arguments.runs):
        for plant in plants:
            for workload in arguments.workloads:
                if plant.name != NONE and workload in plant.workloads:
                    yield Trial(workload=workload, faults=(_drawn(plant, draw),))
    if NONE in arguments.plants:
        for number in range(arguments.none_runs):
            workload = arguments.workloads[number % len(arguments.workloads)]
            yield Trial(workload=workload, faults=((NONE, 1.0),))
    single = [plant for plant in plants if plant.num_ranks == 1 and plant.name not in ALONE]
    pairs = list(combinations(single, 2))
    for one, other in draw.sample(pairs, min(arguments.pairs, len(pairs))):
        shared = [name for name in arguments.workloads if name in one.workloads and name in other.workloads]
        if shared:
            faults = (_drawn(one, draw), _drawn(other, draw))
            yield Trial(workload=draw.choice(shared), faults=faults)


def _drawn(plant: Plant, draw: random.Random) -> tuple[str, float]:
    return plant.name, draw.uniform(*plant.sizes)


def run_trial(trial: Trial, seconds: float, min_steps: int, folder: Path) -> Outcome:
    """Train with the faults, and without them before and after, and compare."""
    plants = [find_plant(name) for name, _ in trial.faults]
    outcome = Outcome(workload=trial.workload, planted=dict(trial.faults), wanted=[plant.rule for plant in plants])

    def train(name: str, *, is_on: bool) -> Run:
        planted = [Planted(plant, size, is_on) for plant, (_, size) in zip(plants, trial.faults, strict=True)]
        share = 1.0 if is_on else 0.5
        gc.collect()  # what the run before has left is not this one's garbage
        run_demo(
            folder / name, seconds * share, QUIET, workload=trial.workload, planted=planted,
            min_steps=round(min_steps * share),
        )  # fmt: skip
        return load_run(folder / name)

    try:
        if trial.faults[0][0] == NONE:
            _judge(outcome, train("faulty", is_on=True), ())
        else:
            before = train("before", is_on=False)
            faulty = train("faulty", is_on=True)
            _judge(outcome, faulty, (before, train("after", is_on=False)))
    except Exception as error:  # noqa: BLE001 - a trial that fails is a result, and must not end the others
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def run_loop(kind: str, seconds: float, folder: Path) -> Outcome:
    """An ordinary loop under `flopmeter run`, as its own process."""
    outcome = Outcome(workload=LOOP, planted={kind: 1.0}, wanted=list(TRUTH[kind]))
    length_s = max(seconds, BUSY_SECONDS) if kind == "busy" else seconds
    program = Path(__file__).with_name("ordinary_loops.py")
    command = [sys.executable, "-m", "flopmeter", "run", "-o", str(folder), str(program), kind, str(length_s)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        _judge(outcome, load_run(folder), ())
    except Exception as error:  # noqa: BLE001 - a trial that fails is a result, and must not end the others
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def _judge(outcome: Outcome, faulty: Run, twins: Sequence[Run]) -> None:
    found = diagnose(faulty).findings
    outcome.findings = [(finding.rule, finding.gain.expected if finding.gain else None) for finding in found]
    outcome.verdict = _verdict(found, outcome.wanted)
    outcome.is_starved = outcome.verdict != (found[0].rule if found else "nothing")
    outcome.num_steps = len(faulty.steady())
    if twins:
        verdicts = [_verdict(diagnose(twin).findings, ()) for twin in twins]
        outcome.twin_verdict = next((verdict for verdict in verdicts if verdict != "healthy"), "healthy")
        typical = fmean if UNEVEN & outcome.planted.keys() else median
        without = fmean(work_per_s(twin, typical) for twin in twins)
        outcome.real_gain = without / work_per_s(faulty, typical) - 1


def _verdict(found: Sequence[Finding], wanted: Sequence[str]) -> str:
    """The first finding; on a starved machine the one after that, unless starving was the fault."""
    own = [finding.rule for finding in found if finding.rule != STARVED or STARVED in wanted]
    return own[0] if own else "healthy" if found else "nothing"


def work_per_s(run: Run, typical: Callable[[Iterable[float]], float]) -> float:
    """Tokens (else samples) per second of a typical step and its share of the pauses, ours left out.

    The median one where it can be, because the runs come one after the other: a slow moment of the machine hits one of
    them.
    """
    steady = run.steady()
    step_s, rate = run.column("perf/step_time"), run.column("perf/tokens_per_second")
    if rate[steady[0]] != rate[steady[0]]:
        rate = run.column("perf/samples_per_second")
    pauses = [event for event in run.events if event["event"] == "pause" and event["name"] != "flopmeter"]
    pause_s = sum(event["duration_s"] for event in pauses) * len(steady) / len(run)
    total_s = len(steady) * typical(step_s[at] for at in steady) + pause_s
    return float(sum(rate[at] * step_s[at] for at in steady) / total_s)


def summarise(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Shares of right verdicts and of right gains; trials without a verdict count as wrong."""
    loops = [outcome for outcome in outcomes if outcome.workload == LOOP]
    single = [outcome for outcome in outcomes if len(outcome.planted) == 1 and outcome.workload != LOOP]
    faults = [outcome for outcome in single if NONE not in outcome.planted]
    healthy = [outcome for outcome in single if NONE in outcome.planted]
    pairs = [outcome for outcome in outcomes if len(outcome.planted) > 1]
    gains = gains_by_plant(faults)
    return {
        "right": _share(faults),
        "right_by_workload": {name: _share([o for o in faults if o.workload == name]) for name in WORKLOADS},
        "right_where_not_tuned": _share([o for o in faults if o.workload != TUNED_ON]),
        "false_alarms": [sum(not o.is_right for o in healthy), len(healthy)],
        "twin_false_alarms": [sum(o.twin_verdict != "healthy" for o in faults if o.twin_verdict), len(faults)],
        "right_pairs": _share(pairs),
        "right_loops": _share(loops),
        "gains": gains,
        "plants_with_right_gain": [sum(bool(row["is_right"]) for row in gains.values()), len(gains)],
        "starved": [sum(outcome.is_starved for outcome in outcomes), len(outcomes)],
        "failed": [outcome.error for outcome in outcomes if outcome.error],
    }


def _share(outcomes: Sequence[Outcome]) -> list[int]:
    """Right ones, and all."""
    return [sum(outcome.is_right for outcome in outcomes), len(outcomes)]


def gains_by_plant(outcomes: Sequence[Outcome]) -> dict[str, dict[str, object]]:
    """Predicted over real gain: the median over a plant's runs, and whether that is near enough."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        (name,) = outcome.planted
        if outcome.real_gain and outcome.predicted_gain is not None:
            ratios[name].append(outcome.predicted_gain / outcome.real_gain)
        else:
            ratios[name] += []
    return {
        name: {
            "predicted_over_real": median(found) if found else None,
            "num_runs": len(found),
            "is_right": bool(found) and abs(median(found) - 1) <= MAX_GAIN_ERROR,
        }
        for name, found in ratios.items()
    }


def show(outcomes: Sequence[Outcome], summary: dict[str, object]) -> None:
    console = Console(width=160)
    matrix: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        matrix[" + ".join(outcome.planted)][outcome.verdict or "failed"] += 1
    verdicts = sorted({verdict for row in matrix.values() for verdict in row})
    table = Table(title="Planted (rows) and first verdict (columns)")
    for heading in ("", *verdicts):
        table.add_column(heading, justify="left" if not heading else "right")
    for planted, row in matrix.items():
        table.add_row(planted, *(str(row[verdict] or "") for verdict in verdicts))
    console.print(table)
    console.print(_gain_table(outcomes))
    for key, value in summary.items():
        if key != "gains":
            console.print(f"{key}: {value}")


def _gain_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Gain: predicted, and had when the fault was removed")
    for heading in ("planted", "workload", "size", "verdict", "predicted", "real", "steps"):
        table.add_column(heading, justify="left" if heading in ("planted", "workload", "verdict") else "right")
    for outcome in outcomes:
        sizes = ", ".join(f"{size:.3g}" for size in outcome.planted.values())
        gains = ("-" if gain is None else f"{gain:+.0%}" for gain in (outcome.predicted_gain, outcome.real_gain))
        verdict = outcome.error[:40] or outcome.verdict
        table.add_row(
            " + ".join(outcome.planted), outcome.workload, sizes, verdict, *gains, str(outcome.num_steps)
        )  # fmt: skip
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run; twice as much for a fault")
    parser.add_argument("--min-steps", type=int, default=MIN_STEPS, help="of each run, however long they take")
    parser.add_argument("--runs", type=int, default=3, help="of every plant on every workload")
    parser.add_argument("--none-runs", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10, help="runs with two faults")
    parser.add_argument("--plants", type=_names, default=[plant.name for plant in PLANTS])
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS))
    parser.add_argument("--loops", type=_names, default=list(TRUTH), help="ordinary loops; - for none")
    parser.add_argument("--quick", action="store_true", help="two plants for a few steps, to see that it runs")
    add_record_option(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.runs, arguments.none_runs, arguments.pairs = 2.0, 1, 1, 1
        arguments.min_steps = 20
        arguments.plants, arguments.workloads, arguments.loops = [NONE, "padding", "fp64"], [TUNED_ON], ["item"]
    return arguments


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    arguments = parse()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    todo = list(trials(arguments))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("Planting", total=len(todo))
        for number, trial in enumerate(todo):
            outcomes.append(run_trial(trial, arguments.seconds, arguments.min_steps, Path(folder) / str(number)))
            bar.update(task, advance=1, description=f"{outcomes[-1].planted} -> {outcomes[-1].verdict or 'failed'}")
        for kind in TRUTH.keys() & set(arguments.loops):
            outcomes.append(run_loop(kind, arguments.seconds, Path(folder) / kind))
    summary = summarise(outcomes)
    show(outcomes, summary)
    listed = [asdict(outcome) for outcome in outcomes]
    figures = {"seconds": arguments.seconds, "seed": SEED, **summary, "outcomes": listed}
    finish("planted", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()

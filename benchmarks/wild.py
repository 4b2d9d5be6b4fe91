"""Is the first sentence right on programs that nobody here wrote? Public training programs, each with its truth.

    python benchmarks/wild.py /path/to/programs [--only NAME,NAME] [--truth] [--again] [--list]
                              [--work FOLDER] [--record benchmarks/results/wild.json]
    python benchmarks/wild.py --short            # one recipe of our own: what CI runs

`/path/to/programs` holds checked-out public repositories, one folder each, under the names in `wild_recipes.py`; their
commits are recorded and nothing of them is part of this project. They run with the Python that runs this file, which
therefore needs what they import; without a network, on one thread, on synthetic data that the recipe makes.

A recipe says how to run a program, and its truth. The truth is written before our verdict is seen: `--truth` runs a
program plain, then with the suspected cause removed ("twin"), or, where there is none to remove, four steps under
torch.profiler ("reading"), and shows times and shares; flopmeter is not asked. From that a person writes `truth` and
`right` into the recipe. A cause is either the program's own (`removal` takes it out) or was put in by the recipe
(`cause`, and the twin is the program as it is). Steps are timed by `wild_clock/`, which knows nothing of flopmeter.

Recipes are marked `chosen="before"` or `"after"`. The "after" third keeps us honest: once the rules are frozen, pick
programs that were never run with us, run each with `--truth`, write its truth down, commit that, and only then run it
without `--truth`. The summary counts both parts apart.

Runs are kept in `--work` and not repeated while recipe and commit are the same; runs with us are repeated when `src/`
has changed; one that fails is tried again the next time. A verdict is *right* when its first finding is one that the
recipe names, *undetermined* when it says so itself, *not judged* where the recipe names none, and else *wrong*. That
the process was kept from its core is true of a run and not of a program: where our clock says so too, the finding
after that is judged, and where it does not, that verdict is wrong. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from flopmeter import load_run
from flopmeter.diagnosis import diagnose
from outcome import ROOT, add_record_option, finish, source
from wild_recipes import OWN, RECIPES, Recipe, Variant

BENCHMARK_VERSION = 2
CLOCK = ROOT / "benchmarks" / "wild_clock"
TIMEOUT_S = 480
FIRST_STEADY = 15
"""Steps before this one start up, or are those that flopmeter samples first: left out of all times."""
MAX_GAIN_ERROR, MAX_MFU_ERROR = 0.05, 0.02
STARVED = 0.1
"""Share of its time for which a thread waits for a core, by our clock, from which on it is kept from it."""
TIMES = re.compile(r"\d+(?:\.\d+)?(?=\s*(?:ms|s|it/s|sec|seconds)\b)")


@dataclass(kw_only=True, slots=True)
class Done:
    """What one run of a program left."""

    exit_code: int
    """The program's own; -9 when it was ended for taking too long."""
    num_steps: int = 0
    """Cycles of all its optimizers, by our clock."""
    step_s: float | None = None
    """Mean wall time of a step behind the first ones."""
    median_s: float | None = None
    """The same, median."""
    step_cpu_s: float | None = None
    """Mean CPU time of the process in a step."""
    median_cpu_s: float | None = None
    """The same, median: where ours is longer than plain, that is what we cost in an ordinary step."""
    waited: float | None = None
    """Share of its time for which the training thread waited for a core, as Linux tells it."""
    losses: list[str] = field(default_factory=list)
    """What the recipe's pattern found in the output."""
    reading: dict[str, Any] = field(default_factory=dict)
    """Shares under torch.profiler."""
    tail: str = ""
    """The end of stderr, of a run that failed."""


def run(recipe: Recipe, which: str, programs: Path, work: Path, *, again: bool, kept: bool = False) -> Done:
    """Run a program in one of four ways, plain, twin, reading or ours, unless that was done before.

    With `kept` a run on file stands, whatever has changed since: the same record is read by other rules.
    """
    place = work / recipe.name / which
    stamp = hashlib.sha256(repr((recipe.how_to_run(), commit(recipe, programs))).encode()).hexdigest()
    stamp += str(source()) if which == "ours" else ""
    on_file = place / "done.json"
    if on_file.is_file() and not again:
        found = json.loads(on_file.read_text("utf-8"))
        if found.pop("stamp") == stamp or kept:
            done = Done(**found)
            _time(done, place)
            return done
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(
        home(recipe, programs) / recipe.copied, place / "program",
        ignore=shutil.ignore_patterns(".git", "*.ipynb", "*.png", "*.jpg", "*.gif"), ignore_dangling_symlinks=True,
    )  # fmt: skip
    variant = recipe.removal if which == "twin" else recipe.cause
    for edit in (*recipe.edits, *variant.edits):
        edit.apply(place / "program")
    if recipe.data is not None:
        recipe.data(place / "program")
    done = _started(recipe, which, variant, place)
    shutil.rmtree(place / "program")
    if not done.exit_code:
        on_file.write_text(json.dumps({"stamp": stamp, **asdict(done)}, indent=1), encoding="utf-8")
    return done


def _started(recipe: Recipe, which: str, variant: Variant, place: Path) -> Done:
    ours = ["-m", "flopmeter", "run", "-o", str(place / "run")] if which == "ours" else []
    command = [sys.executable, *ours]
    if recipe.ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={recipe.ranks}", *ours]
    script = str(place / "program" / recipe.folder / recipe.script)
    words = [*recipe.arguments, *variant.arguments]
    command += [script, *(word.replace("{program}", str(place / "program")) for word in words)]
    paths = [CLOCK, ROOT / "src", *(place / "program" / part for part in recipe.on_path)]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(place), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONHASHSEED": "0", "WILD_CLOCK": str(place / "clock.json"),
        "CUDA_VISIBLE_DEVICES": "", "SDL_VIDEODRIVER": "dummy", **(recipe.environment or {}),
    }  # fmt: skip
    if which == "reading":
        environment |= {"WILD_READING": str(place / "reading.json"), "WILD_READ_STEPS": str(recipe.read_steps)}
    with (place / "out").open("w+b") as out, (place / "err").open("w+b") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            cwd=place / "program" / recipe.folder,
        )  # fmt: skip
        try:
            exit_code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            exit_code = -9
        finally:
            with contextlib.suppress(ProcessLookupError):  # its group ends with it, as a rule
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = "".join((place / name).read_text("utf-8", "replace") for name in ("out", "err"))
    done = Done(
        exit_code=exit_code, losses=[TIMES.sub("-", str(found)) for found in re.findall(recipe.losses, printed)]
    )
    if exit_code != 0:
        done.tail = (place / "err").read_text("utf-8", "replace")[-600:]
    _time(done, place)
    if (place / "reading.json").is_file():
        done.reading = json.loads((place / "reading.json").read_text())
    return done


def _marks(place: Path) -> list[list[float]]:
    """When each step ended, in wall and CPU time and in time waited for a core. A step is a cycle of all optimizers: of
    the one that steps least."""
    steps: list[list[float]] = json.loads((place / "clock.json").read_text())
    counts = Counter(optimizer for optimizer, *_ in steps)
    rarest = min(counts, key=lambda optimizer: counts[optimizer])
    return [times for optimizer, *times in steps if optimizer == rarest]


def _time(done: Done, place: Path) -> None:
    """Put the times of the steps in, where the program came to any."""
    if not (place / "clock.json").is_file():
        return
    marks = _marks(place)
    done.num_steps = len(marks)
    marks = marks[min(FIRST_STEADY, len(marks) // 3) :]
    if len(marks) > 1:
        done.median_s, done.median_cpu_s = (median(b[at] - a[at] for a, b in pairwise(marks)) for at in (0, 1))
        done.step_s, done.step_cpu_s = ((marks[-1][at] - marks[0][at]) / (len(marks) - 1) for at in (0, 1))
        if len(marks[0]) > 2:
            done.waited = (marks[-1][2] - marks[0][2]) / (marks[-1][0] - marks[0][0])


def home(recipe: Recipe, programs: Path) -> Path:
    """Where the program lies: beside the project, or in it."""
    return ROOT / "tests" / "programs" if recipe is OWN else programs / recipe.repository


def commit(recipe: Recipe, programs: Path) -> str:
    """Git's name of what was checked out."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=home(recipe, programs),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def judge(recipe: Recipe, programs: Path, work: Path, **how: bool) -> dict[str, Any]:
    """Run plain, with the cause removed and with us, and say what came of it."""
    plain = run(recipe, "plain", programs, work, **how)
    twin = run(recipe, "twin", programs, work, **how) if recipe.has_twin else None
    ours = run(recipe, "ours", programs, work, **how)
    if -9 in (plain.exit_code, ours.exit_code):
        raise TimeoutError(f"it took longer than {TIMEOUT_S} s")
    in_order = sorted if recipe.ranks > 1 else list  # ranks print as they come
    row: dict[str, Any] = {
        "name": recipe.name, "commit": commit(recipe, programs), "kind": recipe.kind, "chosen": recipe.chosen,
        "fault_put_in": recipe.has_fault, "truth": recipe.truth, "right": sorted(recipe.right),
        "exit_code": ours.exit_code, "same_exit_code": plain.exit_code == ours.exit_code,
        "same_losses": in_order(plain.losses) == in_order(ours.losses) != [], "num_losses": len(plain.losses),
        "steps": plain.num_steps, "steps_with_us": ours.num_steps, "verdict": "", "judged": "not judged",
        "waited": plain.waited, "waited_with_us": ours.waited, "is_starved": False,
        "step_s": plain.step_s, "step_s_with_us": ours.step_s,
        "step_cpu_s": plain.median_cpu_s, "step_cpu_s_with_us": ours.median_cpu_s,
        "real_gain": gain(recipe, plain, twin), "predicted_gain": None, "mfu": None, "mfu_over_hand": None,
    }  # fmt: skip
    folder = work / recipe.name / "ours" / "run"
    if not (folder / "run.jsonl").is_file():
        return row | {"verdict": "no run file"}
    found = diagnose(load_run(folder))
    names = [finding.rule for finding in found.findings] or ["nothing"]
    first, is_starved = own_verdict(names, ours.waited)
    gains = [finding.gain.expected for finding in found.findings if finding.rule in recipe.right and finding.gain]
    row |= {
        "verdict": first, "headline": found.headline, "mfu": found.mfu, "judged": judged(recipe, first),
        "findings": names, "is_starved": is_starved, "predicted_gain": next(iter(gains), None),
        "steps_recorded": found.waterfall.num_steps,
    }  # fmt: skip
    row["mfu_over_hand"] = mfu_over_hand(recipe, folder.parent)
    return row


def own_verdict(findings: Sequence[str], waited: float | None) -> tuple[str, bool]:
    """What is said of the program, and whether that it was kept from its core, said before, is true by our clock."""
    is_starved = findings[0] == "cpu_contention" and (waited or 0.0) >= STARVED
    return findings[1] if is_starved and len(findings) > 1 else findings[0], is_starved


def judged(recipe: Recipe, verdict: str) -> str:
    """How a finding does against the truth."""
    if not recipe.right:
        return "not judged"
    return "right" if verdict in recipe.right else "undetermined" if verdict == "undetermined" else "wrong"


def gain(recipe: Recipe, plain: Done, twin: Done | None) -> float | None:
    """How much faster it is without the cause; by CPU time, since the machine is shared, unless the cause is a wait."""
    if twin is None:
        return None
    with_it, without = (done.step_s if recipe.clock == "wall" else done.step_cpu_s for done in (plain, twin))
    return with_it / without - 1 if with_it and without else None


def mfu_over_hand(recipe: Recipe, place: Path) -> float | None:
    """MFU as recorded over FLOPs by hand and our clock, step by step: the median. The peak drops out."""
    if recipe.flop_per_step is None:
        return None
    record, marks = load_run(place / "run"), _marks(place)
    flop, step_s = (record.column(f"perf/{name}") for name in ("model_flop", "step_time"))
    ratios = [
        flop[at] / step_s[at] * (marks[number - 1][0] - marks[number - 2][0]) / recipe.flop_per_step
        for at in record.steady()
        if 2 <= (number := record.step[at]) <= len(marks)
    ]
    return median(ratios) if ratios else None


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the judged runs, all and by when they were chosen; and what must not happen."""

    def shares(some: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found = Counter(row["judged"] for row in some)
        total = sum(found.values()) - found["not judged"]
        return {"runs": len(some), **found} | {
            f"{name} %": round(100 * found[name] / total, 1) for name in ("right", "wrong", "undetermined") if total
        }

    both = [row for row in rows if row["real_gain"] is not None and row["predicted_gain"] is not None]
    by_hand = [row["mfu_over_hand"] for row in rows if row["mfu_over_hand"] is not None]
    return {
        "all": shares(rows),
        "chosen_after": shares([row for row in rows if row["chosen"] == "after"]),
        "faults_put_in": shares([row for row in rows if row["fault_put_in"]]),
        "starved": [row["name"] for row in rows if row["is_starved"]],
        "kinds": len({row["kind"] for row in rows}),
        "gain_right": [sum(is_gain_right(row) for row in both), len(both)],
        "mfu_right": [sum(abs(found - 1) <= MAX_MFU_ERROR for found in by_hand), len(by_hand)],
        "other_exit_code": [row["name"] for row in rows if not row["same_exit_code"]],
        "other_losses": [row["name"] for row in rows if not row["same_losses"]],
        "other_steps": [row["name"] for row in rows if row["steps"] != row["steps_with_us"]],
    }


def is_gain_right(row: dict[str, Any]) -> bool:
    """A promise may be too high by as much as the gain itself or five points, whichever is more."""
    excess: float = row["predicted_gain"] - row["real_gain"]
    return excess <= max(row["real_gain"], MAX_GAIN_ERROR)


def show_truth(recipe: Recipe, programs: Path, work: Path, console: Console, *, again: bool) -> None:
    """What is needed to write a truth down: flopmeter has no part in it."""
    for which in ("plain", "twin" if recipe.has_twin else "reading"):
        done = run(recipe, which, programs, work, again=again)
        times = [f"{1e3 * s:.1f} ms" if s else "-" for s in (done.step_s, done.median_s, done.step_cpu_s)]
        console.print(
            f"{recipe.name} {which}: exit {done.exit_code}, {done.num_steps} steps, mean {times[0]}, median {times[1]},"
            f" CPU {times[2]}, {len(done.losses)} losses {done.losses[:2]}",
            done.tail, done.reading, markup=False,
        )  # fmt: skip


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="Verdicts on programs from elsewhere (CPU)")
    headings = (
        "program",
        "kind",
        "truth",
        "verdict",
        "judged",
        "gain: predicted, real",
        "MFU over hand",
        "exit",
        "losses",
    )
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        gains = ", ".join("-" if row[key] is None else f"{row[key]:+.0%}" for key in ("predicted_gain", "real_gain"))
        by_hand = "-" if row["mfu_over_hand"] is None else f"{row['mfu_over_hand']:.3f}"
        same = ("same" if row[key] else "OTHER" for key in ("same_exit_code", "same_losses"))
        table.add_row(
            f"{row['name']} @{row['commit']}", row["kind"], row["truth"][:60], row["verdict"], row["judged"], gains,
            by_hand, *same,
        )  # fmt: skip
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path, nargs="?", help="the folder of the repositories")
    parser.add_argument("--only", type=lambda text: text.split(","), help="these recipes")
    parser.add_argument("--truth", action="store_true", help="measure what a truth is written from; no verdicts")
    parser.add_argument("--again", action="store_true", help="repeat runs that were done before")
    parser.add_argument("--kept", action="store_true", help="only runs on file, whatever has changed: judge anew")
    parser.add_argument("--short", action="store_true", help="one recipe of our own")
    parser.add_argument("--list", action="store_true", help="name the recipes")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "flopmeter-wild")
    add_record_option(parser)
    return parser.parse_args()


def main() -> None:
    arguments, console = parse(), Console(width=200)
    recipes = [OWN] if arguments.short else [r for r in RECIPES if not arguments.only or r.name in arguments.only]
    if arguments.list:
        for recipe in recipes:
            console.print(
                f"{recipe.name}: {recipe.repository}/{recipe.folder}/{recipe.script} ({recipe.kind})", markup=False
            )
        return
    programs = arguments.programs
    if not arguments.short and (programs is None or not programs.is_dir()):
        sys.exit("no programs at hand: name the folder that holds the public repositories, or use --short")
    programs = (programs or ROOT).resolve()
    missing = [recipe.name for recipe in recipes if not (home(recipe, programs) / recipe.copied).is_dir()]
    for name in missing:
        console.print(f"{name}: no copy of its repository at hand")
    rows, failed = [], []
    work = arguments.work.resolve()
    for recipe in recipes:
        if recipe.name in missing or (arguments.kept and not (work / recipe.name / "ours" / "done.json").is_file()):
            continue
        try:
            if arguments.truth:
                show_truth(recipe, programs, work, console, again=arguments.again)
                continue
            rows.append(judge(recipe, programs, work, again=arguments.again, kept=arguments.kept))
        except Exception as error:  # noqa: BLE001 - one that cannot be judged must not end the others
            failed.append(f"{recipe.name}: {type(error).__name__}: {error}")
            console.print(failed[-1], markup=False)
            continue
        console.print(f"{recipe.name}: {rows[-1]['verdict']} ({rows[-1]['judged']})", markup=False)
    if not arguments.truth:
        show(rows, console)
        summary = summarise(rows)
        console.print(summary)
        told = {"label": "CPU", **summary, "missing": missing, "failed": failed, "rows": rows}
        finish("wild", BENCHMARK_VERSION, told, arguments.record)


if __name__ == "__main__":
    main()

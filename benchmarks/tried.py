"""Does `flopmeter try` tell the truth? On public programs: what it predicts and measures, what an edit then brings.

    python benchmarks/tried.py /path/to/programs [--only NAME,NAME] [--work FOLDER] [--budget 4m] [--again]
                               [--kept] [--record benchmarks/results/tried.json]
    python benchmarks/tried.py --short           # a program of our own, half a minute: what CI runs

`/path/to/programs` holds checked-out public repositories as for `wild.py`, whose recipes these are, only longer.
Each is tried within the budget, with no edit. Then the best change that does no harm is applied by hand: by the edit or
the argument that a user would write, listed here; the program runs as it is and with the edit in turns, timed by
`wild_clock/`, which knows nothing of flopmeter. The gain really had lies inside the stated interval, or it does not.
The demo's faults are tried, too; nothing of the package is edited by hand.

What was done is kept in `--work` and not repeated while `src/flopmeter/trials` is the same, which a row's `stamp`
names; `--kept` takes all that is on file. Programs have one thread, so that other programs on the machine disturb less.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from outcome import ROOT, add_record_option, finish
from wild import CLOCK, commit, home
from wild_recipes import RECIPES, Edit, Recipe, Variant

BENCHMARK_VERSION = 1
HAND_ROUNDS, HAND_STEPS, LEFT_OUT = 3, 60, 15
"""Runs of each kind, their steps, and how many of these are left out at the start."""
NARROW_POINTS, NARROW_SHARE = 0.05, 0.25
"""An interval is narrow within five points, or a quarter of the gain, on either side."""


@dataclass(frozen=True)
class Program:
    """A recipe of `wild.py`, made longer, and what a user would write for each change."""

    recipe: str
    longer: tuple[str, ...] = ()
    """Arguments behind the recipe's, so that the program does not end by itself: the last one counts."""
    edits: tuple[Edit, ...] = ()
    by_hand: dict[str, Variant] = field(default_factory=dict)
    """By change."""


def in_bf16(file: str, *lines: str) -> Variant:
    """The lines, each given by its pattern, under autocast."""
    block = r"\n".join(rf"(?P<b{at}>[ \t]+){line}" for at, line in enumerate(lines))
    body = r"\n".join(rf"\g<b{at}>    {line.replace(chr(92), '')}" for at, line in enumerate(lines))
    return Variant((Edit(file, "^" + block + "$", rf"\g<b0>with torch.autocast('cpu', torch.bfloat16):\n{body}"),))


def said(*words: str) -> Variant:
    """Arguments behind the others: the last one counts."""
    return Variant(arguments=words)


def edit(file: str, pattern: str, text: str) -> Variant:
    """One place."""
    return Variant((Edit(file, pattern, text),))


WORKERS = "num_workers=4, persistent_workers=True, prefetch_factor=4"
TRAINER = {
    "bf16": said("--bf16", "True"),
    "compile": said("--torch_compile", "True"),
    "loader_workers": said("--dataloader_num_workers", "4", "--dataloader_persistent_workers", "True",
                           "--dataloader_prefetch_factor", "4"),
    "larger_batch": said("--per_device_train_batch_size", "8"),
    "no_checkpointing": said("--gradient_checkpointing", "False"),
    "fused_optimizer": said("--optim", "adamw_torch_fused"),
}  # fmt: skip
MNIST = {
    "bf16": in_bf16("mnist/main.py", r"output = model\(data\)", r"loss = F\.nll_loss\(output, target\)"),
    "compile": edit("mnist/main.py", r"^(\s+)model = Net\(\)\.to\(device\)", r"\g<0>\n\1model.compile()"),
    "loader_workers": edit("mnist/main.py", r"^    train_kwargs = \{", f"    train_kwargs = dict({WORKERS}) | {{"),
    "larger_batch": said("--batch-size", "128"),
}
PROGRAMS = (
    Program(
        "nanogpt", ("--max_iters=100000",),
        by_hand={
            "bf16": Variant(
                (Edit("train.py", r"nullcontext\(\) if device_type == 'cpu' else ", ""),), ("--dtype=bfloat16",)
            ),
            "compile": said("--compile=True"),
            "fused_optimizer": edit("model.py", r"fused_available and device_type == 'cuda'", "True"),
        },
    ),
    Program(
        "mingpt_chargpt", ("--trainer.max_iters=100000",),
        by_hand={
            "bf16": in_bf16("mingpt/trainer.py", r"logits, self\.loss = model\(x, y\)"),
            "compile": edit("mingpt/trainer.py", r"^(\s+)model, config = self.*$", r"\g<0>\n\1model.compile()"),
            "fused_optimizer": edit("mingpt/model.py", r"AdamW\(optim_groups, ", r"\g<0>fused=True, "),
            "loader_workers": said("--trainer.num_workers=4"),
            "larger_batch": said("--trainer.batch_size=8"),
        },
    ),
    Program("examples_mnist", ("--epochs", "1000"), by_hand=MNIST),
    Program("examples_mnist_slow_disk", ("--epochs", "1000"), by_hand=MNIST),
    Program(
        "examples_vae", ("--epochs", "1000"),
        by_hand={
            "bf16": in_bf16(
                "vae/main.py", r"recon_batch, mu, logvar = model\(data\)",
                r"loss = loss_function\(recon_batch, data, mu, logvar\)",
            ),
            "compile": edit("vae/main.py", r"^model = VAE\(\)\.to\(device\)", r"\g<0>\nmodel.compile()"),
            "loader_workers": edit("vae/main.py", r"^kwargs = .*$", f"kwargs = dict({WORKERS})"),
            "larger_batch": said("--batch-size", "256"),
            "fused_optimizer": edit("vae/main.py", r"lr=1e-3\)", "lr=1e-3, fused=True)"),
        },
    ),
    Program("hf_run_clm", ("--max_steps", "100000"), by_hand=TRAINER),
    Program("trl_sft", ("--max_steps", "100000"), by_hand=TRAINER),
    Program(
        "timm_resnet10t", ("--epochs", "1000"),
        by_hand={
            "bf16": said("--amp", "--amp-dtype", "bfloat16"),
            "compile": said("--torchcompile"),
            "larger_batch": said("--batch-size", "16"),
            "loader_workers": said("--workers", "4"),
        },
    ),
    Program(
        "accelerate_nlp", edits=(Edit("nlp_example.py", r'"num_epochs": 1', '"num_epochs": 1000'),),
        by_hand={
            "bf16": said("--mixed_precision", "bf16"),
            "compile": edit("nlp_example.py", r"^(\s+)model = model\.to\(.*$", r"\g<0>\n\1model.compile()"),
            "fused_optimizer": edit("nlp_example.py", r"lr=lr\)", "lr=lr, fused=True)"),
            "larger_batch": edit("nlp_example.py", r'"batch_size": 16', '"batch_size": 32'),
        },
    ),
    Program(
        "pytorch_cifar", edits=(Edit("main.py", r"start_epoch\+1", "start_epoch+1000"),),
        by_hand={
            "bf16": in_bf16("main.py", r"outputs = net\(inputs\)", r"loss = criterion\(outputs, targets\)"),
            "compile": edit("main.py", r"^net = net\.to\(device\)", r"\g<0>\nnet.compile()"),
            "larger_batch": edit("main.py", r"batch_size=8", "batch_size=16"),
            "fused_optimizer": edit("main.py", r"optim\.SGD\(net\.parameters\(\), ", r"\g<0>fused=True, "),
        },
    ),
)  # fmt: skip
FAULTS = ("slow_disk", "tiny_batch", "padding")


def prepare(program: Program, recipe: Recipe, programs: Path, place: Path, variant: Variant) -> Path:
    """The program as it runs, in a folder of its own."""
    shutil.rmtree(place, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", "*.ipynb", "*.png", "*.jpg", "*.gif")
    shutil.copytree(home(recipe, programs) / recipe.copied, place, ignore=left_out, ignore_dangling_symlinks=True)
    for change in (*recipe.edits, *recipe.cause.edits, *program.edits, *variant.edits):
        change.apply(place)
    if recipe.data is not None:
        recipe.data(place)
    return place


def command(program: Program, recipe: Recipe, place: Path, variant: Variant, tool: list[str]) -> list[str]:
    words = (*recipe.arguments, *recipe.cause.arguments, *program.longer, *variant.arguments)
    words = tuple(word.replace("{program}", str(place)) for word in words)
    return [sys.executable, *tool, str(place / recipe.folder / recipe.script), *words]


def run(
    words: list[str], place: Path, folder: str, recipe: Recipe | None, timeout_s: float, **more: str
) -> tuple[str, str]:
    """What it prints; everything that it started ends with it."""
    paths = [CLOCK, ROOT / "src", *(place / part for part in (recipe.on_path if recipe else ()))]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(place.parent), "LANG": "C.UTF-8", "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled",
        **((recipe.environment or {}) if recipe else {}), **more,
    }  # fmt: skip
    process = subprocess.Popen(
        words, cwd=place / folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "", f"not done after {timeout_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hand_gain(
    program: Program, recipe: Recipe, programs: Path, work: Path, name: str, samples: float
) -> dict[str, Any]:
    """Apply the change as a user would, and time both in turns. The gain is of samples a second.

    `by_hand` leaves out what the training thread waited for a core, as Linux tells it: the machine may be busy.
    `by_hand_wall` does not.
    """
    variant = program.by_hand.get(name)
    if variant is None:
        return {"by_hand": None, "why_not": f"no edit for {name} is written down"}
    rounds: dict[str, list[float]] = {"by_hand_rounds": [], "by_hand_wall_rounds": []}
    for _ in range(HAND_ROUNDS):
        step_s = []
        for change in (Variant(), variant):
            place = prepare(program, recipe, programs, work / "hand", change)
            clock = place / "clock.json"
            words = command(program, recipe, place, change, [])
            _, err = run(words, place, recipe.folder, recipe, 300, WILD_CLOCK=str(clock), WILD_STEPS=str(HAND_STEPS))
            if not clock.is_file():
                return {"by_hand": None, "why_not": err[-300:]}
            marks = json.loads(clock.read_text())[LEFT_OUT:]
            step_s.append((typical_s([wall_s - waited_s for _, wall_s, _, waited_s in marks]),
                           typical_s([wall_s for _, wall_s, *_ in marks])))  # fmt: skip
        for row, plain_s, changed_s in zip(rounds.values(), *step_s, strict=True):
            row.append(samples * plain_s / changed_s - 1)
    had = {
        key.removesuffix("_rounds"): math.exp(fmean(math.log1p(gain) for gain in gains)) - 1
        for key, gains in rounds.items()
    }
    return {**had, **rounds}


def typical_s(marks: list[float]) -> float:
    """A step's time: the median of the means of five parts."""
    times = [later - earlier for earlier, later in pairwise(marks)]
    fifth = max(len(times) // 5, 1)
    return median(fmean(times[at : at + fifth]) for at in range(0, fifth * 5, fifth))


def judged(tried: dict[str, Any]) -> dict[str, Any]:
    """What a trial said, and its best change that does no harm."""
    keys = (
        "names",
        "predicted",
        "gain",
        "outcome",
        "reason",
        "losses",
        "losses_text",
        "memory_text",
        "num_runs",
        "is_wall",
    )
    rows = [{key: row[key] for key in keys} for row in tried["rows"]]
    good = [row for row in rows if row["outcome"] == "faster" and row["losses"] != "different"]
    best = max(good, key=lambda row: row["gain"]["expected"], default=None)
    return {
        "headline": tried["headline"], "step_s": tried["step_s"], "startup_s": tried["startup_s"], "rows": rows,
        "seconds": tried["seconds"], "notes": tried["notes"],
        "together": tried["together"] and tried["together"]["gain"],
        "best": best and best["names"][0], "stated": best and best["gain"], "predicted": best and best["predicted"],
    }  # fmt: skip


def look_at(program: Program, programs: Path, work: Path, budget: str) -> dict[str, Any]:
    """One program: tried, then edited by hand."""
    recipe = next(one for one in RECIPES if one.name == program.recipe)
    place = prepare(program, recipe, programs, work / "program", Variant())
    tool = ["-m", "flopmeter", "try", "--json", "--budget", budget, "-o", str(work / "run")]
    shutil.rmtree(work / "run", ignore_errors=True)
    out, err = run(command(program, recipe, place, Variant(), tool), place, recipe.folder, recipe, 1800)
    row: dict[str, Any] = {"name": recipe.name, "commit": commit(recipe, programs), "kind": recipe.kind}
    if not out.strip():
        return row | {"error": err[-400:], "best": None, "rows": []}
    row |= judged(json.loads(out.splitlines()[-1]))
    if row["best"] is not None:
        row |= hand_gain(program, recipe, programs, work, row["best"], 2.0 if row["best"] == "larger_batch" else 1.0)
        if row["by_hand"] is not None:
            if next(one["is_wall"] for one in row["rows"] if one["names"] == [row["best"]]):
                row["by_hand"] = row["by_hand_wall"]
            row["is_inside"] = row["stated"]["low"] <= row["by_hand"] <= row["stated"]["high"]
    return row


def look_at_fault(fault: str, work: Path, budget: str) -> dict[str, Any]:
    """A fault of the demo."""
    work.mkdir(parents=True, exist_ok=True)
    tool = ["-m", "flopmeter", "try", "--json", "--budget", budget, "-o", str(work / "run"), "-m", "flopmeter", "demo"]
    shutil.rmtree(work / "run", ignore_errors=True)
    out, err = run([sys.executable, *tool, "--fault", fault, "--seconds", "3000"], work, ".", None, 1800)
    row: dict[str, Any] = {"name": f"demo_{fault}", "commit": "", "kind": "demo"}
    return row | (
        judged(json.loads(out.splitlines()[-1])) if out.strip() else {"error": err[-400:], "best": None, "rows": []}
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all programs: intervals that hold, intervals that are narrow, and how good predictions were."""
    inside = [row["is_inside"] for row in rows if "is_inside" in row]
    measured = [one for row in rows for one in row["rows"] if one["gain"]]
    narrow = [
        max(g["high"] - g["expected"], g["expected"] - g["low"])
        <= max(NARROW_POINTS, NARROW_SHARE * abs(g["expected"]))
        for g in (one["gain"] for one in measured)
    ]
    errors = [abs(one["predicted"]["expected"] - one["gain"]["expected"]) for one in measured if one["predicted"]]
    within = [
        one["predicted"]["low"] <= one["gain"]["expected"] <= one["predicted"]["high"]
        for one in measured
        if one["predicted"]
    ]
    return {
        "inside": [sum(inside), len(inside)],
        "narrow": [sum(narrow), len(narrow)],
        "median_prediction_error": median(errors) if errors else None,
        "prediction_ranges_right": [sum(within), len(within)],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="What was predicted, measured, and had by hand", title_justify="left")
    for heading in ("Program", "Change", "Predicted", "Measured", "By hand", "Losses"):
        table.add_column(heading)
    for row in rows:
        for one in row["rows"] or [{"names": ["-"], "predicted": None, "gain": None, "losses": row.get("error", "")}]:
            is_best = one["names"][0] == row["best"]
            hand = row.get("by_hand") if is_best else None
            had = "" if hand is None else f"{100 * hand:+.0f} %{'' if row['is_inside'] else ' (outside)'}"
            gain, likely = one["gain"], one["predicted"]
            told = (
                f"{100 * gain['expected']:+.0f} % ({100 * gain['low']:.0f} to {100 * gain['high']:.0f})"
                if gain
                else one.get("outcome")
            )
            table.add_row(
                row["name"],
                one["names"][0],
                f"{100 * likely['expected']:+.0f} %" if likely else "-",
                told,
                had,
                one["losses"],
            )
    Console(stderr=True, width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path, nargs="?")
    parser.add_argument("--only", help="names of programs, with commas between")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "flopmeter-tried")
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--again", action="store_true", help="repeat what is on file")
    parser.add_argument("--kept", action="store_true", help="only what is on file, whatever has changed since")
    parser.add_argument("--short", action="store_true")
    add_record_option(parser)
    given = parser.parse_args()
    source = b"".join(path.read_bytes() for path in sorted((ROOT / "src" / "flopmeter" / "trials").glob("*.py")))
    stamp = hashlib.sha256(source + given.budget.encode()).hexdigest()[:12]
    rows = []
    if given.short:
        place = given.work / "short"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "programs" / "tried.py", place)
        words = ["try", "--json", "--budget", "40s", "--only", "loader_workers", "-o", str(place / "run"), "tried.py"]
        out, err = run([sys.executable, "-m", "flopmeter", *words], place, ".", None, 200)
        rows.append({"name": "own", **(judged(json.loads(out)) if out else {"error": err, "rows": [], "best": None})})
    jobs = {f"demo_{fault}": (lambda work, f=fault: look_at_fault(f, work, given.budget)) for fault in FAULTS}
    jobs |= {p.recipe: (lambda work, p=p: look_at(p, given.programs, work, given.budget)) for p in PROGRAMS}
    for name, job in jobs.items() if not given.short else ():
        if given.only and name not in given.only.split(","):
            continue
        if given.programs is None:
            sys.exit("no programs at hand: name the folder with the checked-out repositories, or --short")
        on_file = given.work / f"{name}.json"
        row = json.loads(on_file.read_text()) if on_file.is_file() and not given.again else {"stamp": ""}
        if given.kept and not row["stamp"]:
            continue
        if row["stamp"] != stamp and not given.kept:
            (given.work / name).mkdir(parents=True, exist_ok=True)
            row = job(given.work / name) | {"stamp": stamp, "budget": given.budget}
            on_file.write_text(json.dumps(row, indent=1))
        rows.append(row)
        show([row])
    show(rows)
    finish("tried", BENCHMARK_VERSION, {"budget": given.budget, "rows": rows, **summarise(rows)}, given.record)


if __name__ == "__main__":
    main()

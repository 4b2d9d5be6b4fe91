"""Who counts a training step's FLOPs right? flopmeter and its peers on the same steps, as counted / true.

    python benchmarks/flop_accuracy.py [--rows llama_sdpa,lstm] [--peers none] [--quick] [--record FILE]

Peers are judged by the `full` convention, the only one they know; flopmeter by both. Every counter runs in a process of
its own, because several patch torch and some do not clean up when they fail. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outcome import add_record_option, finish
from peers import PEERS, installed_versions
from rows import ROWS, Row

BENCHMARK_VERSION = 1
OURS = "flopmeter"
PARTS = ("forward_flop", "model_flop", "recompute_flop")
QUICK_ROWS = ("llama_eager", "llama_sdpa_non_reentrant", "mixtral_default", "conv_grouped", "lstm", "gradient_penalty")
QUICK_PEERS = ("FlopCounterMode", "profiler")
COUNTER_LIMIT_S = 1800
TOLERANCES = (0.001, 0.005)

Record = dict[str, Any]
"""What a counter says of a row: {convention: {part: FLOP or None}}, and a "reason" where something is missing."""


def count_with_flopmeter(row: Row) -> Record:
    """One real step observed by flopmeter, under both conventions."""
    from flopmeter.flops.observe import observe

    case = row.build()
    with observe(case.model) as observed:
        case.step()
    counts = {convention: observed.result(convention=convention) for convention in ("exact", "full")}
    record: Record = {name: {part: getattr(count, part) for part in PARTS} for name, count in counts.items()}
    extras = {field: getattr(counts["full"], field) for field in ("hardware_flop", "coverage", "uncounted")}
    return record | extras


def count_with_peer(name: str, row: Row) -> Record:
    """A new case for each count: what a peer did to the model for one must not show in the next."""
    peer = PEERS[name]
    forward, reason = attempt(lambda: peer.forward(row.build()))
    training = forward
    if not row.is_forward_only and (train := peer.training):
        training, training_reason = attempt(lambda: train(row.build()))
        reason = reason or training_reason
    elif not row.is_forward_only and forward is not None:
        training = 3 * forward
    return {"full": {"forward_flop": forward, "model_flop": training}, "reason": reason}


def attempt(count: Callable[[], Any]) -> tuple[Any, str]:
    """A count and no reason, or None and the reason: a counter that fails must not stop the others."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return count(), ""
    except Exception as error:  # noqa: BLE001
        first_line = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first_line[:120]}"


def work(counter: str, names: Iterable[str]) -> None:
    """Inside the counter's own process: one JSON line per row."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for name in names:
        if counter == OURS:
            record, reason = attempt(partial(count_with_flopmeter, ROWS[name]))
        else:
            record, reason = count_with_peer(counter, ROWS[name]), ""
        print(json.dumps({"row": name, **(record or {"reason": reason})}), flush=True)


def run_counter(counter: str, names: Sequence[str]) -> dict[str, Record]:
    """Every row by one counter; rows that a crash or the time limit cut off say so."""
    command = [sys.executable, __file__, "--worker", counter, "--rows", ",".join(names)]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=COUNTER_LIMIT_S)
        output, reason = done.stdout, f"its process ended with exit code {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        output, reason = (expired.stdout or b"").decode(), f"not done after {COUNTER_LIMIT_S} s"
    records: dict[str, Record] = {name: {"reason": reason} for name in names}
    for line in output.splitlines():
        if line.startswith('{"row"'):
            record = json.loads(line)
            records[record.pop("row")] = record
    return records


def ratios(row: Row, record: Record) -> dict[str, float | None]:
    """Counted / true for each part that a counter names, as "convention part"; and the coverage that it claims."""
    found = {
        f"{convention} {part}": ratio(counted, getattr(getattr(row.truth, convention), part))
        for convention in ("exact", "full")
        for part, counted in record.get(convention, {}).items()
    }
    if "hardware_flop" in record and row.hardware_flop is not None:
        found["hardware_flop"] = ratio(record["hardware_flop"], row.hardware_flop)
    return found | {part: record[part] for part in ("coverage",) if part in record}


def ratio(counted: float | None, true: int) -> float | None:
    """None where the counter cannot tell, or counted something where there is nothing."""
    if true == 0:
        return 1.0 if counted == 0 else None
    return None if counted is None else counted / true


def is_within(value: float | None, tolerance: float) -> bool:
    return value is not None and abs(value - 1) <= tolerance


Found = dict[str, dict[str, dict[str, float | None]]]
"""Ratios by counter, row and part."""


def ratio_table(title: str, found: Found, columns: Sequence[tuple[str, str, str]]) -> Table:
    """One line per row; a column is its heading, the counter and the part it shows."""
    table = Table("row", title=f"{title}: counted / true")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for name in next(iter(found.values())):
        values = (found[counter][name].get(part) for _, counter, part in columns)
        table.add_row(name, *(format_ratio(value) for value in values))
    return table


def format_ratio(value: float | None) -> str:
    if value is None:
        return "[dim]n/a[/]"
    return f"[green]{value:.4f}[/]" if is_within(value, TOLERANCES[-1]) else f"{value:.4f}"


def summarise(found: Found) -> dict[str, dict[str, dict[str, int]]]:
    """How many rows each counter gets within each tolerance, by part; what it cannot count is not within."""
    return {
        counter: {
            part: {
                f"within {tolerance:.1%}": sum(is_within(ratios.get(part), tolerance) for ratios in by_row.values())
                for tolerance in TOLERANCES
            }
            for part in sorted({part for ratios in by_row.values() for part in ratios})
        }
        for counter, by_row in found.items()
    }


def summary_table(summary: dict[str, dict[str, dict[str, int]]], num_rows: int) -> Table:
    table = Table("counter", title=f"Rows right, of {num_rows}")
    headings = [
        (part, f"within {tolerance:.1%}")
        for part in ("full forward_flop", "full model_flop")
        for tolerance in TOLERANCES
    ]
    for part, tolerance in headings:
        table.add_column(f"{part}\n{tolerance}", justify="right")
    for counter, parts in summary.items():
        table.add_row(counter, *(str(parts.get(part, {}).get(tolerance, 0)) for part, tolerance in headings))
    return table


def reason_table(records: dict[str, dict[str, Record]]) -> Table:
    """Why a counter has no number, with the rows that this holds for."""
    rows: dict[tuple[str, str], list[str]] = {}
    for counter, by_row in records.items():
        for name, record in by_row.items():
            if reason := record.get("reason"):
                rows.setdefault((counter, reason), []).append(name)
    table = Table("counter", "reason", "rows", title="Not counted")
    for (counter, reason), names in rows.items():
        table.add_row(counter, escape(reason), f"{names[0]}, and {len(names) - 1} more" if names[1:] else names[0])
    return table


def show(records: dict[str, dict[str, Record]], found: Found, summary: dict[str, dict[str, dict[str, int]]]) -> None:
    console = Console(width=160)
    ours = [
        (f"{convention}\n{part}", OURS, f"{convention} {part}") for convention in ("exact", "full") for part in PARTS
    ]
    ours += [(part, OURS, part) for part in ("hardware_flop", "coverage")]
    console.print(ratio_table("flopmeter", found, ours))
    for title, part in (("forward", "full forward_flop"), ("training step", "full model_flop")):
        columns = [(counter, counter, part) for counter in found]
        console.print(ratio_table(f"All counters, {title}, attention in full", found, columns))
    console.print(reason_table(records))
    console.print(summary_table(summary, len(found[OURS])))


def seven_billion() -> list[Record]:
    """A 7B Llama at three lengths: the rule of thumb, the closed form and the count, each against the hand formula."""
    from types import SimpleNamespace

    import truth
    from flopmeter import count_flops
    from flopmeter.flops.estimate import estimate_flops
    from flopmeter.flops.models import load_model

    sizes = SimpleNamespace(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=32000,
    )
    model = load_model("llama:" + ",".join(f"{name}={value}" for name, value in vars(sizes).items()))
    num_parameters = sum(p.numel() for p in model.parameters())
    table = []
    for length in (512, 1024, 2048):
        true = truth.llama(truth.causal([length], length), sizes).exact.model_flop
        ways = {
            "rule_of_thumb": 3 * 2 * num_parameters * length,
            "estimate": estimate_flops(model, (1, length)).model_flop,
            "counted": count_flops(model, (1, length)).model_flop,
        }
        table.append(
            {"length": length, "true": true} | {f"{name}_error": flop / true - 1 for name, flop in ways.items()}
        )
    return table


def seven_billion_table(rows: list[Record]) -> Table:
    table = Table(title="A 7B model, training FLOPs of one sequence: error against the hand formula, exact convention")
    for heading in ("length", "true TFLOP", "rule of thumb (6N)", "estimate", "counted"):
        table.add_column(heading, justify="right")
    for row in rows:
        errors = [f"{row[f'{name}_error']:+.2%}" for name in ("rule_of_thumb", "estimate", "counted")]
        table.add_row(str(row["length"]), f"{row['true'] / 1e12:.2f}", *errors)
    return table


def describe_row(row: Row, records: dict[str, Record]) -> Record:
    truth = {name: getattr(row.truth, name)._asdict() for name in ("exact", "full")}
    notes = {"hardware_flop": row.hardware_flop, "executed_note": row.executed_note}
    return {"truth": truth | notes, "counted": records}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="comma-separated names; all by default")
    parser.add_argument("--peers", help="comma-separated names, or none; all by default")
    parser.add_argument("--quick", action="store_true", help="a few rows and peers, to see that it runs")
    add_record_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(argument: str | None, default: Iterable[str], known: Iterable[str]) -> list[str]:
    names = list(default) if argument is None else [name for name in argument.split(",") if name != "none"]
    if unknown := set(names) - set(known):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return names


def main() -> None:
    arguments = parse_arguments()
    names = chosen(arguments.rows, QUICK_ROWS if arguments.quick else ROWS, ROWS)
    if arguments.worker:
        work(arguments.worker, names)
        return
    records = {}
    for counter in (OURS, *chosen(arguments.peers, QUICK_PEERS if arguments.quick else PEERS, PEERS)):
        print(f"counting with {counter}", file=sys.stderr)
        records[counter] = run_counter(counter, names)
    found = {counter: {name: ratios(ROWS[name], by_row[name]) for name in names} for counter, by_row in records.items()}
    summary = summarise(found)
    show(records, found, summary)
    seven = seven_billion()
    Console(width=160).print(seven_billion_table(seven))
    rows = {name: describe_row(ROWS[name], {counter: records[counter][name] for counter in records}) for name in names}
    figures = {"installed": installed_versions(), "summary": summary, "seven_billion": seven, "rows": rows}
    finish("flop_accuracy", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()

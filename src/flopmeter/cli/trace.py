"""What does a profiler trace say about where the time went, and what MFU does it come to?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopmeter.cli._diagnosis import clean, plain, show_diagnosis
from flopmeter.cli._peak import stated_peak
from flopmeter.text import amount, percent, rate, utilisation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flopmeter.traces.rank import RankTrace
    from flopmeter.traces.steps import TracedStep
    from flopmeter.traces.trace import Progress

MAX_STEPS_SHOWN = 12
MAX_RANKS_SHOWN = 16
_SHARES: dict[str, Callable[[TracedStep], float]] = {
    "compute": lambda time: time.compute_s,
    "comm. exposed": lambda time: time.exposed_communication_s,
    "copies": lambda time: time.copy_s,
    "idle": lambda time: time.idle_s,
    "launch gaps": lambda time: time.launch_gap_s,
    "data wait": lambda time: time.data_wait_s,
    "comm. in all": lambda time: time.communication_s,
}


def command(
    files: Annotated[list[Path], typer.Argument(help="Kineto or Chrome traces (.json, .json.gz), one for each rank.")],
    peak_flop_per_s: Annotated[
        float | None, typer.Option(help="Dense peak of the device in FLOP/s (312e12), where it is not on file.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, max=20, help="How many of the longest kernels to show.")] = 8,
    max_gb: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Most text to read of a file, in GB. Default: 32.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Where the time of a recorded trace went, its MFU from recorded shapes, and why it is not higher.

    Example: flopmeter trace rank0.json.gz rank1.json.gz

    Record one with torch.profiler: record_shapes=True gives FLOPs and MFU,
    profiler.step() in the loop tells the steps apart.
    """
    from flopmeter.diagnosis import diagnose
    from flopmeter.traces import load_trace

    if peak_flop_per_s is not None:
        stated_peak(peak_flop_per_s)
    max_text_bytes = None if max_gb is None else int(max_gb * (1 << 30))
    with _progress(files) as on_progress:
        trace = load_trace(
            files, peak_flop_per_s=peak_flop_per_s, max_text_bytes=max_text_bytes, on_progress=on_progress
        )
    diagnosis = diagnose(trace.as_run())
    if as_json:
        typer.echo(json.dumps(plain({**trace.as_dict(), "diagnosis": asdict(diagnosis)}), allow_nan=False))
        return
    console = _console()
    for rank in trace.ranks[:MAX_RANKS_SHOWN]:
        _show_rank(rank, console, top if rank is trace.ranks[0] else 0)
    for note in trace.notes:
        console.print(f"Note: {clean(note)}.")
    show_diagnosis(diagnosis, console)


@contextmanager
def _progress(files: list[Path]) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {file: bar.add_task(file.name, total=None) for file in files}
        yield lambda file, done, size: bar.update(tasks[file], completed=done, total=size)


def _console() -> Console:
    from rich.console import Console

    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "soft_wrap": True}
    console = Console(**plain)
    return console if console.is_terminal else Console(width=140, **plain)


def _show_rank(rank: RankTrace, console: Console, num_top: int) -> None:
    of = f" of {rank.world_size}" if rank.world_size else ""
    number = "" if rank.rank is None else f", rank {rank.rank}{of}"
    console.print(f"{clean(rank.path.name)}: {clean(rank.device)}{number}, {rank.num_events:,} events", style="bold")
    console.print(_steps_table(rank))
    console.print(_speed(rank))
    if num_top:
        console.print(_top_table(rank, num_top))


def _steps_table(rank: RankTrace) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, caption_justify="left")
    for name in ("step", "ms", *_SHARES, "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, time in enumerate(rank.times[:MAX_STEPS_SHOWN]):
        table.add_row(str(time.number), *_row(rank, [time], [index]))
    hidden = len(rank.times) - MAX_STEPS_SHOWN
    table.add_section()
    table.add_row("all" if hidden <= 0 else f"all ({hidden} more)", *_row(rank, rank.times, range(len(rank.times))))
    table.caption = "compute, exposed communication, copies and idle add up; gaps and data wait are parts of idle"
    return table


def _row(rank: RankTrace, times: Sequence[TracedStep], places: Sequence[int]) -> list[str]:
    step_s = sum(time.step_s for time in times)
    shares = (sum(map(read, times)) / step_s for read in _SHARES.values())
    mfu = rank.mfu(_flop(rank, places), step_s)
    return [
        _figure(1e3 * step_s / len(times)),
        *map(percent, shares),
        "-" if mfu is None else utilisation(mfu),
    ]


def _figure(value: float) -> str:
    """Four digits, and never a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _flop(rank: RankTrace, places: Sequence[int]) -> dict[str, float]:
    total: dict[str, float] = {}
    for place in places:
        for dtype, flop in rank.flops[place].model.items():
            total[dtype] = total.get(dtype, 0.0) + flop
    return total


def _speed(rank: RankTrace) -> str:
    """FLOPs and their rate, and against which peak; or why there is no MFU."""
    flop = _flop(rank, range(len(rank.times)))
    wall_s = sum(time.step_s for time in rank.times)
    total = sum(flop.values())
    counted = f"{amount(total / len(rank.times), 'FLOP', 4)} a step, {rate(total / wall_s)}"
    if rank.mfu_reason:
        at_least = f" At least {counted} were done." if flop else ""
        return f"MFU is unknown: {clean(rank.mfu_reason)}.{at_least}"
    peaks = ", ".join(f"{dtype} {rate(peak.flop_per_s)}" for dtype, peak in rank.peaks.items())
    shares = ", ".join(f"{dtype} {percent(of_dtype / total)}" for dtype, of_dtype in flop.items()) if total else ""
    known = f"shapes are known for {percent(rank.counting.coverage or 0.0)} of the matrix work"
    return f"{counted} ({shares}); peak {peaks}; {known}."


def _top_table(rank: RankTrace, num_top: int) -> Table:
    from rich import box
    from rich.table import Table

    wall_s, num_steps = sum(time.step_s for time in rank.times), len(rank.times)
    table = Table(box=box.SIMPLE)
    table.add_column("longest operators" if rank.is_cpu else "longest kernels", overflow="fold")
    for name in ("ms a step", "calls a step", "of the time"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, seconds, calls in rank.top[:num_top]:
        row = (_figure(1e3 * seconds / num_steps), _figure(calls / num_steps), percent(seconds / wall_s))
        table.add_row(clean(name), *row)
    return table

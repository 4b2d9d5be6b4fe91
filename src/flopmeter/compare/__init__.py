"""Which of these runs is better, in what, and is the difference more than noise?

    from flopmeter import load_run
    from flopmeter.compare import compare

    compare([load_run("runs/before"), load_run("runs/after")]).row("mfu").changes[1].is_beyond_noise

The first run is the baseline: every other one is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from flopmeter.compare.noise import CONFIDENCE, MIN_STEPS, interval, redraw
from flopmeter.compare.predictions import Prediction, check_prediction
from flopmeter.compare.quantities import QUANTITIES, Quantity, figures_of, ratios_of, settings_of
from flopmeter.errors import ConfigError
from flopmeter.metrics import flop_per_s
from flopmeter.record import Run
from flopmeter.schema import RUN_FILE
from flopmeter.text import clean

if TYPE_CHECKING:
    from flopmeter.diagnosis import Diagnosis

_T = TypeVar("_T")
MAX_RUNS = 50
SMALLEST = 0.0005
"""A smaller change is written as 0.0, in percent and in points, and is none that anybody should act on."""
SAME_WORK = 0.01
"""Steps whose model FLOPs differ by less do the same work."""


class Change(Struct, frozen=True, kw_only=True):
    """How a figure differs from the baseline's."""

    value: float
    """Ratio minus one; for a part of the time, the difference (0.05 = 5 points)."""
    low: float | None
    """Lower end of the interval; None when the steps are too few to tell."""
    high: float | None
    """Upper end of it."""
    is_beyond_noise: bool | None
    """Whether no change lies outside the interval, and it can be seen at all; None when that cannot be told."""
    is_better: bool | None
    """Whether the direction is a gain; None where it is neither."""


class Row(Struct, frozen=True, kw_only=True):
    """One figure of all runs."""

    quantity: Quantity
    """Which figure."""
    values: tuple[float | None, ...]
    """By run; None where it is unknown."""
    changes: tuple[Change | None, ...]
    """By run; None for the baseline and where a value is unknown."""


class Symptom(Struct, frozen=True, kw_only=True):
    """One finding of the diagnosis, over all runs."""

    rule: str
    """Name of the rule."""
    title: str
    """What it says of the first run that has it."""
    lost: tuple[float | None, ...]
    """Share of wall time lost to it, by run; None where it was not found."""
    gains: tuple[float | None, ...]
    """Speed-up that mending it promises, by run."""


class Comparison(Struct, frozen=True, kw_only=True):
    """Several runs side by side."""

    names: tuple[str, ...]
    """Shortest names that tell the runs apart; the first is the baseline."""
    paths: tuple[str, ...]
    """Files that were read."""
    rows: tuple[Row, ...]
    """Figures that at least one run has."""
    parts: Mapping[str, tuple[float | None, ...]]
    """Parts of the waterfall, as shares of wall time, by run."""
    symptoms: tuple[Symptom, ...]
    """What the diagnoses found, what another finding explains included: a finding that is only hidden is not gone."""
    settings: Mapping[str, tuple[str | None, ...]]
    """Settings in which the runs differ."""
    predictions: tuple[Prediction | None, ...]
    """Whether the baseline's diagnosis was right, by run."""
    notes: tuple[str, ...]
    """What makes the comparison less than fair."""
    confidence: float = CONFIDENCE
    """Of the intervals."""

    def row(self, name: str) -> Row:
        """The figure of that name."""
        return next(row for row in self.rows if row.quantity.name == name)

    def figures(self, place: int) -> dict[str, float | None]:
        """Every known figure of the run at this place."""
        return {row.quantity.name: row.values[place] for row in self.rows}

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON: what is not finite is None."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare every run with the first.

    Raises:
        ConfigError: There are fewer than two runs, or more than `MAX_RUNS`.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"compare takes 2 to {MAX_RUNS} runs, not {len(runs)}")
    from flopmeter.diagnosis import diagnose

    names = [clean(name) for name in names_of([run.path for run in runs])]
    diagnoses = [diagnose(run) for run in runs]
    rows, settings = _rows(runs), _by_name([settings_of(run) for run in runs])
    return Comparison(
        names=tuple(names),
        paths=tuple(clean(str(run.path), 4096) for run in runs),
        rows=rows,
        parts=_by_name([{part.name: part.share for part in diagnosis.waterfall.parts} for diagnosis in diagnoses]),
        symptoms=_symptoms(diagnoses),
        settings={name: of_runs for name, of_runs in settings.items() if len(set(of_runs)) > 1},
        predictions=tuple(_prediction(runs, rows, diagnoses, place) for place in range(len(runs))),
        notes=tuple(_notes(runs, names, rows)),
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """As few last parts of each path as tell them apart; the file name counts only where it must."""
    parts = [path.parts[:-1] if path.name == RUN_FILE and len(path.parts) > 1 else path.parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({place})" for place, part in enumerate(parts, start=1)]


def _rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    ratios = [ratios_of(run) for run in runs]
    figures = [figures_of(run, of_run) for run, of_run in zip(runs, ratios, strict=True)]
    # The same steps are drawn for every figure of a run: MFU and steps per second cannot come to different verdicts.
    draws = [{name: redraw(ratio, f"{place}") for name, ratio in of.items()} for place, of in enumerate(ratios)]
    rows = []
    for quantity in QUANTITIES:
        values = tuple(of_run[quantity.name] for of_run in figures)
        if any(value is not None for value in values):
            drawn = [of_run.get(quantity.name) for of_run in draws]
            others = zip(values[1:], drawn[1:], strict=True)
            changes = (_change(quantity, values[0], value, drawn[0], draw) for value, draw in others)
            rows.append(Row(quantity=quantity, values=values, changes=(None, *changes)))
    return tuple(rows)


def _change(
    quantity: Quantity,
    before: float | None,
    after: float | None,
    drawn_before: list[float] | None,
    drawn_after: list[float] | None,
) -> Change | None:
    if before is None or after is None or (before <= 0 and not quantity.is_part):
        return None
    value, low, high = _difference(quantity, before, after), None, None
    if drawn_before and drawn_after and (quantity.is_part or min(drawn_before) > 0):
        low, high = interval([_difference(quantity, a, b) for a, b in zip(drawn_before, drawn_after, strict=True)])
    wanted = {"more": value > 0, "less": value < 0, None: None}[quantity.better]
    is_visible = abs(value) >= SMALLEST
    return Change(
        value=value,
        low=low,
        high=high,
        is_beyond_noise=None if low is None or high is None else is_visible and not low <= 0 <= high,
        is_better=wanted if is_visible else None,
    )


def _difference(quantity: Quantity, before: float, after: float) -> float:
    return after - before if quantity.is_part else after / before - 1


def _symptoms(diagnoses: Sequence[Diagnosis]) -> tuple[Symptom, ...]:
    by_rule = [{f.rule: f for f in (*d.symptoms, *d.findings) if f.lost > 0 and f.is_cause} for d in diagnoses]
    titles = {rule: finding.title for of_run in reversed(by_rule) for rule, finding in of_run.items()}
    symptoms = [
        Symptom(
            rule=rule,
            title=title,
            lost=tuple(of_run[rule].lost if rule in of_run else None for of_run in by_rule),
            gains=tuple(gain.expected if (f := of_run.get(rule)) and (gain := f.gain) else None for of_run in by_rule),
        )
        for rule, title in titles.items()
    ]
    return tuple(sorted(symptoms, key=lambda symptom: -max(lost or 0.0 for lost in symptom.lost)))


def _by_name(runs: Sequence[Mapping[str, _T]]) -> dict[str, tuple[_T | None, ...]]:
    """Names to the runs' values, None where a run has none."""
    return {name: tuple(of_run.get(name) for of_run in runs) for name in dict.fromkeys(n for run in runs for n in run)}


def _prediction(
    runs: Sequence[Run], rows: Sequence[Row], diagnoses: Sequence[Diagnosis], place: int
) -> Prediction | None:
    if place == 0:
        return None
    by, measured = _speed_up(rows, diagnoses[0].waterfall.mfu, diagnoses[place].waterfall.mfu, place)
    if not _is_same_task(runs[0], runs[place]):
        by, measured = "", None
    after = diagnoses[place]
    return check_prediction(diagnoses[0].findings, (*after.findings, *after.symptoms), by, measured)


def _is_same_task(run: Run, other: Run) -> bool:
    """Whether one could stand in for the other: only then does a cure show in the difference."""
    names = ("model", "num_parameters", "device", "world_size", "convention")
    is_same = all(getattr(run.header, name) == getattr(other.header, name) for name in names)
    return is_same and flop_per_s(run.peaks) == flop_per_s(other.peaks)


def _speed_up(rows: Sequence[Row], before: float | None, after: float | None, place: int) -> tuple[str, Change | None]:
    """How much more work is done per second of wall time; the steps' own noise is taken for that of the whole."""
    changes = {row.quantity.name: row.changes[place] for row in rows}
    steady = changes.get("mfu")
    if before and after and steady and steady.value > -1:
        value = after / before - 1
        scale = (1 + value) / (1 + steady.value)
        low, high = (None if end is None else scale * (1 + end) - 1 for end in (steady.low, steady.high))
        return "MFU over wall time", msgspec.structs.replace(steady, value=value, low=low, high=high)
    by = "tokens_per_second" if changes.get("tokens_per_second") else "steps_per_second"
    return by.replace("_", " "), changes.get(by)


def _notes(runs: Sequence[Run], names: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    first = runs[0]
    work = next((row for row in rows if row.quantity.name == "model_flop"), None)
    for place, run in enumerate(runs[1:], start=1):
        change = work.changes[place] if work else None
        if change and abs(change.value) > SAME_WORK:
            yield (
                f"a step of {names[place]} does {1 + change.value:.3g} times the work of a step of {names[0]}: "
                "compare MFU and tokens per second, not step time"
            )
        if flop_per_s(run.peaks) != flop_per_s(first.peaks):
            yield f"the MFU of {names[place]} is compared with another peak than that of {names[0]}"
        if run.header.convention != first.header.convention:
            yield f"{names[place]} counts FLOPs by another convention than {names[0]}"
    for name, run in zip(names, runs, strict=True):
        num_steady = len(run.steady())
        if num_steady < MIN_STEPS:
            yield f"{name} has {num_steady} steady steps; {MIN_STEPS} are needed to tell a difference from noise"

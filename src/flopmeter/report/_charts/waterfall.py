"""From 100 % of the peak down to the observed MFU, part by part."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, bar, horizontal, table_of
from flopmeter.text import percent, points, seconds, utilisation

SECTION, ORDER = "waterfall", 10
CAPTION = "The waterfall"

_COLOURS = {
    "ideal": "@green",
    "recompute": "@purple",
    "matmul_below_peak": "@blue",
    "non_matmul": "@sky",
    "optimizer": "@orange",
    "exposed_communication": "@purple",
    "launch_gaps": "@yellow",
    "data_wait": "@vermilion",
    "host_to_device": "@yellow",
}


def figure(facts: dict[str, Any]) -> Figure | None:
    """Only the split of the time where MFU is unknown."""
    fall = facts["waterfall"]
    known = [part for part in fall["parts"] if part["share"] is not None]
    losses = [part for part in known if part["name"] != "ideal" and part["share"]]
    if not known:
        return None
    bars, level = [], 1.0
    if fall["mfu"] is not None:
        bars.append(bar("Peak", 0.0, 1.0, "100 %", "@line", ""))
    for part in losses:
        share = part["share"]
        colour, pattern = _COLOURS.get(part["name"], "@grey"), "/" if part["name"] in ("pauses", "unexplained") else ""
        bars.append(bar(part["label"], level - share, share, points(-share), colour, pattern))
        level -= share
    if fall["mfu"] is not None:
        bars.append(bar("Observed MFU", 0.0, fall["mfu"], utilisation(fall["mfu"]), "@green", ""))
    return horizontal(bars, "Share of the wall time, in MFU points")


def table(facts: dict[str, Any]) -> Table:
    """Every part, those that are zero or not known as well."""
    titles = ("Part", "Share of wall time#", "Time#", "Uncertainty#", "How it was found")
    return table_of(titles, map(_row, facts["waterfall"]["parts"]))


def _row(part: dict[str, Any]) -> tuple[str, ...]:
    spread = "" if part["uncertainty_s"] is None else f"± {seconds(part['uncertainty_s'])}"
    return part["label"], percent(part["share"], 2), seconds(part["seconds"]), spread, part["how"]


def describe(facts: dict[str, Any]) -> str:
    """What each part takes."""
    losses = (part for part in facts["waterfall"]["parts"] if part["name"] != "ideal" and part["share"])
    return ", ".join(f"{part['label']} {points(-part['share'])}" for part in losses)

"""What fits on one screen? The run in a few lines for a terminal: verdict, figures, MFU as a line, losses as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flopmeter.report._sentences import run_line, step_text
from flopmeter.report._thin import evenly
from flopmeter.text import percent, plain, points, seconds, signed, utilisation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

BAR_WIDTH = 40
LINE_WIDTH = 60
MAX_FINDINGS = 5
_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show(facts: dict[str, Any], console: Console) -> None:
    """Print the summary. Texts of the run are never read as markup."""
    from rich.text import Text

    run, headline = facts["run"], facts["headline"]
    _say(console, Text(run["name"], style="bold"))
    _say(console, Text(run_line(run), style="dim"))
    if headline["verdict"]:
        console.print()
        _say(console, Text(headline["verdict"]))
    console.print()
    for name, text in _figures(facts):
        _say(console, Text.assemble((f"  {name:<12}", "dim"), (text, "bold" if name == "MFU" else "")))
    line = spark_line(facts["series"]["mfu"])
    if line:
        _say(console, Text.assemble(("  MFU by step ", "dim"), (line, "green")))
    _show_waterfall(facts["waterfall"], console)
    _show_findings(facts["findings"], console)


def _say(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _figures(facts: dict[str, Any]) -> list[tuple[str, str]]:
    headline = facts["headline"]
    rate = "tokens" if headline["tokens_per_second"] is not None else "samples"
    return [
        ("MFU", f"{utilisation(headline['mfu'])} in steady steps{_over_wall_time(facts['waterfall']['mfu'])}"),
        ("HFU", utilisation(headline["hfu"])),
        (f"{rate}/s", plain(headline[f"{rate}_per_second"])),
        ("step time", step_text(facts)),
        ("goodput", percent(headline["goodput"])),
    ]


def _over_wall_time(mfu: float | None) -> str:
    return "" if mfu is None else f", {utilisation(mfu)} over the wall time after warm-up"


def spark_line(line: dict[str, Any] | None, width: int = LINE_WIDTH) -> str:
    """The medians of a series as one row of bars, from zero to the largest."""
    values = [line["typical"][place] for place in evenly(range(len(line["typical"])), width)] if line else []
    top = max((value for value in values if value is not None), default=0.0)
    if not values or top <= 0:
        return ""
    return "".join(_LEVELS[min(max(int(8 * (value or 0.0) / top), 0), 7)] for value in values)


def _show_waterfall(fall: dict[str, Any], console: Console) -> None:
    from rich.text import Text

    parts = [part for part in fall["parts"] if part["share"] is not None]
    if not parts:
        return
    console.print()
    start = "From 100 % of peak to" if fall["mfu"] is not None else "Where the time went in"
    goal = utilisation(fall["mfu"]) if fall["mfu"] is not None else seconds(fall["wall_s"])
    _say(console, Text(f"{start} {goal}", style="bold"))
    losses = [part for part in parts if part["name"] != "ideal"]
    for part in losses:
        bar = _bar(part["share"])
        row = (f"  {part['label']:<22} ", "dim"), (f"{points(-part['share']):>10}  ", ""), (bar, "yellow")
        _say(console, Text.assemble(*row))
    if fall["mfu"] is not None:
        row = (
            (f"  {'Observed MFU':<22} ", "dim"),
            (f"{utilisation(fall['mfu']):>10}  ", "bold"),
            (_bar(fall["mfu"]), "green"),
        )
        _say(console, Text.assemble(*row))


def _bar(share: float) -> str:
    eighths = round(8 * BAR_WIDTH * min(abs(share), 1.0))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _show_findings(findings: list[dict[str, Any]], console: Console) -> None:
    from rich.text import Text

    if not findings:
        return
    console.print()
    _say(console, Text("What would help", style="bold"))
    for place, finding in enumerate(findings[:MAX_FINDINGS], start=1):
        gain = f" ({signed(finding['gain']['expected'])} steps per second expected)" if finding["gain"] else ""
        place_text = f"{place}. " if finding["is_cause"] else ""
        _say(console, Text.assemble((f"  {place_text}{finding['title']}", ""), (gain, "green")))
        for advice in finding["advice"][:1]:
            _say(console, Text(f"  {' ' * len(place_text)}{advice}", style="dim"))
    if len(findings) > MAX_FINDINGS:
        _say(console, Text(f"  and {len(findings) - MAX_FINDINGS} more, in the report", style="dim"))

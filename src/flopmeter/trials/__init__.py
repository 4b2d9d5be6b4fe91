"""What did each change bring to this program, when it was tried? `flopmeter try` measures; `try.json` keeps the answer.

    from flopmeter.trials import read_tried

    tried = read_tried("runs/try-train")        # None where nothing was tried
    print(tried.headline, tried.rows[0].gain)

A program is run as it is and with changes put in from outside (`candidates.py`), each time for a fixed number of steps.
`rounds.py` decides what runs, `processes.py` runs it, `inside.py` is what happens in the program's own process, and
`judging.py` makes gains and verdicts of what was seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from flopmeter.diagnosis import Gain
from flopmeter.errors import RecordError

TRIED_FILE = "try.json"
SCHEMA = 1
EARLY_STEPS = 2
"""Steps of a block before its memory is looked at for the first time."""
NOTHING_SEEN: dict[str, Any] = {
    "blocks": [], "losses": [], "gradients": [], "loaders": [], "facts": {}, "saved": {}, "num_steps": 0,
    "startup_s": None, "error": "", "is_whole": False,
}  # fmt: skip
"""What a process of the program writes down, before it has begun. `saved`: files that it wanted to save, and where."""
Losses = Literal["same", "rounding", "different", "not comparable", "unknown"]
Outcome = Literal["faster", "slower", "no difference", "failed", "not measured"]


class Row(msgspec.Struct, kw_only=True):
    """One change, or several together."""

    names: list[str]
    """The changes, as `--only` takes them."""
    what: str
    predicted: Gain | None = None
    """By the diagnosis of the unchanged program; None where nothing was predicted."""
    gain: Gain | None = None
    """What was measured, with its 95 % interval; None where nothing was."""
    is_wall: bool = True
    """Whether the training thread's waits for a core are in it: not on a CPU, where that thread does all the work."""
    outcome: Outcome = "not measured"
    """Faster or slower where the interval leaves no other choice."""
    reason: str = ""
    """Why it failed or was not measured."""
    losses: Losses = "unknown"
    losses_text: str = ""
    """How the first losses and gradients compare with the unchanged program's, in words."""
    memory_bytes: float | None = None
    """Highest use of a rank: of the device's memory, on a CPU the process's own."""
    memory_text: str = ""
    """The same beside the unchanged program's, and whether it keeps growing."""
    startup_s: float | None = None
    """From the start of the process to its first steps."""
    num_runs: int = 0
    """Processes that it was measured in."""
    num_steps: int = 0
    """Timed steps with the change."""
    code: str = ""
    """What to write, in the terms of the program's trainer."""
    watch_out: str = ""

    @property
    def is_harmless(self) -> bool:
        """Whether it may be advised without a word of warning."""
        return self.outcome != "failed" and self.losses != "different" and "grows" not in self.memory_text


class Tried(msgspec.Struct, kw_only=True):
    """All that one `flopmeter try` found: `try.json` beside the run's record."""

    schema: int = SCHEMA
    program: list[str]
    """As python was given it."""
    headline: str = ""
    """The result in a line."""
    step_s: float | None = None
    """A step of the unchanged program, median."""
    startup_s: float | None = None
    memory_bytes: float | None = None
    trainer: str = ""
    """transformers, lightning, accelerate, or "" for a loop of its own."""
    rows: list[Row] = []
    """By gain, the largest first."""
    together: Row | None = None
    """The best of them at once."""
    not_tried: dict[str, str] = {}
    """Changes that were left out, and why."""
    notes: list[str] = []
    """What a reader must know: a busy machine, files that changed, what was saved elsewhere."""
    is_whole: bool = False
    """False where it was stopped, or the budget ran out before all was measured."""
    seconds: float = 0.0
    """How long all of it took."""


def read_tried(folder: str | Path) -> Tried | None:
    """What was tried beside a run's record; None where nothing was.

    Raises:
        RecordError: The file is there and is none of ours.
    """
    path = Path(folder) / TRIED_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tried)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(f"{path}: no result of `flopmeter try` ({error})") from None


def write_whole(path: Path, text: str) -> None:
    """Another process that reads the file finds all of it, or no file."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)

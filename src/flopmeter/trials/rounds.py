"""Which changes are tried, in which order, and for how long?

First the unchanged program, under `flopmeter run`: its record tells what would help. Then rounds, in which the
unchanged program and the changes take turns, each for a fixed number of steps, until intervals are narrow or the budget
is spent. At last the best changes together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from flopmeter.diagnosis import Gain, diagnose
from flopmeter.errors import ConfigError, FlopmeterError, RecordError, did_you_mean
from flopmeter.record import load_run, replace_file
from flopmeter.text import percent, plural, seconds, signed
from flopmeter.trials import TRIED_FILE, Row, Tried
from flopmeter.trials.candidates import MAX_WORKERS, Candidate, Seen, load_candidates
from flopmeter.trials.judging import (
    block_spread,
    is_narrow,
    judge_losses,
    judge_memory,
    must_be_wall,
    process_gains,
    process_s,
    settle,
    switched_gain,
    timed,
)
from flopmeter.trials.processes import Ended, Launcher

NUM_CHOSEN = 3
MIN_PREDICTED = 0.01
"""A change that is predicted to bring less is tried only when it is asked for."""
LOOK = {"min_steps": 48, "min_s": 6.0, "max_s": 60.0}
"""The first look: so many steps and seconds, or at most so long."""
MIN_STEPS = 30
"""Steps that a program must have for a comparison."""
FIRST_S, MIN_FIRST, MAX_FIRST = 2.0, 6, 40
"""What is left out at the start of a process, and after a change: its losses are compared, its times are not."""
BLOCK_S, MIN_BLOCK, NUM_PAIRS, MIN_PAIRS, NUM_BLOCKS = 0.8, 3, 10, 4, 6
SIZES = (1.0, 0.6, 0.4, 0.2)
"""Blocks are so much shorter, and fewer, where the budget is short; the shortest where one round is to do."""
MAX_SWITCHED_RUNS, MIN_RUNS, MAX_RUNS = 3, 2, 6
"""Processes for a change that is switched on and off; for one that takes a process of its own, at least and at most."""
LONG_STARTUP = 0.5
"""When start-ups would take this share of what is left, all changes that can be switched share one process."""
PATIENCE = 3.0
"""A process may take so many times as long as was expected."""
BUSY = 0.05
"""Share of its time that the training thread waited for a core, from which on it is said."""
LATE = "it was not done after"
SAFETY = (
    "The program is run again and again, each time for a few steps, in a copy of this folder where that is small. "
    "Whether it is safe to repeat (it deletes, uploads, or talks to a service) is yours to judge."
)


class Job(NamedTuple):
    """What runs in a process: changes for the whole of it, and changes that are switched."""

    name: str
    rows: tuple[Candidate, ...]
    is_one_by_one: bool = False
    """Whether its changes are switched on one after the other, rather than all at once."""

    @property
    def is_switched(self) -> bool:
        return bool(self.rows) and all(row.is_switched for row in self.rows)

    @property
    def samples(self) -> float:
        return math.prod(row.samples for row in self.rows)

    @property
    def on(self) -> list[str]:
        """Those that can be switched."""
        return [row.name for row in self.rows if row.is_switched]


UNCHANGED = Job("unchanged", ())


class Trials:
    """All that one `flopmeter try` does; `run()` begins, and `tried` has the result.

    Args:
        launcher: Runs the program.
        budget_s: How long all of it may take.
        only: Names of changes; empty for those that are predicted to bring most.
        takes_all: Try whatever fits.
        num_rounds: At most so many, before the best are tried together.
        say: Is told what runs, what was found so far, and how much of the budget is spent, from 0 to 1.
        announce: Is told, before it begins, how long it will take and what is left out.
    """

    def __init__(
        self,
        launcher: Launcher,
        budget_s: float,
        only: Sequence[str],
        takes_all: bool,
        num_rounds: int,
        say: Callable[[str, float], None],
        announce: Callable[[str], None],
    ) -> None:
        self.tried = Tried(program=launcher.program)
        self._launcher, self._only, self._takes_all, self._say = launcher, only, takes_all, say
        self._num_rounds, self._announce = num_rounds, announce
        self._start_s, self._budget_s = time.monotonic(), budget_s
        self._known = load_candidates(launcher.candidates)
        for name in only:
            if name not in self._known:
                raise ConfigError(f"--only: unknown {name!r}: {did_you_mean(name, self._known)}")
        self._runs: dict[str, dict[int, Ended]] = {}
        """By job and round."""
        self._rows: dict[str, Row] = {}
        self._predicted: dict[str, Gain | None] = {}
        self._first: dict[str, Any] = {}
        self._failed: dict[str, str] = {}
        self._one_by_one: set[str] = set()
        self._num_steps = 0
        """Steps that the program has by itself; 0 where it was ended."""
        self._size = 1.0
        """Of all blocks, where the budget leaves no room for whole ones."""

    def run(self) -> None:
        """Do all of it. Whatever ends it, `tried` holds what was found."""
        is_stopped = True
        try:
            seen = self._look()
            jobs = self._choose(seen)
            self._foretell(jobs)
            if jobs:
                self._measure(jobs, seen)
            is_stopped = False
        finally:
            self._launcher.end()
            self._write("it was stopped before" if is_stopped else "the budget was spent before")

    @property
    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._start_s)

    # The first look

    def _look(self) -> Seen:
        self._say("the program as it is, measured", 0.0)
        until = {**LOOK, "max_s": min(LOOK["max_s"], self._budget_s / 6)}
        plan = {"plan": [{"on": [], "steps": 0, "kind": "timed"}], "until": until, "finds_models": False}
        done = self._launcher.run("first-look", self._budget_s / 2, plan, is_measured=True)
        found = done.seen
        times = [second for block in found["blocks"] for second in block["seconds"]]
        if not found["is_whole"] and len(times) < MIN_STEPS:
            raise FlopmeterError(self._why_nothing(done))
        self._num_steps = 0 if found["is_whole"] else found["num_steps"]
        self._first = found
        waited_s = sum(second for block in found["blocks"] for second in block["waited"])
        facts = found["facts"] | {"loaders": found["loaders"], "waited_share": waited_s / sum(times)}
        self.tried.step_s, self.tried.startup_s = median(times), found["startup_s"]
        self.tried.trainer = found["facts"]["trainer"]
        try:
            run = load_run(self._launcher.output_dir)
            return Seen(facts, diagnose(run), run.last("facts"))
        except RecordError as error:
            self.tried.notes.append(f"nothing was predicted: {error}")
            return Seen(facts, None, {})

    def _why_nothing(self, done: Ended) -> str:
        found, said = done.seen, f" ({done.reason})" if done.reason else ""
        error = f" with {found['error']}" if found["error"] else said
        if done.exit_code == -9:
            steps = plural(found["num_steps"], "step") if done.ranks else "no step"
            return f"nothing was tried: {steps} in {seconds(self._budget_s / 2)}; give it a larger --budget"
        if done.exit_code != 0 or found["error"]:
            return f"nothing was tried: the unchanged program ended{error}"
        if not found["num_steps"]:
            return (
                "nothing was tried: no optimizer of torch stepped after a backward pass in the program's own process; "
                "processes that it starts are not tried"
            )
        return (
            f"nothing was tried: the program ended by itself after {plural(found['num_steps'], 'step')}, and a "
            f"comparison takes {MIN_STEPS + 2}: let it run longer"
        )

    # Which

    def _choose(self, seen: Seen) -> list[Job]:
        """By predicted gain. What was left out is noted with its reason."""
        fitting = []
        self._predicted = {name: _predict(row, seen) for name, row in self._known.items()}
        for name, row in self._known.items():
            why = "" if name in self._only else row.misfit(seen)
            if self._only and name not in self._only:
                continue
            if why:
                self.tried.not_tried[name] = why
            else:
                fitting.append(row)
        fitting.sort(key=lambda row: -_expected(self._predicted[row.name]))
        if not self._only and not self._takes_all:
            for row in fitting[:]:
                likely = _expected(self._predicted[row.name])
                is_own = row.name not in load_candidates()
                if likely < MIN_PREDICTED and not is_own:
                    self.tried.not_tried[row.name] = "nothing predicts a gain from it"
                    fitting.remove(row)
            for row in fitting[NUM_CHOSEN:]:
                likely = _expected(self._predicted[row.name])
                self.tried.not_tried[row.name] = (
                    f"others are predicted to bring more than its {signed(likely)}: --all tries it"
                )
            fitting = fitting[:NUM_CHOSEN]
        jobs = [Job(row.name, (row,)) for row in fitting]
        self._rows = {job.name: self._row(job, seen) for job in jobs}
        return self._fit_into_budget(jobs)

    def _row(self, job: Job, seen: Seen) -> Row:
        loaders = [row["batch_size"] for row in seen.facts["loaders"] if isinstance(row["batch_size"], int)]
        words = {
            "device": seen.facts["device"], "threads": seen.facts["num_cores"],
            "optimizer": next((row["name"] for row in seen.facts["optimizers"]), "AdamW"),
            "workers": 1 if any(row["is_iterable"] for row in seen.facts["loaders"]) else MAX_WORKERS,
            "batch": int(job.samples * loaders[0]) if loaders else "",
        }  # fmt: skip
        codes = []
        for row in job.rows:
            code = row.code.get(self.tried.trainer, row.code.get("", ""))
            for key, value in words.items():
                code = code.replace(f"{{{key}}}", str(value))
            codes.append(code)
        return Row(
            names=[row.name for row in job.rows],
            what=", ".join(row.what for row in job.rows),
            predicted=self._predicted.get(job.name),
            code="\n".join(codes),
            watch_out="; ".join(row.watch_out for row in job.rows if row.watch_out),
        )

    def _fit_into_budget(self, jobs: list[Job]) -> list[Job]:
        """Shorter blocks where time is short; then fewer changes."""
        for size in SIZES if self._num_rounds > 1 else SIZES[-1:]:
            self._size = size
            if self._first_round_s(jobs) <= 0.7 * self.left_s:
                return jobs
        while jobs and (wanted_s := self._first_round_s(jobs)) > self.left_s:
            gone = self._rows[jobs.pop().name]
            gone.reason = (
                f"the budget has no room: a round with it takes {seconds(wanted_s)}, {seconds(self.left_s)} are left"
            )
        return jobs

    def _foretell(self, jobs: Sequence[Job]) -> None:
        """Say what begins, how long it takes, and what the budget leaves out."""
        start, step = seconds(self.tried.startup_s), seconds(self.tried.step_s)
        names = ", ".join(job.name for job in jobs) or "nothing"
        self._announce(
            f"The program takes {start} to start, and {step} a step. To be tried: {names}; the first round takes about "
            f"{seconds(self._first_round_s(jobs))}, and {seconds(self.left_s)} are left."
        )
        for name, row in self._rows.items():
            if row.reason:
                self._announce(f"Not tried: {name}: {row.reason}")

    def _first_round_s(self, jobs: Sequence[Job]) -> float:
        return sum(self._job_s(job) for job in (UNCHANGED, *self._joined(jobs))) if jobs else 0.0

    def _joined(self, jobs: Sequence[Job]) -> list[Job]:
        """Where starting the program takes long, what can be switched shares one process."""
        assert self.tried.startup_s is not None
        switched = [job for job in jobs if job.is_switched]
        if len(switched) < 2 or self.tried.startup_s * len(switched) < LONG_STARTUP * self.left_s:
            return list(jobs)
        one = Job("one-by-one", tuple(row for job in switched for row in job.rows), is_one_by_one=True)
        return [one, *(job for job in jobs if not job.is_switched)]

    def _job_s(self, job: Job) -> float:
        """How long it will take, about."""
        assert self.tried.startup_s is not None
        num = sum(int(block["steps"]) for block in self._plan(job)["plan"])
        return self.tried.startup_s + num * self._step_s(job) + (30.0 if "compile" in job.on else 1.0)

    def _step_s(self, job: Job) -> float:
        """A step with these changes: as it was before, or as predicted."""
        assert self.tried.step_s is not None
        before = [process_s(done.seen) for done in self._runs.get(job.name, {}).values()]
        gains = [_expected(self._predicted.get(row.name)) for row in job.rows if not row.is_switched]
        return median(before) if before else self.tried.step_s * job.samples / (1 + max(gains, default=0.0))

    # How

    def _plan(self, job: Job) -> dict[str, Any]:
        """Blocks of fixed numbers of steps, as many as the program has."""
        step_s = self._step_s(job)
        num_first = min(max(round(FIRST_S / step_s), MIN_FIRST), MAX_FIRST)
        num = max(round((1 if job.is_switched else 2) * self._size * BLOCK_S / step_s), MIN_BLOCK)
        pairs = max(round(NUM_PAIRS * math.sqrt(self._size)), MIN_PAIRS)
        if self._num_steps:
            num_first = min(num_first, max(self._num_steps // 5, MIN_FIRST))
            left = self._num_steps - num_first - 4
            num = max(min(num, left // (2 * pairs + 1 if job.is_switched else NUM_BLOCKS)), MIN_BLOCK)
            pairs = max(min(pairs, (left // num - 1) // 2), 1)
        first = {"on": [] if job.is_one_by_one else job.on, "steps": num_first, "kind": "first"}
        on, off = ({"on": names, "steps": num, "kind": "timed"} for names in (job.on, []))
        if job.is_switched:
            all_on = [[name] for name in job.on] if job.is_one_by_one else [job.on]
            plan = [first, off, *[block for names in all_on for block in ({**on, "on": names}, off)] * pairs]
        else:
            plan = [first, *[on] * NUM_BLOCKS]
        whole = [row.name for row in job.rows if not row.is_switched]
        return {"plan": plan, "whole": whole, "finds_models": bool(job.on)}

    def _measure(self, jobs: list[Job], seen: Seen) -> None:
        jobs = sorted(jobs, key=self._job_s)  # what may eat the budget, as compiling does, comes last
        self._round(0, [UNCHANGED, *self._joined(jobs)], jobs)
        for turn in range(1, self._num_rounds):
            open_jobs = [job for job in jobs if not self._is_done(job) and job.name not in self._one_by_one]
            if not open_jobs:
                break
            plain = [] if all(job.is_switched for job in open_jobs) else [UNCHANGED]
            if not self._round(turn, [*plain, *open_jobs], jobs):
                break
        best = [job.rows[0] for job in jobs if (row := self._rows[job.name]).outcome == "faster" and row.is_harmless]
        if any(row.name == "bf16" for row in best):
            best = [row for row in best if row.name != "tf32"]
        if len(best) > 1:
            job = Job("together", tuple(best))
            self._rows[job.name] = self._row(job, seen)
            for turn in range(MAX_RUNS, MAX_RUNS + (1 if job.is_switched else MIN_RUNS)):
                self._round(turn, [job] if job.is_switched else [UNCHANGED, job], [*jobs, job])

    def _round(self, turn: int, jobs: Sequence[Job], all_jobs: Sequence[Job]) -> bool:
        """Run each of them once; False when the budget ends it."""
        for job in jobs:
            if job.name in self._failed:
                continue
            wanted_s = self._job_s(job)
            if wanted_s > self.left_s:
                return False
            self._say(f"round {turn + 1}: {job.name}{self._so_far()}", 1 - self.left_s / self._budget_s)
            at_most_s = min(PATIENCE * wanted_s + 30, max(0.6 * self.left_s, wanted_s))
            done = self._launcher.run(job.name, at_most_s, self._plan(job))
            has_all = done.ranks and all(rank["is_whole"] and not rank["error"] for rank in done.ranks)
            if has_all or (done.exit_code == -9 and job.is_switched and len(timed(done.seen)) > 2 * MIN_PAIRS):
                for name in job.on if job.is_one_by_one else [job.name]:
                    self._runs.setdefault(name, {})[turn] = done
                    self._one_by_one |= {name} if job.is_one_by_one else set()
            elif done.exit_code == -9 and job.name in self._runs:
                return False
            elif job is UNCHANGED:
                self.tried.notes.append(f"the unchanged program failed in round {turn + 1}: {_why(done)}")
            else:
                self._failed |= dict.fromkeys(job.on if job.is_one_by_one else [job.name], _why(done))
            self._judge(all_jobs)
        return True

    def _is_done(self, job: Job) -> bool:
        num = len(self._runs.get(job.name, {}))
        most, least = (MAX_SWITCHED_RUNS, 1) if job.is_switched else (MAX_RUNS, MIN_RUNS)
        is_enough = num >= least and is_narrow(self._rows[job.name].gain)
        return job.name in self._failed or num >= most or is_enough

    # What came of it

    def _judge(self, jobs: Sequence[Job]) -> None:
        plain = self._runs.get(UNCHANGED.name, {})
        unchanged = [self._first, *(done.seen for done in plain.values())]
        alone = [job for job in jobs if not job.is_switched]
        for job in jobs:
            runs = self._runs.get(job.name, {}).values()
            beside = () if job.is_switched else plain.values()
            self._rows[job.name].is_wall = must_be_wall([done.seen for done in (*runs, *beside)])
        ratios = {
            job.name: [
                process_s(plain[turn].seen, is_wall=is_wall) / process_s(done.seen, is_wall=is_wall)
                for turn, done in self._runs.get(job.name, {}).items()
                if turn in plain
            ]
            for job in alone
            for is_wall in [self._rows[job.name].is_wall]
        }
        spread = max((block_spread(done.seen) for done in plain.values()), default=0.0)
        gains = process_gains(ratios, {job.name: job.samples for job in alone}, spread)
        for job in jobs:
            row, own = self._rows[job.name], list(self._runs.get(job.name, {}).values())
            if job.name in self._failed:
                row.reason = self._failed[job.name]
                row.outcome = "not measured" if row.reason.startswith(LATE) else "failed"
            if not own:
                continue
            found = [done.seen for done in own]
            gain = (
                switched_gain(found, job.on, job.samples, is_wall=row.is_wall)
                if job.is_switched
                else gains.get(job.name)
            )
            row.gain = gain
            settle(row)
            row.num_runs = len(own)
            row.num_steps = sum(len(block["seconds"]) for seen in found for block in timed(seen, job.on))
            row.startup_s = found[0]["startup_s"]
            rounding = max(candidate.rounding for candidate in job.rows)
            row.losses, row.losses_text = judge_losses(found[0], unchanged, rounding, job.samples)
            if job.name in self._one_by_one:
                row.losses, row.losses_text = "unknown", "not told apart: all changes shared one process"
            peaks = [rank for done in own for rank in done.ranks]
            others = [rank for done in plain.values() for rank in done.ranks]
            row.memory_bytes, row.memory_text = judge_memory(peaks, others, job.on)
        known = [block["peak_bytes"] for done in plain.values() for rank in done.ranks for block in timed(rank)]
        self.tried.memory_bytes = max((value for value in known if value is not None), default=None)
        if plain:
            self.tried.step_s = self._step_s(UNCHANGED)

    def _so_far(self) -> str:
        found = [f"{row.what} {gain_text(row.gain)}" for row in self._rows.values() if row.gain is not None]
        return f"; so far {', '.join(found)}" if found else ""

    def _write(self, why_not: str) -> None:
        tried = self.tried
        rows = dict(self._rows)
        for row in rows.values():
            if row.outcome == "not measured" and not row.reason:
                row.reason = why_not
        tried.is_whole = tried.step_s is not None and all(row.outcome != "not measured" for row in rows.values())
        tried.together = rows.pop("together", None)
        tried.rows = sorted(rows.values(), key=lambda row: -(row.gain.expected if row.gain else -math.inf))
        self._add_notes()
        tried.headline = headline(tried)
        tried.seconds = time.monotonic() - self._start_s
        if tried.step_s is not None:
            text = msgspec.json.format(msgspec.json.encode(tried), indent=1).decode()
            replace_file(self._launcher.output_dir / TRIED_FILE, lambda file: file.write(text))

    def _add_notes(self) -> None:
        notes, launcher = self.tried.notes, self._launcher
        found = [timed(done.seen) for runs in self._runs.values() for done in runs.values()]
        waits = [sum(block["waited"]) / sum(block["seconds"]) for blocks in found for block in blocks]
        if waits and fmean(waits) > BUSY:
            walls = [name for name, row in self._rows.items() if row.gain is not None and row.is_wall]
            but = f", but not for {' and '.join(walls)}: there others of the program work, too" if walls else ""
            notes.append(
                f"the machine was busy: the training thread waited for a core for {percent(fmean(waits))} of the time, "
                f"which is left out of the times{but}"
            )
        if not launcher.is_copied:
            notes.append(f"{launcher.folder} is too large to be copied: the program ran in it")
        if launcher.saved:
            notes.append(
                f"what the program saves elsewhere went into the trials' folders: {_few(sorted(launcher.saved))}"
            )
        if changed := launcher.changed_files():
            notes.append(f"{plural(len(changed), 'file')} of {launcher.folder} changed meanwhile: {_few(changed)}")


def headline(tried: Tried) -> str:
    """The result in a line."""
    rows = [*tried.rows, *([tried.together] if tried.together else [])]
    measured = [row for row in rows if row.gain is not None]
    faster = [row for row in measured if row.outcome == "faster"]
    harmless = [row for row in faster if row.is_harmless]
    if harmless:
        best = max(harmless, key=lambda row: row.gain.expected if row.gain else 0.0)
        return f"tried: {gain_text(best.gain)} with {' and '.join(best.names)}"
    if faster:
        return f"tried: {gain_text(faster[0].gain)} with {faster[0].names[0]}, but not without harm"
    if not measured:
        return "tried: nothing was measured"
    return f"tried: of {plural(len(measured), 'change')} none makes it faster"


def gain_text(gain: Gain | None) -> str:
    """A gain with its interval, in percent."""
    return "-" if gain is None else f"{signed(gain.expected)} ({100 * gain.low:.0f} to {100 * gain.high:.0f})"


def _predict(row: Candidate, seen: Seen) -> Gain | None:
    """The largest gain of the findings that the change is for; else of the parts of the waterfall that it touches."""
    if seen.diagnosis is None:
        return None
    found = [
        finding.gain for finding in (*seen.diagnosis.findings, *seen.diagnosis.symptoms)
        if finding.rule in row.rules and finding.gain is not None
    ]  # fmt: skip
    if found:
        return max(found, key=lambda gain: gain.expected)
    saved = sum(share * seen.share(part) for part, share in row.saves.items())
    return Gain.of_saving(1.0, 0.3 * saved, saved, 1.5 * saved) if saved else None


def _expected(gain: Gain | None) -> float:
    return gain.expected if gain is not None else 0.0


def _why(done: Ended) -> str:
    if done.seen["error"]:
        return str(done.seen["error"])[:300]
    if done.exit_code == 0:
        return f"the program ended by itself after {plural(done.seen['num_steps'], 'step')}"
    if done.exit_code == -9:
        return f"{LATE} {seconds(done.seconds)}"
    said = f"; it said last: {done.reason}" if done.reason else ""
    return f"it was ended by signal {-done.exit_code}{said}" if done.exit_code < 0 else done.reason


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")

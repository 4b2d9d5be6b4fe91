"""Which changes are tried, in which order, and for how long?

First the unchanged program, under `flopmeter run`: its record tells what would help. Then rounds, in which the
unchanged program and the changes take turns, each for a fixed number of steps, until intervals are narrow or the budget
is spent. At last the best changes together.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec

from flopmeter.diagnosis import Gain, diagnose
from flopmeter.errors import ConfigError, FlopmeterError, RecordError, did_you_mean
from flopmeter.record import load_run, replace_file
from flopmeter.text import percent, plural, seconds, signed
from flopmeter.trials import NOTHING_SEEN, TRIED_FILE, Losses, Row, Tried
from flopmeter.trials.candidates import CANDIDATES, MAX_WORKERS, Candidate, Seen, load_candidates
from flopmeter.trials.judging import (
    block_spread,
    is_narrow,
    judge_losses,
    judge_memory,
    must_be_wall,
    process_gain,
    process_s,
    process_spread,
    settle,
    switched_gain,
    timed,
    waited_share,
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
MAX_SWITCHED_RUNS, MIN_RUNS, MAX_RUNS = 3, 3, 6
"""Processes for a change that is switched on and off; for one that takes a process of its own, at least and at most."""
LONG_STARTUP = 0.5
"""When start-ups would take this share of what is left, all changes that can be switched share one process."""
PATIENCE = 3.0
"""A process may take so many times as long as was expected."""
COMPILING_S = 30.0
"""How long torch.compile takes on an idle machine, about."""
BUSY = 0.05
"""Share of its time that the training thread waited for a core, from which on it is said."""
NOT_APART: tuple[Losses, str] = ("unknown", "not told apart: all changes shared one process")
SAFETY = (
    "The program is run again and again, each time for a few steps, in a copy of this folder where that is small. "
    "Whether it is safe to repeat (it deletes, uploads, or talks to a service) is yours to judge."
)


@dataclass(eq=False)
class Job:
    """What runs in a process: changes for the whole of it, and changes that are switched; and what came of it."""

    name: str
    changes: tuple[Candidate, ...] = ()
    row: Row = field(default_factory=lambda: Row(names=[], what=""))
    parts: tuple[Job, ...] = ()
    """Where start-ups take long: jobs whose changes are switched on one after the other in this one."""
    runs: dict[int, Ended] = field(default_factory=dict)
    """By round."""

    @property
    def is_switched(self) -> bool:
        return bool(self.changes) and all(change.is_switched for change in self.changes)

    @property
    def samples(self) -> float:
        return math.prod(change.samples for change in self.changes)

    @property
    def on(self) -> list[str]:
        """Those that can be switched."""
        return [change.name for change in self.changes if change.is_switched]

    @property
    def is_done(self) -> bool:
        """Whether another run would tell little more."""
        most, least = (MAX_SWITCHED_RUNS, 1) if self.is_switched else (MAX_RUNS, MIN_RUNS)
        is_enough = len(self.runs) >= least and is_narrow(self.row.gain)
        return bool(self.row.reason) or len(self.runs) >= most or is_enough or self.row.losses_text == NOT_APART[1]


@dataclass
class Trials:
    """All that one `flopmeter try` does; `run()` begins, and `tried` has the result."""

    launcher: Launcher
    """Runs the program."""
    budget_s: float
    """How long all of it may take."""
    only: Sequence[str]
    """Names of changes; empty for those that are predicted to bring most."""
    takes_all: bool
    """Try whatever fits."""
    num_rounds: int
    """At most so many, before the best are tried together."""
    say: Callable[[str, float], None]
    """Is told what runs, what was found so far, and how much of the budget is spent, from 0 to 1."""
    announce: Callable[[str], None]
    """Is told, before it begins, how long it will take and what is left out."""

    def __post_init__(self) -> None:
        self.tried = Tried(program=self.launcher.program)
        self._start_s = time.monotonic()
        self._known = load_candidates(self.launcher.candidates)
        for name in self.only:
            if name not in self._known:
                raise ConfigError(f"--only: unknown {name!r}: {did_you_mean(name, self._known)}")
        self._unchanged = Job("unchanged")
        self._jobs: list[Job] = []
        self._first = NOTHING_SEEN
        self._num_steps = 0
        """Steps that the program has by itself; 0 where it was ended."""
        self._size = 1.0
        """Of all blocks, where the budget leaves no room for whole ones."""

    def run(self) -> None:
        """Do all of it. Whatever ends it, `tried` holds what was found."""
        is_stopped = True
        try:
            seen = self._look()
            self._choose(seen)
            self._measure(seen, self._fit_into_budget())
            is_stopped = False
        finally:
            self.launcher.end()
            self._write("it was stopped before" if is_stopped else "the budget was spent before")

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self._start_s)

    # The first look

    def _look(self) -> Seen:
        self.say("the program as it is, measured", 0.0)
        until = {**LOOK, "max_s": min(LOOK["max_s"], self.budget_s / 6)}
        plan = {"plan": [{"on": [], "steps": 0, "kind": "timed"}], "until": until, "finds_models": False}
        done = self.launcher.run("first-look", self.budget_s / 2, plan, is_measured=True)
        found = self._first = done.seen
        times = [second for block in found["blocks"] for second in block["seconds"]]
        if not found["is_whole"] and len(times) < MIN_STEPS:
            raise FlopmeterError(f"nothing was tried: {_why(done, is_first=True)}")
        self._num_steps = 0 if found["is_whole"] else found["num_steps"]
        facts = found["facts"] | {"loaders": found["loaders"], "waited_share": waited_share([found])}
        self.tried.step_s, self.tried.startup_s = median(times), found["startup_s"]
        self.tried.trainer = found["facts"]["trainer"]
        try:
            run = load_run(self.launcher.output_dir)
            return Seen(facts, diagnose(run), run.last("facts"))
        except RecordError as error:
            self.tried.notes.append(f"nothing was predicted: {error}")
            return Seen(facts, None, {})

    # Which

    def _choose(self, seen: Seen) -> None:
        """By predicted gain. What was left out is noted with its reason."""
        fitting: list[tuple[float, Job]] = []
        for name, change in self._known.items():
            why = "" if name in self.only else change.misfit(seen)
            if self.only and name not in self.only:
                continue
            job = self._job(name, (change,), seen)
            job.row.predicted = _predict(change, seen)
            likely = job.row.predicted.expected if job.row.predicted else 0.0
            if not why and not self.only and not self.takes_all and likely < MIN_PREDICTED and name in CANDIDATES:
                why = "nothing predicts a gain from it"
            if why:
                self.tried.not_tried[name] = why
            else:
                fitting.append((likely, job))
        fitting.sort(key=lambda pair: -pair[0])
        num = len(fitting) if self.only or self.takes_all else NUM_CHOSEN
        self._jobs = [job for _, job in fitting[:num]]
        for likely, job in fitting[num:]:
            why = f"others are predicted to bring more than its {signed(likely)}: --all tries it"
            self.tried.not_tried[job.name] = why

    def _job(self, name: str, changes: tuple[Candidate, ...], seen: Seen) -> Job:
        job = Job(name, changes)
        loaders = [row["batch_size"] for row in seen.facts["loaders"] if isinstance(row["batch_size"], int)]
        words = {
            "device": seen.facts["device"], "threads": seen.facts["num_cores"],
            "optimizer": next((row["name"] for row in seen.facts["optimizers"]), "AdamW"),
            "workers": 1 if any(row["is_iterable"] for row in seen.facts["loaders"]) else MAX_WORKERS,
            "batch": int(job.samples * loaders[0]) if loaders else "",
        }  # fmt: skip
        codes = "\n".join(change.code.get(self.tried.trainer, change.code.get("", "")) for change in changes)
        for key, value in words.items():
            codes = codes.replace(f"{{{key}}}", str(value))
        job.row = Row(
            names=[change.name for change in changes],
            what=", ".join(change.what for change in changes),
            code=codes,
            watch_out="; ".join(change.watch_out for change in changes if change.watch_out),
        )
        return job

    def _fit_into_budget(self) -> list[Job]:
        """Shorter blocks where time is short; then fewer changes. What that means is said before it begins."""
        jobs = list(self._jobs)
        while True:
            for size in SIZES if self.num_rounds > 1 else SIZES[-1:]:
                self._size = size
                if (wanted_s := self._first_round_s(jobs)) <= 0.7 * self.left_s:
                    break
            if not jobs or wanted_s <= self.left_s:
                break
            jobs.remove(longest := max(jobs, key=self._job_s))
            why = f"the budget has no room: a round with it takes {wanted_s:.0f} s, {self.left_s:.0f} s are left"
            longest.row.reason = why
        start, step = seconds(self.tried.startup_s), seconds(self.tried.step_s)
        names = ", ".join(job.name for job in jobs) or "nothing"
        self.announce(
            f"The program takes {start} to start, and {step} a step. To be tried: {names}; the first round takes about "
            f"{seconds(self._first_round_s(jobs))}, and {seconds(self.left_s)} are left."
        )
        for job in self._jobs:
            if job.row.reason:
                self.announce(f"Not tried: {job.name}: {job.row.reason}")
        return jobs

    def _first_round_s(self, jobs: Sequence[Job]) -> float:
        plain = [] if all(job.is_switched for job in jobs) else [self._unchanged]
        return sum(self._job_s(job) for job in (*plain, *self._joined(jobs)))

    def _joined(self, jobs: Sequence[Job]) -> list[Job]:
        """Where starting the program takes long, what can be switched shares one process."""
        assert self.tried.startup_s is not None
        parts = tuple(job for job in jobs if job.is_switched)
        if len(parts) < 2 or self.tried.startup_s * len(parts) < LONG_STARTUP * self.left_s:
            return list(jobs)
        one = Job("one-by-one", tuple(change for job in parts for change in job.changes), parts=parts)
        return [one, *(job for job in jobs if not job.is_switched)]

    def _job_s(self, job: Job) -> float:
        """How long it will take, about."""
        assert self.tried.startup_s is not None
        num = sum(int(block["steps"]) for block in self._plan(job)["plan"])
        compiling_s = COMPILING_S / (1.01 - waited_share([self._first])) if "compile" in job.on else 1.0
        return self.tried.startup_s + num * self._step_s(job) + compiling_s

    def _step_s(self, job: Job) -> float:
        """A step with these changes: as it was before, or as predicted."""
        assert self.tried.step_s is not None
        if job.runs:
            return median(process_s(done.seen) for done in job.runs.values())
        gain = 0.0 if job.is_switched or not job.row.predicted else job.row.predicted.expected
        return self.tried.step_s * job.samples / (1 + gain)

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
        off = {"on": [], "steps": num, "kind": "timed"}
        plan = [{"on": [] if job.parts else job.on, "steps": num_first, "kind": "first"}]
        if job.is_switched:
            kinds = [part.on for part in job.parts] or [job.on]
            plan += [off, *[block for on in kinds for block in ({**off, "on": on}, off)] * pairs]
        else:
            plan += [{**off, "on": job.on}] * NUM_BLOCKS
        whole = [change.name for change in job.changes if not change.is_switched]
        return {"plan": plan, "whole": whole, "finds_models": bool(job.on)}

    def _measure(self, seen: Seen, jobs: list[Job]) -> None:
        jobs.sort(key=self._job_s)  # what may eat the budget, as compiling does, comes last
        if jobs:  # where nothing takes turns with the unchanged program, it only shows how far its own losses differ
            first = self._joined(jobs)
            plain = [self._unchanged]
            self._round(0, [*first, *plain] if all(job.is_switched for job in jobs) else [*plain, *first])
        for turn in range(1, self.num_rounds):
            left = [job for job in jobs if not job.is_done]
            plain = [] if all(job.is_switched for job in left) else [self._unchanged]
            if not left or not self._round(turn, [*plain, *left]):
                break
        best = [job.changes[0] for job in jobs if job.row.outcome == "faster" and job.row.is_harmless]
        if any(change.name == "bf16" for change in best):
            best = [change for change in best if change.name != "tf32"]
        if len(best) > 1:
            job = self._job("together", tuple(best), seen)
            self._jobs.append(job)
            for turn in range(MAX_RUNS, MAX_RUNS + (1 if job.is_switched else MIN_RUNS)):
                self._round(turn, [job] if job.is_switched else [self._unchanged, job])

    def _round(self, turn: int, jobs: Sequence[Job]) -> bool:
        """Run each of them once; False when the budget ends it."""
        for job in jobs:
            if job.row.reason:
                continue
            wanted_s = self._job_s(job)
            if wanted_s > self.left_s:
                return False
            found = [f"{one.row.what} {gain_text(one.row.gain)}" for one in self._jobs if one.row.gain is not None]
            so_far = f"; so far {', '.join(found)}" if found else ""
            self.say(f"round {turn + 1}: {job.name}{so_far}", 1 - self.left_s / self.budget_s)
            at_most_s = min(PATIENCE * wanted_s + 30, max(0.6 * self.left_s, wanted_s))
            done = self.launcher.run(job.name, at_most_s, self._plan(job))
            has_all = done.ranks and all(rank["is_whole"] and not rank["error"] for rank in done.ranks)
            is_late = done.exit_code is None and not done.seen["error"]
            if has_all or (is_late and job.is_switched and len(timed(done.seen)) > 2 * MIN_PAIRS):
                for one in job.parts or (job,):
                    one.runs[turn] = done
                    one.row.losses, one.row.losses_text = NOT_APART if job.parts else ("unknown", "")
            elif is_late and job.runs:
                return False
            elif job is self._unchanged:
                self.tried.notes.append(f"the unchanged program failed in round {turn + 1}: {_why(done)}")
            else:
                reached = done.seen["blocks"][-1]["on"] if job.parts and done.seen["blocks"] else job.on
                for one in job.parts or (job,):
                    is_own = one.on == reached
                    one.row.outcome = "failed" if is_own and not is_late else "not measured"
                    one.row.reason = (
                        _why(done) if is_own else f"the process that all changes shared ended: {_why(done)}"
                    )
            self._judge()
        return True

    # What came of it

    def _judge(self) -> None:
        plain = self._unchanged.runs
        unchanged = [self._first, *(done.seen for done in plain.values())]
        blocks = max((block_spread(done.seen) for done in plain.values()), default=0.0)
        plain_ranks = [rank for done in plain.values() for rank in done.ranks]
        for job in self._jobs:
            row, found = job.row, [done.seen for done in job.runs.values()]
            if not found:
                continue
            row.is_wall = must_be_wall(found if job.is_switched else [*found, *unchanged[1:]])
            if job.is_switched:
                row.gain = switched_gain(found, job.on, job.samples, is_wall=row.is_wall)
            else:
                times = ((plain[turn].seen, done.seen) for turn, done in job.runs.items() if turn in plain)
                step_s = ([process_s(seen, is_wall=row.is_wall) for seen in pair] for pair in times)
                row.gain = process_gain(
                    [without / own for without, own in step_s], job.samples, process_spread(unchanged), blocks
                )
            if row.outcome != "failed":
                settle(row)
            row.num_runs, row.startup_s = len(found), found[0]["startup_s"]
            row.num_steps = sum(len(block["seconds"]) for seen in found for block in timed(seen, job.on))
            if row.losses_text != NOT_APART[1]:
                rounding = max(change.rounding for change in job.changes)
                row.losses, row.losses_text = judge_losses(found[0], unchanged, rounding, job.samples)
            runs = [done.ranks for done in job.runs.values()]
            row.memory_bytes, row.memory_text = judge_memory(runs, plain_ranks or runs[0], job.on)
        known = [block["peak_bytes"] for rank in plain_ranks or [self._first] for block in timed(rank)]
        self.tried.memory_bytes = max((value for value in known if value is not None), default=None)
        if plain:
            self.tried.step_s = self._step_s(self._unchanged)

    def _write(self, why_not: str) -> None:
        tried, launcher = self.tried, self.launcher
        rows = [job.row for job in self._jobs if job.name != "together"]
        tried.together = next((job.row for job in self._jobs if job.name == "together"), None)
        tried.rows = sorted(rows, key=lambda row: -(row.gain.expected if row.gain else -math.inf))
        for job in self._jobs:
            if job.row.outcome == "not measured":
                job.row.reason = job.row.reason or why_not
        is_all = all(job.row.outcome != "not measured" for job in self._jobs)
        tried.is_whole = tried.step_s is not None and is_all
        waited = waited_share(done.seen for job in (self._unchanged, *self._jobs) for done in job.runs.values())
        walls = " and ".join(job.name for job in self._jobs if job.row.gain is not None and job.row.is_wall)
        changed, saved = launcher.changed_files(), sorted(launcher.saved)
        tried.notes += [
            note for is_so, note in (
                (waited > BUSY, "the machine was busy: the training thread waited for a core for "
                 f"{percent(waited)} of the time, which is left out of the times"
                 f"{f', but not for {walls}, where more than that thread works' if walls else ''}"),
                (not launcher.is_copied, f"{launcher.folder} is too large to be copied: the program ran in it"),
                (saved, f"what the program saves elsewhere went into the trials' folders: {_few(saved)}"),
                (changed, f"{plural(len(changed), 'file')} of {launcher.folder} changed meanwhile: {_few(changed)}"),
            ) if is_so
        ]  # fmt: skip
        tried.headline = headline(tried)
        tried.seconds = time.monotonic() - self._start_s
        if tried.step_s is not None:
            text = msgspec.json.format(msgspec.json.encode(tried), indent=1).decode()
            replace_file(launcher.output_dir / TRIED_FILE, lambda file: file.write(text))


def headline(tried: Tried) -> str:
    """The result in a line."""
    rows = [*tried.rows, *([tried.together] if tried.together else [])]
    measured = [(row.is_harmless, row.gain.expected, row) for row in rows if row.gain is not None]
    if not measured:
        return "nothing was measured"
    faster = [one for one in measured if one[2].outcome == "faster"]
    if not faster:
        return f"of {plural(len(measured), 'change')} none makes it faster"
    best = max(faster, key=lambda one: one[:2])[2]
    return (
        f"{gain_text(best.gain)} with {' and '.join(best.names)}{'' if best.is_harmless else ', but not without harm'}"
    )


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


def _why(done: Ended, *, is_first: bool = False) -> str:
    """Why a run, or the first look, came to nothing."""
    num, error = plural(done.seen["num_steps"], "step"), str(done.seen["error"])[:300]
    if is_first and not error and done.exit_code == 0 and not done.seen["num_steps"]:
        return (
            "no optimizer of torch stepped after a backward pass in the program's own process; processes that it "
            "starts are not tried"
        )
    if done.exit_code is None and not error:
        late = f"it was not done after {seconds(done.seconds)}"
        return f"{late}, with {num}; give it a larger --budget" if is_first else late
    if done.exit_code == 0 and not error:
        more = f", and a comparison takes {MIN_STEPS + 2}: let it run longer" if is_first else ""
        return f"the program ended by itself after {num}{more}"
    why = error or done.reason or f"exit code {done.exit_code}"
    if done.exit_code is not None and done.exit_code < 0:
        memory = ", as when memory runs out" if done.exit_code == -signal.SIGKILL else ""
        why = f"signal {-done.exit_code}{memory}{f'; it said last: {done.reason}' if done.reason else ''}"
    return f"the unchanged program ended with {why}" if is_first else why


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")

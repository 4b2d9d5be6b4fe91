"""What does the record of a run hold that rules can judge by, and what may a rule claim?

An accessor whose answer is missing raises `NotCheckedError` with the reason; a rule that merely would like to know asks
with a default instead. What the record holds of names and lists is typed and cut here, once.
"""

from __future__ import annotations

import math
import operator
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from flopmeter.columns import LONGEST_S, known, mapping, number_or_nan
from flopmeter.devices import dtype_name
from flopmeter.text import amount as amount_of
from flopmeter.text import clean, percent, plural
from flopmeter.totals import memory_of
from flopmeter.waterfall import LABELS, NO_WORK, Split, Window, assemble

if TYPE_CHECKING:
    from flopmeter.record import Run
    from flopmeter.waterfall.sampled import Sampled

MAX_COUNT = 1e18
"""Above this, a count in the record is damage."""
MAX_SENTENCE = 600
"""Characters of a sentence; no honest one is longer."""
MAX_SAVED = 0.95
"""No fix is promised to save more of the wall time than this: a gain of twenty times is past believing anyway."""
LIKELY = 0.95
"""Of a loss that a fix can take away, a twentieth is taken to stay: no loader is always ahead."""
STARVED = 0.7
"""Below this share of the CPU time that it wants, the CPU time of a process's parts says little of what they do."""
MUCH_MOVED = 0.22
"""Share of the time from which on operators other than matmuls are a finding: where torch's profiler, whose recording
makes small operators longer, reads a quarter."""
OFF_CORE_S = 0.01
"""For how long a thread is off its core at a time, where others want it: a few of the scheduler's slices."""
SYNC_SPAN = 100
"""Launches after a synchronisation during which a GPU still waits for the host to get ahead of it again: the depth of
the queue that it has to rebuild."""
LAUNCH_S = 1e-5
"""What the host takes for one launch in eager mode; longer gaps behind a synchronisation have other causes."""
SLOWEST_LAUNCH_S = 1e-4
"""What it takes at most, Python around it included: idle time beyond that was not spent on launching."""
LIGHT_OPTIMIZERS = ("fused", "foreach")
HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch with a fused form."""
MANY_READS = 10
"""Values read in a step from which on printing or bookkeeping may be what the loop's own code does."""
MANY_STEPS = 50
"""The first step is sampled after ten ordinary ones: a run of so many that has none was told not to sample."""
MATMULS = ("ideal", "card_below_peak", "matmul_below_peak")
"""Parts that are the time of matmuls."""
MOST = 0.5
"""With more of the wall time untold than this, nothing is known of the run but its length."""


class NotCheckedError(Exception):
    """A rule's inputs are missing; the text says which, and completes "not checked, because"."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted speed-up of the run, as a ratio minus one: 0.12 is 12 % more steps a second, and MFU times 1.12."""

    low: float
    """What to expect at least."""
    expected: float
    """The likeliest."""
    high: float
    """What to expect at most."""

    @classmethod
    def of_saving(cls, wall_s: float, low_s: float, expected_s: float, high_s: float) -> Gain:
        """From seconds saved of the wall time T: T / (T - saved) - 1."""
        shares = sorted(min(max(seconds / wall_s, 0.0), MAX_SAVED) for seconds in (low_s, expected_s, high_s))
        low, expected, high = (1 / (1 - share) - 1 for share in shares)
        return cls(low=low, expected=expected, high=high)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of lost time."""

    rule: str
    """The rule's name, as `flopmeter report --explain` takes it."""
    title: str
    """What is wrong, as half a sentence that the headline can end with."""
    lost: float
    """Share of the wall time that it costs, which is MFU points as a fraction."""
    evidence: tuple[str, ...]
    """What was measured, one sentence each."""
    advice: tuple[str, ...]
    """What to change, the likeliest fix first."""
    gain: Gain | None
    """What the fix brings; None where the record does not tell."""
    mfu_after: float | None = None
    """The MFU with the expected gain; None where it is unknown, or another peak would hold."""
    is_cause: bool = True
    """Whether it names a cause; `healthy` and `undetermined` do not."""
    is_doubt: bool = False
    """Whether it puts all numbers of the run in doubt."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One cause that can be looked for: the data in which rules differ."""

    name: str
    """As users type it."""
    look: Callable[[Evidence, Rule], Finding | None]
    """Looks for it."""
    parts: tuple[str, ...] = ()
    """Parts of the waterfall that its loss can come from: it may claim no more than they hold. None are named where it
    can come from all but the useful work."""
    threshold: float = 0.0
    """Share of the wall time from which on it is a finding."""
    leads_from: float = 0.1
    """Share of the wall time from which on it may be the first that is named: a loss of a twentieth is no reason of a
    low MFU. More for work that somebody wants, which a fix never takes away as a whole."""
    explains: tuple[str, ...] = ()
    """Rules whose findings are symptoms of this one, and are left out beside it."""
    is_last_resort: bool = False
    """Whether it names no cause, and is asked when no other has found a large one."""
    is_circumstance: bool = False
    """Whether it is true of the machine at that time rather than of the program: causes are looked for beside it."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the last observed step showed, typed and cut; what is missing has its default."""

    is_known: bool = False
    host_syncs: dict[str, float] = {}
    host_sync_places: tuple[str, ...] = ()
    odd_sizes: tuple[tuple[str, ...], ...] = ()
    """Module, dimension, size."""
    matmul_dtypes: dict[str, float] = {}
    tf32: bool = False
    optimizer: str = ""
    """fused, foreach or for-loop."""
    wrapper: str = ""
    """DistributedDataParallel, FSDPModule or FullyShardedDataParallel, where the model is in one."""
    is_compiled: bool = False
    num_optimizer_ops: float = 0.0
    num_parameter_tensors: float = 0.0
    num_recompiles: float = 0.0
    num_shapes: float = 0.0
    attention: tuple[str, str, tuple[str, ...]] | None = None
    """Calls, length and modules of attention that is spelled out."""

    @classmethod
    def of(cls, event: dict[str, Any]) -> Facts:
        """From the event `facts`."""
        counts = ("num_optimizer_ops", "num_parameter_tensors", "num_recompiles", "num_shapes")
        seen = mapping(event.get("eager_attention"))
        odd = [item for item in _items(event.get("odd_sizes"))[:10] if isinstance(item, dict)]
        modules = tuple(str(name)[:60] for name in _items(seen.get("modules"))[:3])
        fields = (("module", 60), ("dimension", 20), ("size", 20))
        return cls(
            is_known=bool(event),
            host_syncs=_amounts(event.get("host_syncs"), MAX_COUNT),
            host_sync_places=tuple(clean(place, 80) for place in _items(event.get("host_sync_places"))[:5]),
            odd_sizes=tuple((*(str(item.get(name))[:size] for name, size in fields),) for item in odd),
            matmul_dtypes=_amounts(event.get("matmul_dtypes"), MAX_COUNT * MAX_COUNT),
            tf32=event.get("tf32") is True,
            optimizer=str(event.get("optimizer") or "")[:20],
            wrapper=str(event.get("wrapper") or "")[:60],
            is_compiled=event.get("is_compiled") is True,
            attention=(str(seen.get("calls"))[:20], str(seen.get("length"))[:20], modules) if seen else None,
            **{key: math.fsum(known([event.get(key)], MAX_COUNT)) for key in counts},
        )


class Evidence:
    """The facts of one window of a run."""

    def __init__(self, run: Run, start: int | None = None, stop: int | None = None) -> None:
        self.run = run
        self.window = Window(run, start, stop)
        self._split = Split(self.window)
        self.waterfall = assemble(self._split)
        self.wall_s = self.waterfall.wall_s
        self.num_steps = len(self.window)
        header = run.headers[-1] if run.headers else None
        self.device = clean(header.device, 80) if header else ""
        """Its name, as the driver gives it; "" when unknown."""
        self.mode = header.mode if header else ""
        """How the FLOPs were obtained; "trace" for a run that was made of a profiler's trace, "" when unknown."""
        self.model = header.model if header else ""
        """Its class, which DDP and FSDP name after themselves."""
        self.world_size = header.world_size if header else 1
        self.facts = Facts.of(self.window.latest("facts"))
        self.sampled: Sampled | None = self._split.sampled if self.window.timed else None
        """The sampled steps, if there are any."""
        is_sampled_there = self.sampled is not None and self.sampled.device == "cuda"
        self.is_gpu = is_sampled_there or self.device.split(":")[0] not in ("", "cpu")
        self.has_steps = not (self.mode == "trace" and self.num_steps == 1)
        """Whether the record is cut into steps. A recording that is not is one stretch of anything: nothing that is
        found in it is what an ordinary step does."""

    def finding(
        self,
        rule: Rule,
        title: str,
        lost_s: float | None,
        evidence: Sequence[str] = (),
        *,
        saved: tuple[float, float, float] | None = (0.5, LIKELY, 1.0),
        **more: Any,
    ) -> Finding | None:
        """A finding that claims no more than the waterfall leaves it; None below the rule's threshold.

        Args:
            title: A `{}` in it is where the share of the time goes that is lost.
            lost_s: Of the window; None where that is not known, and then no threshold holds.
            saved: What the fix saves of `lost_s` at least, likely and at most; None where that is not known.
        """
        if not self.has_steps:
            saved = None
        mfu = self.waterfall.mfu
        most_s = self.wall_s * (1 - mfu if mfu and mfu <= 1 and "ideal" not in rule.parts else 1)
        if rule.parts:
            most_s = min(most_s, math.fsum(max(self.seconds_or_zero(part), 0.0) for part in rule.parts))
        lost = 0.0 if lost_s is None else min(lost_s, most_s) / self.wall_s
        if lost_s is not None and not lost >= rule.threshold:
            return None
        gain = saved and Gain.of_saving(self.wall_s, *(min(part * (lost_s or 0.0), most_s) for part in saved))
        return Finding(
            rule=rule.name,
            title=clean(title.replace("{}", percent(lost)), MAX_SENTENCE),
            lost=lost,
            evidence=tuple(clean(text, MAX_SENTENCE) for text in evidence),
            advice=tuple(clean(text, MAX_SENTENCE) for text in self.advice(rule.name)),
            gain=gain,
            mfu_after=min(mfu * (1 + gain.expected), 1.0) if mfu is not None and gain and mfu <= 1 else None,
            is_cause=not rule.is_last_resort,
            **more,
        )

    def share(self, part: str) -> float:
        """Share of the wall time of a part of the waterfall."""
        share = self.waterfall.share(part)
        if share is None:
            raise NotCheckedError(_MISSING_PART.get(part, f"the record does not tell {LABELS.get(part, part).lower()}"))
        return share

    def seconds(self, part: str) -> float:
        """Seconds of a part of the waterfall."""
        return self.share(part) * self.wall_s

    def seconds_or_zero(self, *parts: str) -> float:
        """The same, for parts that only add to a judgement."""
        return math.fsum(self.waterfall.seconds(part) or 0.0 for part in parts)

    def least_s(self, part: str) -> float:
        """Seconds of a sampled part, less what may have fallen into it by chance."""
        return max(self.seconds(part) - self.chance_s(part), 0.0)

    def chance_s(self, part: str) -> float:
        """By how much a sampled part may be off because the thread was off its core.

        Waits hit the operators of a sampled step by chance: of n of them, each of d seconds, n p d fall into a part
        that takes the share p of the step, give or take twice d sqrt(n p (1 - p)). Kernels of a GPU wait for no core.
        """
        share = min(max(self.share(part), 0.0), 1.0)
        if self.sampled is None or self.is_gpu:
            return 0.0
        chance_s = 2 * math.sqrt(self.sampled.waited_s * OFF_CORE_S * share * (1 - share))
        longest_s = min(chance_s, self.sampled.waited_s) * max(self.sampled.kept, 1.0)
        return min(self.num_steps * longest_s, self.wall_s)

    def percent(self, seconds: float) -> str:
        """Seconds of the window as a share of the wall time, in words."""
        return percent(seconds / self.wall_s)

    def mean(self, key: str) -> float:
        """A column over the ordinary steps, weighted by their time."""
        amount, step = self.window.amount(key), self.window.step
        if amount is None or step is None:
            raise NotCheckedError(f"no step has {key}")
        return amount.mean_s / step.mean_s

    def need_facts(self) -> Facts:
        """What the last observed step showed, for a rule that cannot do without."""
        if not self.facts.is_known:
            raise NotCheckedError("no observed step noted what it saw (event `facts`)")
        return self.facts

    def resource(self, key: str, combine: Callable[[list[float]], float] = fmean) -> float | None:
        """What was sampled of the machine, as `resource/...`, its mean if not told otherwise; None when it was not."""
        events = self.window.events("resources") or [self.window.latest("resources")]
        values = known((mapping(event.get("metrics")).get(key) for event in events), MAX_COUNT)
        return combine(values) if values else None

    @cached_property
    def num_workers(self) -> int:
        """Workers of the loader, as far as is known."""
        return int(self.resource("resource/num_workers", max) or 0.0)

    @cached_property
    def cpu_wait(self) -> float | None:
        """Share of the time for which the training thread was ready to run and had no core; None when unknown."""
        waited = self.resource("resource/cpu_wait_share")
        return None if waited is None else min(waited, 1.0)

    @cached_property
    def cpu_share(self) -> float | None:
        """CPU time that the process gets over what one thread wants; None when unknown."""
        cores, waited = self.resource("resource/process_cpu_cores"), self.cpu_wait
        if cores is None or waited is None:
            return None
        ran = min(cores, 1 - waited)
        return ran / (ran + waited) if ran > 0 else None

    @cached_property
    def loader_busy(self) -> float | None:
        """Share of its time for which the loader computes while the training waits for it; None when unknown.

        Where the process does not get its CPU time, nor does its loader: the share is of what it could have had.
        """
        busy, share = self._loader_cores(), self.cpu_share
        return busy if not busy or not share or share >= STARVED else min(busy / share, 1.0)

    @cached_property
    def loader_starved_s(self) -> float:
        """For how long the loader waited for a core itself in the window, at the share that this process gets."""
        at_work_s = self.wall_s * self.num_workers or self.seconds_or_zero("data_wait")
        return (self._loader_cores() or 0.0) * at_work_s * (1 / max(self.cpu_share or 1.0, 0.01) - 1)

    def _loader_cores(self) -> float | None:
        """What the loader computes a second: each worker, or the training thread while it waits."""
        cores = self.resource("resource/worker_cpu_cores")
        return self._cpu_share_of_wait() if not self.num_workers else cores and cores / self.num_workers

    def _cpu_share_of_wait(self) -> float | None:
        """CPU time of the training thread over the time that it waited for data; long waits count for more."""
        if not self.run.columns.keys() >= set(_WAIT):
            return None
        wait, cpu = map(self.window.values, _WAIT)
        wait_s = array("d", map(operator.mul, self.window.step_s, wait))
        cpu_s = array("d", map(operator.mul, wait_s, cpu))
        pairs = zip(wait_s, cpu_s, strict=True)
        is_known = bytes(0 <= waited < LONGEST_S and 0 <= computed < LONGEST_S for waited, computed in pairs)
        total_s = math.fsum(compress(wait_s, is_known))
        return math.fsum(compress(cpu_s, is_known)) / total_s if total_s > 0 else None

    def loader_evidence(self) -> str:
        """The same in words."""
        if self.loader_busy is None:
            return "whether the loader computes or waits meanwhile is not in the record"
        busy = percent(self.loader_busy)
        if self.num_workers > 1:
            return f"its {self.num_workers} workers are busy for {busy} of the time each"
        if self.num_workers:
            return f"its one worker is busy for {busy} of the time"
        return f"the batch is made by the training process, which computes for {busy} of the wait"

    def top_s(self, pattern: str) -> float:
        """Seconds a step of the longest operators whose name matches; 0 when none does or none was sampled."""
        rows = self.sampled.top if self.sampled else ()
        return math.fsum(seconds for name, seconds, _ in rows if re.search(pattern, name, re.IGNORECASE))

    @cached_property
    def host_syncs(self) -> dict[str, float]:
        """Calls a step that make the host wait for the device, by operator."""
        calls = dict(self.facts.host_syncs)
        for name, _, num in self.sampled.top if self.sampled else ():  # a later step, perhaps with more of them
            if name in calls:
                calls[name] = max(calls[name], num)
        return {op: num for op, num in calls.items() if num > 0}

    @cached_property
    def sync_gap_s(self) -> float:
        """Launch gaps, over the window, that stand behind synchronisations rather than behind slow launching.

        On a CPU there is no queue to rebuild, and none does.
        """
        num_ops = self.num_ops
        calls, gap_s = sum(self.host_syncs.values()), self.seconds_or_zero("launch_gaps")
        if not self.is_gpu or not num_ops > 0:
            return 0.0
        return min(gap_s * min(SYNC_SPAN * calls / num_ops, 1.0), self.num_steps * calls * SYNC_SPAN * LAUNCH_S)

    @property
    def num_ops(self) -> float:
        """Operators (kernels on a GPU) of a sampled step; 0 when unknown."""
        num_ops = self.sampled.num_ops if self.sampled else 0.0
        return num_ops if num_ops > 0 else 0.0

    @cached_property
    def launching_s(self) -> float:
        """Launch gaps that launching can account for, however slow; a starved process launches more slowly still."""
        most_s = self.num_steps * (self.num_ops or math.inf) * SLOWEST_LAUNCH_S / max(self.cpu_share or 1.0, 0.01)
        return max(min(self.seconds_or_zero("launch_gaps"), most_s), 0.0)

    @cached_property
    def untold_s(self) -> float:
        """Time of which the record does not tell what happened: unexplained, or idle for no known reason."""
        return self.seconds_or_zero("unexplained") + self.seconds_or_zero("launch_gaps") - self.launching_s

    @property
    def is_untold(self) -> bool:
        """Whether the record does not tell where most of the time went."""
        return self.wall_s > 0 and self.untold_s / self.wall_s > MOST

    @property
    def is_left_to_chance(self) -> bool:
        """Whether operators other than matmuls may well take so much that they would be a finding."""
        if self.waterfall.share("non_matmul") is None or not (chance_s := self.chance_s("non_matmul")):
            return False
        return self.seconds("non_matmul") + chance_s >= MUCH_MOVED * self.wall_s

    @property
    def work_s(self) -> float:
        """Time of the window that went into operators: what is left without waits, gaps and pauses."""
        return max(self.wall_s - self.seconds_or_zero(*NO_WORK), 0.0)

    @cached_property
    def flop_shares(self) -> dict[str, float]:
        """Shares of the matmul FLOPs by dtype; empty when unknown."""
        flop: dict[str, float] = {}
        by_dtype = self.window.latest("count").get("by_dtype")
        for dtype, amount in (self.facts.matmul_dtypes or _amounts(by_dtype, MAX_COUNT * MAX_COUNT)).items():
            name = dtype_name(dtype)
            flop[name] = flop.get(name, 0.0) + amount
        return {name: amount / math.fsum(flop.values()) for name, amount in flop.items()}

    @property
    def has_many_reads(self) -> bool:
        """Whether printing or bookkeeping may be what the loop's own code does."""
        return not self.is_gpu and sum(self.host_syncs.values()) >= MANY_READS

    @cached_property
    def why_untold(self) -> tuple[str, str]:
        """Why the record does not tell most of the time, as the end of a sentence, and how to find out."""
        if self.is_left_to_chance and not self.is_untold:
            why = "the thread was kept from its core in the sampled steps, which leaves what they show to chance"
            return why, "record on a quiet machine, or for longer"
        if not self.has_steps:
            how = "call profiler.step() in the loop, and record steps after warm-up"
            return "the recording is not cut into steps", how
        if self._split.is_blind:
            return "no pass of a model was seen", "call the model, not its forward(); or name it: watch(model)"
        if self.sampled and self.untold_s > 2 * self.seconds_or_zero("unexplained"):
            why = f"nothing ran, and launching {plural(round(self.num_ops), 'operator')} does not take that long"
            return why, "look at what the host does meanwhile: py-spy dump --pid PID, or a trace made with_stack=True"
        if self.sampled:
            why = "most of it lies outside what the profiler sees"
            return why, "look at threads and processes beside the training thread: py-spy dump --pid PID"
        if self.mode == "estimate":
            return "estimate mode samples no step", "record with monitoring.mfu_calculation_mode: smart to learn more"
        if self.window.num_ordinary < MANY_STEPS:
            return "too few steps were sampled; train longer", "train longer: the first step is sampled after a dozen"
        return "no step was sampled", "record with monitoring.profile_steps: true to learn more"

    def advice(self, rule: str) -> Iterator[str]:
        """What the page of findings advises, as far as it fits this program."""
        facts, model = self.facts, self.model
        rows = self.sampled.top if self.sampled else ()
        name = next((found[1] for row in rows if (found := re.match(r"Optimizer\.step#(\w+)\.step", row[0]))), "")
        update = f"{name}(..., {'fused' if name in HAS_FUSED else 'foreach'}=True)"
        update = update if name else f"an optimizer with fused=True ({', '.join(HAS_FUSED)}), else foreach=True"
        losses = sorted((part for part in self.waterfall.parts if part.name != "ideal"), key=lambda part: -part.share)
        is_light, is_ddp = facts.optimizer in LIGHT_OPTIMIZERS, facts.wrapper == "DistributedDataParallel"
        is_fsdp2 = facts.wrapper == "FSDPModule"
        is_measured = any(peak.get("source") == "measured" for peak in self.run.peaks.values())
        holds = {
            "on a gpu": self.is_gpu,
            "on a cpu": not self.is_gpu,
            "with workers": self.num_workers > 0,
            "without workers": not self.num_workers,
            "if compiled": facts.is_compiled,
            "unless compiled": not facts.is_compiled,
            "unless the update is light": not is_light,
            "with many reads": self.has_many_reads,
            "without frames": not self.window.events("frames"),
            "with ddp": is_ddp,
            "with fsdp2": is_fsdp2,
            "without fsdp2": not is_fsdp2,
            "with another wrapper": not is_ddp and not is_fsdp2,
            "with text": any(map(math.isfinite, self.window.values("perf/tokens_per_second")[:MANY_STEPS])),
            "with float64": self.flop_shares.get("fp64", 0.0) >= 0.1,
            "with float32": self.flop_shares.get("fp64", 0.0) < 0.1,
            "with odd sizes": self.is_gpu and bool(facts.odd_sizes),
            "for a language model": model.endswith(("ForCausalLM", "LMHeadModel", "GPT")),
            "to be measured": self.mode != "trace" and not is_measured and losses[0].name == "matmul_below_peak",
            "where the record is silent": self.is_untold or losses[0].name == "unexplained",
            **{f"most in {label.lower()}": losses[0].name == part for part, label in LABELS.items()},
        }
        for line in re.findall(r"^- (.*)$", explanations()[rule], re.MULTILINE):
            condition, colon, text = line.partition(": ")
            if holds.get(condition.lower(), True):
                text = text if colon and condition.lower() in holds else line
                reason, how = ": ".join(self.why_untold), self.why_untold[1]
                yield text.format(update=update, room=self._room(), reason=reason, how=how)

    def _room(self) -> str:
        """By how much the memory lets the batch grow, in words; empty where that was not sampled."""
        memory = min(memory_of(self.run), key=lambda each: each.growth or math.inf, default=None)
        if memory is None or memory.growth is None or memory.headroom_bytes is None:
            return ""
        room, peak = amount_of(max(memory.headroom_bytes, 0.0), "B"), amount_of(memory.peak_bytes, "B")
        in_use = f"at the peak {peak} are in use and {room} free"
        return f" ({in_use}: room for at least {memory.growth:.1f} times the batch)"

    def pause_s(self, pattern: str) -> float:
        """Seconds of the pauses whose name matches."""
        named = self.window.pauses_s
        return math.fsum(seconds for name, seconds in named.items() if re.search(pattern, name, re.IGNORECASE))


@cache
def explanations() -> Mapping[str, str]:
    """What each rule looks for, how it knows, and what to do: findings.md beside this file, by rule."""
    text = Path(__file__).with_name("findings.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {name: body.strip() for name, body in zip(sections[::2], sections[1::2], strict=True)}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _amounts(value: Any, limit: float) -> dict[str, float]:
    found = {clean(name, 80): number_or_nan(amount, limit) for name, amount in mapping(value).items()}
    return {name: amount for name, amount in found.items() if amount > 0}


_WAIT = ("perf/data_wait_share", "perf/data_wait_cpu_share")
_MISSING_PART = {
    "launch_gaps": "no step was sampled by the profiler",
    "non_matmul": "no step was sampled by the profiler",
    "matmul_below_peak": "no step was sampled by the profiler",
    "ideal": "MFU is unknown",
    "recompute": "neither a sampled step nor a count of recomputation is in the record",
    "exposed_communication": "the time blocked in communication was not measured",
}

"""Where did the wall time go, in parts that lead from 100 % down to the observed MFU?

    from flopmeter import load_run

    for part in load_run("runs/mine").waterfall().parts:
        print(part.name, part.seconds, part.share)

The wall time of a window is the time of its steps and of the pauses between the first and the last of them. A window
that covers the whole run begins after warm-up. Parts, in this order; those that the record cannot tell are left out:

    ideal                   the model's FLOPs at the device's peak; its share is the MFU over wall time
    recompute               what activation checkpointing computes again
    card_below_peak         where the roof of this card was measured: what its matmuls take at the roof beyond the peak
    matmul_below_peak       matmul time beyond these two; below zero where the peak, or the roof, is understated
    non_matmul              element-wise operators, norms, softmax, copies inside forward and backward
    no_grad                 passes without gradients, and named roles: a reference model, a teacher, rewards
    generation              text or actions that the model makes: the roles generation and rollout
    optimizer               the update of the weights
    exposed_communication   waiting for other ranks' gradients, not hidden behind computing
    launch_gaps             nothing ran while the host prepared the next operator
    queued_idle             nothing ran on the device, although work was in its queue
    data_wait               waiting for the next batch
    host_to_device          copying it to the device
    own_code                the loop's own code, outside the other phases; on a GPU the time that it idled for that
    pauses                  evaluation, checkpoints, garbage collection, and what our own measured steps took longer
    unexplained             what is left, below zero where parts overlap

Each part is measured by itself, none is clipped and none is scaled to fill what another leaves, so that `unexplained`
says how far the measurements fit together. Waits, own code and the optimizer come from every step; what lies inside
forward and backward comes from sampled steps, in seconds a step. A sampled step may also see own code between the two
passes: that much of its gaps, and then of its operators, is taken to be the own code that every step's clock tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec

from flopmeter.columns import LARGEST, known, mapping, number_or_nan
from flopmeter.devices import dtype_name
from flopmeter.metrics import flop_per_s
from flopmeter.text import clean, percent, plural, seconds
from flopmeter.waterfall.sampled import BESIDE, Ordinary, Sampled, reduce_profiles
from flopmeter.waterfall.window import Amount, Window

if TYPE_CHECKING:
    from flopmeter.record import Run

__all__ = ["FEW_STEPS", "LABELS", "NO_WORK", "PART_NAMES", "Part", "Split", "Waterfall", "Window"]
__all__ += ["assemble", "waterfall"]

LABELS = {
    "ideal": "Useful work at peak",
    "recompute": "Recomputation",
    "card_below_peak": "Card below its peak",
    "matmul_below_peak": "Matmuls below peak",
    "non_matmul": "Other operators",
    "no_grad": "Passes without gradients",
    "generation": "Generation",
    "optimizer": "Optimizer",
    "exposed_communication": "Exposed communication",
    "launch_gaps": "Launch gaps",
    "queued_idle": "Idle with work queued",
    "data_wait": "Waiting for data",
    "host_to_device": "Host to device",
    "own_code": "Loop's own code",
    "pauses": "Pauses",
    "unexplained": "Unexplained",
}
"""What people read where the code says the part's name; the report and `compare` say this."""
PART_NAMES = tuple(LABELS)
NO_WORK = ("launch_gaps", "queued_idle", "data_wait", "host_to_device", "own_code", "exposed_communication", "pauses")
"""Parts in which the model's operators do not run."""
FEW_STEPS = 10
"""Below, one odd step moves every figure by more than a tenth of itself."""
GENERATION = ("generation", "rollout")
"""Roles in which the model makes what it learns from."""
BEATEN = 1.1
"""So many times the roof and no more may be noise of the sampled steps; a roof that a run beats by more is none."""
MAX_UNKNOWN = 0.1
"""Share of the FLOPs whose roof may be unknown."""
MUCH_WAITED = 0.1
"""Share of its time for which a thread waits for a core, from which on that stretches its steps."""
RARE = 0.2
"""Collections whose mean is below this share of the longest are rare: fewer than one step in five has a long one."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of the wall time."""

    name: str
    """One of `PART_NAMES`."""
    label: str
    """As people read it."""
    seconds: float
    """In the whole window."""
    share: float
    """Of the wall time: MFU points as a fraction."""
    how: str
    """How it was obtained."""
    uncertainty_s: float
    """How far off it may be."""


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """The wall time of a window, split; the parts add up to it."""

    wall_s: float
    """Steps and pauses; 0 when no step has a duration."""
    mfu: float | None
    """Over wall time, pauses included: the share of `ideal`. None when unknown."""
    parts: tuple[Part, ...]
    """In the order of `PART_NAMES`."""
    note: str = ""
    """What is missing, and why."""
    num_steps: int = 0
    """Steps of the window."""

    def seconds(self, name: str) -> float | None:
        """Seconds of a part; None when it is not known."""
        return next((part.seconds for part in self.parts if part.name == name), None)

    def share(self, name: str) -> float | None:
        """Share of the wall time of a part; None when it is not known."""
        return next((part.share for part in self.parts if part.name == name), None)


def waterfall(run: Run, start: int | None = None, stop: int | None = None) -> Waterfall:
    """Split the wall time of the steps at positions `start` up to `stop`; never raises, whatever the record holds."""
    return assemble(Split(Window(run, start, stop)))


def assemble(split: Split) -> Waterfall:
    """Put the measured parts together, with what they leave."""
    window = split.window
    if not window.timed:
        return Waterfall(wall_s=0.0, mfu=None, parts=(), note="no step of the window has a duration")
    found = {name: part for name, measure in split.measures.items() if (part := measure()) is not None}
    found["unexplained"] = split.remainder(found.values())
    parts = tuple(
        msgspec.structs.replace(found[name], name=name, label=LABELS[name]) for name in LABELS if name in found
    )
    mfu = found["ideal"].share if "ideal" in found else None
    return Waterfall(wall_s=split.wall_s, mfu=mfu, parts=parts, note=split.note(), num_steps=len(window))


class Split:
    """Measures the parts of a window, each by itself."""

    def __init__(self, window: Window) -> None:
        self.window = window
        beside_s = math.fsum((*window.pauses_s.values(), *window.roles_s.values()))
        self.wall_s = window.steps_s + beside_s if window.timed else 0.0
        self.measures: dict[str, Callable[[], Part | None]] = {
            "ideal": self._ideal,
            "recompute": self._recompute,
            "card_below_peak": self._card_below_peak,
            "matmul_below_peak": self._matmul_below_peak,
            "non_matmul": lambda: self._from_samples("non_matmul_s"),
            "no_grad": lambda: self._roles("no_grad"),
            "generation": lambda: self._roles("generation"),
            "optimizer": lambda: self._phase("optimizer", "optimizer_s"),
            "exposed_communication": self._exposed_communication,
            "launch_gaps": lambda: self._from_samples("gap_s"),
            "queued_idle": lambda: self._from_samples("queued_s"),
            "data_wait": self._data_wait,
            "host_to_device": lambda: self._phase("host_to_device", "copy_s") if self.is_gpu else None,
            "own_code": self._own_code,
            "pauses": self._pauses,
        }

    @cached_property
    def sampled(self) -> Sampled | None:
        """The sampled steps of the window, else the nearest one outside it."""
        events = self.window.events("profile") or [self.window.latest("profile")]
        if len(events) == len(self.window):
            return reduce_profiles(events, None, are_all=True)
        return reduce_profiles(events, self._ordinary(events))

    @cached_property
    def is_gpu(self) -> bool:
        """Whether the device has a time of its own, beside the host's."""
        headers = self.window.run.headers
        named = headers[-1].device.split(":")[0] if headers else ""
        return named not in ("", "cpu") or bool(self.sampled and self.sampled.device == "cuda")

    @property
    def is_blind(self) -> bool:
        """Whether no pass of a model was seen, whose time cannot be told from the loop's own then."""
        passes = self.window.amount("perf/forward_share", "perf/backward_share")
        return passes is not None and not passes.mean_s

    def _part(self, of_seconds: float, uncertainty_s: float, how: str) -> Part:
        share = of_seconds / self.wall_s
        return Part(name="", label="", seconds=of_seconds, share=share, how=how, uncertainty_s=uncertainty_s)

    def _ordinary(self, events: Sequence[Mapping[str, Any]]) -> Ordinary | None:
        """What an ordinary step spends on computing, as the clock of every step tells it: medians."""
        num_optimizer_ops = math.fsum(known([self.window.latest("facts").get("num_optimizer_ops")]))
        is_gpu = events[-1].get("device") == "cuda"
        phases = None if is_gpu else self.window.amount("perf/forward_share", "perf/backward_share")
        if phases is None:
            # On a GPU the host's phases are not the device's: the step, less what the device did beside computing. What
            # passed on it while the loop ran its own code between two steps lies outside the sampled kernels.
            if self.window.step is None:
                return None
            wait, lost_s = self.window.amount("perf/data_wait_share"), self._on_device("data_wait")
            wait_s = lost_s if lost_s is not None else wait.median_s if wait else 0.0
            beside_s = wait_s + (self._on_device("other") or 0.0) + _median_sum(events, BESIDE) + self._usual_gc_s()
            own = self.window.amount("perf/other_share") if is_gpu and self._on_device("other") is None else None
            compute_s = max(self.window.step.median_s - beside_s, 0.0)
            return Ordinary(compute_s, own.median_s if own else 0.0, num_optimizer_ops)
        exposed = self.window.amount("perf/exposed_communication_share")
        exposed_s = exposed.median_s if exposed else _median_sum(events, ["communication_s"])
        loop_s = sum(amount.median_s for amount in self._loop_amounts())
        # Collections that the loop's own code has room for are taken to be there.
        collected_s = max(self._usual_gc_s() - loop_s, 0.0)
        metrics = [mapping(event.get("metrics")) for event in self.window.events("resources")]
        is_starved = fmean(known(m.get("resource/cpu_wait_share") for m in metrics) or [0.0]) > MUCH_WAITED
        compute_s = max((phases.mean_s if is_starved else phases.median_s) - exposed_s - collected_s, 0.0)
        return Ordinary(compute_s, loop_s, num_optimizer_ops, is_starved)

    def _loop_amounts(self) -> list[Amount]:
        """The loop's own code by the clock of every step. A CPU copies nothing to a device: that is own code, too."""
        named = self.window.amount("perf/own_code_share")
        amounts = [named or self.window.amount("perf/other_share"), self.window.amount("perf/host_to_device_share")]
        return [amount for amount in amounts if amount]

    def _usual_gc_s(self) -> float:
        """Garbage collection of a step that the median step has too; rare long ones are not in it."""
        events = self.window.events("gc")
        longest_s = max(known(event.get("longest_s") for event in events), default=0.0)
        mean_s = self.window.gc_s / len(self.window)
        return mean_s if mean_s >= RARE * longest_s else 0.0

    def _total(self, amount: Amount, how: str, marked_s: Sequence[float] = ()) -> Part:
        """An amount of every step, over the window; steps that do not know it are taken to be like the others.

        Args:
            marked_s: The amount in marked steps, where it does not depend on their being measured.
        """
        num_steps = len(self.window)
        num_unknown = num_steps - amount.num_steps - len(marked_s)
        total_s = (num_steps - len(marked_s)) * amount.mean_s + math.fsum(marked_s)
        if num_unknown <= 0:
            return self._part(total_s, 0.0, how)
        how += f"; {num_unknown} of {num_steps} steps taken to be like the others"
        return self._part(total_s, amount.deviation_s * math.sqrt(num_unknown), how)

    def _of_every_step(self, phase: str) -> Part | None:
        amount = self.window.amount(f"perf/{phase}_share")
        return amount and self._total(amount, "host time of every step")

    def _roles(self, name: str) -> Part | None:
        """What the loop did besides training: in every step, and by role."""
        named = self.window.roles_s.items()
        roles = {role: role_s for role, role_s in named if (role in GENERATION) is (name == "generation")}
        how = "device time between marks, mean of the steps that have it"
        part = self._marked_on_device(name, how) or self._of_every_step(name)
        if not roles:
            return part if part and part.seconds else None
        listed = ", ".join(f"{clean(role, 40)} {seconds(role_s)}" for role, role_s in list(roles.items())[:8])
        total_s = math.fsum(roles.values()) + (part.seconds if part else 0.0)
        return self._part(total_s, part.uncertainty_s if part else 0.0, f"host time by role: {listed}")

    def _ideal(self) -> Part | None:
        amount = self.window.amount("perf/mfu") if self.window.has_ordinary else None
        how = "model FLOPs of every step over the peak of their dtype"
        return amount and self._total(amount, how, self.window.marked_s("perf/mfu"))

    def _from_samples(self, key: str) -> Part | None:
        if self.sampled is None or key not in self.sampled.seconds:
            return None
        sampled, num_steps = self.sampled, len(self.window)
        step_s, moved_s = sampled.seconds[key], sampled.uncertainty_s[key]
        step = self.window.step
        spread = step.deviation_s / step.mean_s if step else 0.0  # a sampled step is a draw from steps that vary
        uncertainty_s = math.hypot(moved_s, step_s * spread / math.sqrt(sampled.num_profiles))
        steps = plural(sampled.num_profiles, "sampled step")
        how = f"{'device' if sampled.device == 'cuda' else 'operator'} time of {steps}, times {num_steps} steps"
        if moved_s > 0:
            how += f"; {seconds(moved_s)} a step taken off as the cost of sampling"
        return self._part(num_steps * step_s, num_steps * uncertainty_s, how)

    def _recompute(self) -> Part | None:
        """As sampled; else what was counted as such, and never HFU less MFU, which holds padding and masked pairs."""
        found, ideal = self._from_samples("recompute_s"), self._ideal()
        if found is not None or ideal is None:
            return found
        count = self.window.latest("count")
        again, model = (number_or_nan(count.get(f"{name}_flop"), math.inf) for name in ("recompute", "model"))
        if not again >= 0 or not model > 0:
            return None
        how = "FLOPs counted as recomputation, at the speed of the peak, which is the least that they can take"
        return self._part(ideal.seconds * again / model, 0.0, how)

    def _card_below_peak(self) -> Part | None:
        """The work of the model in the time that this very card needs for it at its best, beyond the ideal."""
        roof, ideal, matmul = roof_share(self.window.run), self._ideal(), self._from_samples("matmul_s")
        if roof is None or ideal is None or matmul is None:
            return None
        if matmul.seconds < ideal.seconds / roof / BEATEN:
            return None  # the run itself has shown that the device can do more
        how = f"useful work at the roof that was measured on this device, {percent(roof)} of the peak; less the ideal"
        return self._part(ideal.seconds * (1 / roof - 1), ideal.uncertainty_s * (1 / roof - 1), how)

    def _matmul_below_peak(self) -> Part | None:
        matmul, ideal, card = self._from_samples("matmul_s"), self._ideal(), self._card_below_peak()
        if matmul is None:
            return None
        if ideal is None:
            return self._part(
                matmul.seconds, matmul.uncertainty_s, f"{matmul.how}; all of it, since the ideal is unknown"
            )
        uncertainty_s = math.hypot(matmul.uncertainty_s, ideal.uncertainty_s)
        card_s, how = (card.seconds, " and the card's share") if card else (0.0, "")
        return self._part(matmul.seconds - ideal.seconds - card_s, uncertainty_s, f"{matmul.how}; less the ideal{how}")

    def _phase(self, phase: str, key: str) -> Part | None:
        """A phase of every step. On a GPU, where the host only hands it over: what the device took.

        A sampled step tells what ran there; marks also hold the idle time in between, which is a launch gap.
        """
        if self.sampled is not None and self.sampled.device == "cuda" and key in self.sampled.seconds:
            return self._from_samples(key)
        found = self._marked_on_device(phase, "device time between marks, mean of the steps that have it")
        return found or self._of_every_step(phase)

    def _on_device(self, phase: str) -> float | None:
        """Mean seconds of a step between the marks of a phase on the device."""
        seconds_by_event = [
            (number_or_nan(mapping(event.get("device_s")).get(phase)), number_or_nan(event.get("num_steps")))
            for event in self.window.events("device_time")
        ]
        sound = [(value, weight) for value, weight in seconds_by_event if value >= 0 and weight > 0]
        total = math.fsum(weight for _, weight in sound)
        return math.fsum(value * weight for value, weight in sound) / total if sound else None

    def _marked_on_device(self, phase: str, how: str) -> Part | None:
        device_s = self._on_device(phase)
        return None if device_s is None else self._part(len(self.window) * device_s, 0.0, how)

    def _data_wait(self) -> Part | None:
        how = "time that the device had nothing to do while the host waited"
        return self._marked_on_device("data_wait", how) or self._of_every_step("data_wait")

    def _own_code(self) -> Part | None:
        """What the clock of every step tells, without collections of garbage and what a sampled step saw of it."""
        if self.is_blind:
            return None
        if self.is_gpu:  # a host that blocks there waits for the device to do its work
            how = "device time between the update and the next step"
            marked, idle_s = self._marked_on_device("other", how), self.sampled.own_idle_s if self.sampled else 0.0
            return marked or (self._part(len(self.window) * idle_s, 0.0, f"{how}, unmarked") if idle_s else None)
        how = "host time of every step, outside the other phases"
        parts = [self._total(amount, how) for amount in self._loop_amounts()]
        if not parts:
            return None
        elsewhere_s = self.window.gc_s + (len(self.window) * self.sampled.own_operators_s if self.sampled else 0.0)
        own_s = max(math.fsum(part.seconds for part in parts) - elsewhere_s, 0.0)
        return self._part(own_s, math.hypot(*(part.uncertainty_s for part in parts)), parts[0].how)

    def _exposed_communication(self) -> Part | None:
        amount = self.window.amount("perf/exposed_communication_share")
        if amount is not None:
            return self._total(amount, "time of every step blocked after the backward pass had computed all gradients")
        how = "time of the device from the last gradient of its own to the end of the backward pass, mean of steps"
        return self._marked_on_device("communication", how) or self._from_samples("communication_s")

    def _pauses(self) -> Part:
        window = self.window
        named = {**window.pauses_s, "garbage collection": window.gc_s, "measuring": window.surplus_s}
        listed = [f"{clean(name, 40)} {seconds(lost_s)}" for name, lost_s in named.items() if lost_s]
        num_marked = len(window) - window.num_ordinary
        uncertainty_s = window.step.deviation_s * math.sqrt(num_marked) if window.step else 0.0
        return self._part(math.fsum(named.values()), uncertainty_s, ", ".join(listed[:8]) or "none")

    def remainder(self, found: Sequence[Part] | Any) -> Part:
        """What the other parts leave."""
        left_s = self.wall_s - math.fsum(part.seconds for part in found)
        how = "wall time less all other parts"
        if self.sampled is None:
            how += "; holds all of forward and backward beyond the ideal, since no step was sampled"
        return self._part(left_s, math.hypot(*(part.uncertainty_s for part in found)), how)

    def note(self) -> str:
        """What the reader must know before the numbers."""
        window, notes = self.window, []
        if self._ideal() is None:
            reason = "the device's peak is (set monitoring.peak_flop_per_s, or see `flopmeter peak`)"
            if not window.has_ordinary:
                reason = "too few steps, every one of them is warm-up or measured and none is ordinary"
            elif window.amount("perf/model_flop") is None:
                reason = "the FLOPs of a step are not in the record"
            notes.append(f"MFU is unknown: {reason}")
        if self.sampled is None:
            notes.append("no step was sampled, so forward and backward are not split")
        if window.num_untimed:
            notes.append(f"{window.num_untimed} steps have no duration and are left out")
        if window.has_ordinary and window.num_ordinary < FEW_STEPS:
            notes.append(f"only {plural(window.num_ordinary, 'ordinary step')}, which is too few to rely on")
        return "; ".join(notes)


def roof_share(run: Run) -> float | None:
    """What the device reaches of its peak at best, as was measured before the run, over the dtypes of its work.

    None where that is not known of nearly all of the work.
    """
    peaks, flop = flop_per_s(run.peaks), mapping(run.last("count").get("by_dtype"))
    roofs = {event.get("dtype"): number_or_nan(event.get("flop_per_s"), LARGEST) for event in run.named("roof")}
    at_peak_s = at_roof_s = unknown = 0.0
    for name, value in flop.items():
        dtype, amount = dtype_name(name), number_or_nan(value, LARGEST)
        if math.isnan(amount):
            continue
        if (roof := roofs.get(dtype, roofs.get("tf32") if dtype == "fp32" else None) or 0.0) > 0:
            at_roof_s += amount / roof
            at_peak_s += amount / (peaks.get(dtype) or peaks.get("tf32") or math.nan)
        else:
            unknown += amount
    if not at_roof_s or not at_peak_s > 0 or unknown > MAX_UNKNOWN * math.fsum(known(flop.values(), LARGEST)):
        return None
    return at_peak_s / at_roof_s


def _median_sum(events: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float:
    return median(math.fsum(known(event.get(key) for key in keys)) for event in events)

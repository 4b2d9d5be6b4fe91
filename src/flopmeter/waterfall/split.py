"""How long did each part of the wall time take, each measured by itself?"""

from __future__ import annotations

import math
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from flopmeter.columns import known, mapping, number_or_nan
from flopmeter.text import plural, seconds
from flopmeter.waterfall.sampled import BESIDE, Ordinary, Sampled, reduce_profiles
from flopmeter.waterfall.window import Amount, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FEW_STEPS = 10
"""Below, one odd step moves every figure by more than a tenth of itself."""
RARE = 0.2
"""Collections whose mean is below this share of the longest are rare: fewer than one step in five has a long one."""


class Slice(NamedTuple):
    """A part before its share is known."""

    seconds: float
    uncertainty_s: float
    how: str


class Split:
    """Measures the parts of a window, each by itself."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.measures: dict[str, Callable[[], Slice | None]] = {
            "ideal": self._ideal,
            "recompute": self._recompute,
            "matmul_below_peak": self._matmul_below_peak,
            "non_matmul": lambda: self._from_samples("non_matmul_s"),
            "optimizer": lambda: self._phase("optimizer", "optimizer_s"),
            "exposed_communication": self._exposed_communication,
            "launch_gaps": lambda: self._from_samples("gap_s"),
            "data_wait": self._data_wait,
            "host_to_device": lambda: self._phase("host_to_device", "copy_s"),
            "pauses": self._pauses,
        }

    @cached_property
    def sampled(self) -> Sampled | None:
        """The sampled steps of the window, else the nearest one outside it."""
        events = self.window.events("profile") or [self.window.latest("profile")]
        if len(events) == len(self.window):
            return reduce_profiles(events, None, are_all=True)
        return reduce_profiles(events, self._ordinary(events))

    def _ordinary(self, events: Sequence[Mapping[str, Any]]) -> Ordinary | None:
        """What an ordinary step spends on computing, as the clock of every step tells it: medians."""
        is_gpu = events[-1].get("device") == "cuda"
        phases = None if is_gpu else self.window.amount("perf/forward_share", "perf/backward_share")
        if phases is None:
            return self._step_without(BESIDE, events)
        exposed = self.window.amount("perf/exposed_communication_share")
        exposed_s = exposed.median_s if exposed else _median_sum(events, ["communication_s"])
        # A CPU copies nothing to a device: that phase is code of the loop, too.
        loop = [self.window.amount(f"perf/{name}_share") for name in ("other", "host_to_device")]
        loop_s = sum(amount.median_s for amount in loop if amount)
        # Collections that the loop's own code has room for are taken to be there.
        collected_s = max(self._usual_gc_s() - loop_s, 0.0)
        return Ordinary(max(phases.median_s - exposed_s - collected_s, 0.0), loop_s, self._num_optimizer_ops())

    def _step_without(self, beside: Sequence[str], events: Sequence[Mapping[str, Any]]) -> Ordinary | None:
        """On a GPU the host's phases are not the device's: the step, less what the device did beside computing.

        What passed on the device while the loop ran its own code between two steps lies outside the sampled kernels.
        """
        if self.window.step is None:
            return None
        wait, lost_s = self.window.amount("perf/data_wait_share"), self._on_device("data_wait")
        wait_s = lost_s if lost_s is not None else wait.median_s if wait else 0.0
        own, own_s = self.window.amount("perf/other_share"), self._on_device("other")
        wait_s += own_s if own_s is not None else own.median_s if own else 0.0
        compute_s = self.window.step.median_s - wait_s - _median_sum(events, beside) - self._usual_gc_s()
        return Ordinary(max(compute_s, 0.0), 0.0, self._num_optimizer_ops())

    def _num_optimizer_ops(self) -> float:
        return math.fsum(known([self.window.latest("facts").get("num_optimizer_ops")]))

    def _usual_gc_s(self) -> float:
        """Garbage collection of a step that the median step has too; rare long ones are not in it."""
        events = self.window.events("gc")
        longest_s = max(known(event.get("longest_s") for event in events), default=0.0)
        mean_s = self.window.gc_s / len(self.window)
        return mean_s if mean_s >= RARE * longest_s else 0.0

    def _total(self, amount: Amount, how: str, marked_s: Sequence[float] = ()) -> Slice:
        """An amount of every step, over the window; steps that do not know it are taken to be like the others.

        Args:
            marked_s: The amount in marked steps, where it does not depend on their being measured.
        """
        num_steps = len(self.window)
        num_unknown = num_steps - amount.num_steps - len(marked_s)
        seconds = (num_steps - len(marked_s)) * amount.mean_s + math.fsum(marked_s)
        if num_unknown <= 0:
            return Slice(seconds, 0.0, how)
        how += f"; {num_unknown} of {num_steps} steps taken to be like the others"
        return Slice(seconds, amount.deviation_s * math.sqrt(num_unknown), how)

    def _utilised(self, key: str, how: str) -> Slice | None:
        amount = self.window.amount(key)
        return amount and self._total(amount, how, self.window.marked_s(key))

    def _ideal(self) -> Slice | None:
        if not self.window.has_ordinary:
            return None
        return self._utilised("perf/mfu", "model FLOPs of every step over the peak of their dtype")

    def _from_samples(self, key: str) -> Slice | None:
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
        return Slice(num_steps * step_s, num_steps * uncertainty_s, how)

    def _recompute(self) -> Slice | None:
        found = self._from_samples("recompute_s")
        if found is not None:
            return found
        hardware, model = self._utilised("perf/hfu", ""), self._ideal()
        if hardware is None or model is None:
            return None
        return Slice(
            hardware.seconds - model.seconds,
            0.0,
            "HFU less MFU: recomputation at the speed of the peak, which is the least it can take",
        )

    def _matmul_below_peak(self) -> Slice | None:
        matmul, ideal = self._from_samples("matmul_s"), self._ideal()
        if matmul is None:
            return None
        if ideal is None:
            return matmul._replace(how=f"{matmul.how}; all of it, since the ideal is unknown")
        uncertainty_s = math.hypot(matmul.uncertainty_s, ideal.uncertainty_s)
        return Slice(matmul.seconds - ideal.seconds, uncertainty_s, f"{matmul.how}; less the ideal")

    def _phase(self, phase: str, key: str) -> Slice | None:
        """A phase of every step. On a GPU, where the host only hands it over: what the device took.

        A sampled step tells what ran there; marks also hold the idle time in between, which is a launch gap.
        """
        if self.sampled is not None and self.sampled.device == "cuda" and key in self.sampled.seconds:
            return self._from_samples(key)
        device_s = self._on_device(phase)
        if device_s is not None:
            return Slice(len(self.window) * device_s, 0.0, "device time between marks, mean of the steps that have it")
        amount = self.window.amount(f"perf/{phase}_share")
        return amount and self._total(amount, "host time of every step")

    def _on_device(self, phase: str) -> float | None:
        seconds_by_event = [
            (number_or_nan(mapping(event.get("device_s")).get(phase)), number_or_nan(event.get("num_steps")))
            for event in self.window.events("device_time")
        ]
        return _weighted_mean(seconds_by_event)

    def _data_wait(self) -> Slice | None:
        lost_s = self._on_device("data_wait")
        if lost_s is not None:
            return Slice(len(self.window) * lost_s, 0.0, "time that the device had nothing to do while the host waited")
        amount = self.window.amount("perf/data_wait_share")
        return amount and self._total(amount, "host time of every step")

    def _exposed_communication(self) -> Slice | None:
        amount = self.window.amount("perf/exposed_communication_share")
        if amount is not None:
            return self._total(amount, "time of every step blocked after the backward pass had computed all gradients")
        device_s = self._on_device("communication")
        if device_s is not None:
            how = "time of the device from the last gradient of its own to the end of the backward pass, mean of steps"
            return Slice(len(self.window) * device_s, 0.0, how)
        return self._from_samples("communication_s")

    def _pauses(self) -> Slice:
        window = self.window
        named = {**window.pauses_s, "garbage collection": window.gc_s, "measuring": window.surplus_s}
        listed = [f"{name[:40]} {seconds(lost_s)}" for name, lost_s in named.items() if lost_s]
        num_marked = len(window) - window.num_ordinary
        uncertainty_s = window.step.deviation_s * math.sqrt(num_marked) if window.step else 0.0
        return Slice(math.fsum(named.values()), uncertainty_s, ", ".join(listed[:8]) or "none")

    def remainder(self, wall_s: float, found: dict[str, Slice]) -> Slice:
        """What the other parts leave."""
        left_s = wall_s - math.fsum(slice_.seconds for slice_ in found.values())
        how = "wall time less all other parts"
        if self.sampled is None:
            how += "; holds all of forward and backward beyond the ideal, since no step was sampled"
        other = self.window.amount("perf/other_share")
        if other is not None and other.mean_s > 0:
            how += f"; {seconds(len(self.window) * other.mean_s)} lie outside the phases, in the loop's own code"
        return Slice(left_s, math.hypot(*(slice_.uncertainty_s for slice_ in found.values())), how)

    def note(self) -> str:
        """What the reader must know before the numbers."""
        notes = []
        if self._ideal() is None:
            notes.append(_why_no_mfu(self.window))
        if self.sampled is None:
            notes.append("no step was sampled, so forward and backward are not split")
        if self.window.num_untimed:
            notes.append(f"{self.window.num_untimed} steps have no duration and are left out")
        if self.window.has_ordinary and self.window.num_ordinary < FEW_STEPS:
            num = self.window.num_ordinary
            notes.append(f"only {plural(num, 'ordinary step')}, which is too few to rely on")
        return "; ".join(notes)


def _why_no_mfu(window: Window) -> str:
    if not window.has_ordinary:
        return "MFU is unknown: too few steps, every one of them is warm-up or measured and none is ordinary"
    if window.amount("perf/model_flop") is None:
        return "MFU is unknown: the FLOPs of a step are not in the record"
    return "MFU is unknown: the device's peak is (set monitoring.peak_flop_per_s, or see `flopmeter peak`)"


def _median_sum(events: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float:
    return median(math.fsum(known(event.get(key) for key in keys)) for event in events)


def _weighted_mean(pairs: list[tuple[float, float]]) -> float | None:
    sound = [(value, weight) for value, weight in pairs if value >= 0 and weight > 0]
    total = math.fsum(weight for _, weight in sound)
    return math.fsum(value * weight for value, weight in sound) / total if sound else None

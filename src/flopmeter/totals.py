"""What did the whole run do, hold and cost, across restarts: tokens, time by role, memory, energy, money?

    from flopmeter import load_run
    from flopmeter.totals import totals

    totals(load_run("runs/mine")).tokens        # 1_048_576_000

Counted are the steps whose work is still in the model, as in `goodput`; time, energy and money are of all that ran.
What was not sampled, or follows from something that is not known, is None, and `notes` say why where that matters.
Left out: what a device draws while no start of the run is alive, and all of the machine but its accelerators.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec import Struct

from flopmeter.columns import LARGEST, LATEST_S, at, finite, known, mapping, number_or_nan, sound
from flopmeter.goodput import Goodput, goodput, kept_steps
from flopmeter.metrics import ROW, flop_per_s, utilisation
from flopmeter.text import clean

if TYPE_CHECKING:
    from flopmeter.record import Run

MAX_SILENCE_S = 120.0
"""Samples further apart belong to two starts, or to a machine that slept: what was drawn between them is not known."""
MIN_LOOKS = 2
"""Counted steps that must have shown a role before its FLOPs are taken to be those of other steps."""
TRAINING = "training"


class Role(Struct, frozen=True, kw_only=True):
    """What the wall time went into: training, or something that it needs."""

    name: str
    seconds: float
    share: float | None
    """Of the wall time."""
    flop: float | None = None
    """Of the whole run: the model's where it trains, else the forward passes of the role, as counted steps showed."""
    utilisation: float | None = None
    """These FLOPs over the peak, while the role had the device."""


class Memory(Struct, frozen=True, kw_only=True):
    """Of one device, the most that was sampled; of a CPU, the process's own."""

    device: str
    peak_bytes: float
    """The most that tensors took at once; of a CPU, the resident memory."""
    reserved_bytes: float | None = None
    """The most that torch's allocator held; what it holds beyond tensors is fragments, or kept for later."""
    total_bytes: float | None = None
    headroom_bytes: float | None = None
    """What the device has beyond the peak and what others (the driver, other processes) use."""

    @property
    def growth(self) -> float | None:
        """How many times as large a batch fits at the least: as if all of the peak grew with it."""
        return None if self.headroom_bytes is None else 1 + max(self.headroom_bytes, 0.0) / self.peak_bytes


class Totals(Struct, frozen=True, kw_only=True):
    """The whole run in sums."""

    num_steps: int
    """Whose work is still in the model."""
    tokens: int | None
    samples: int | None
    model_flop: float | None
    hardware_flop: float | None
    wall_s: float
    roles: tuple[Role, ...]
    """Training first, then by time; with goodput's other parts they add up to the wall time."""
    memory: tuple[Memory, ...]
    energy_kwh: float | None
    joules_per_token: float | None
    cost: float | None
    """In the currency of `price_per_device_hour`, of all devices of the job while a start of it was alive."""
    cost_per_million_tokens: float | None
    notes: tuple[str, ...] = ()


def totals(run: Run, spent: Goodput | None = None) -> Totals:
    """Sum up a run; never raises, whatever the record holds."""
    spent = spent or goodput(run)
    kept, notes = kept_steps(run), []
    num_kept = sum(map(len, kept))
    flop: dict[str, float | None] = {}
    for name in ("model_flop", "hardware_flop"):
        columns = [at(values, kept) for key, values in run.work.items() if key.startswith(f"{ROW}{name}/")]
        flop[name] = math.fsum(math.fsum(finite(values)) for values in columns) if columns else None
        num_known = max((len(finite(values)) for values in columns), default=0)
        if name == "model_flop" and 0 < num_known < num_kept:
            notes.append(f"the FLOPs of {num_kept - num_known} of {num_kept} steps are not known, and left out")
    alive_s = max(spent.wall_s - spent.restart_s, 0.0)
    devices = _num_devices(run)
    watts = _mean_power_w(run)
    energy_j = None if watts is None else watts * devices * alive_s
    if watts is not None and devices > 1:
        notes.append(f"energy is that of rank 0's device times {devices:g}")
    price = number_or_nan(run.header.price_per_device_hour, LARGEST)
    cost = price * devices * alive_s / 3600 if price >= 0 else None
    tokens, samples = (round(amount) if (amount := _sum(run, f"perf/{name}_per_second", kept)) else None
                       for name in ("tokens", "samples"))  # fmt: skip
    return Totals(
        num_steps=spent.num_steps,
        tokens=tokens,
        samples=samples,
        model_flop=flop["model_flop"],
        hardware_flop=flop["hardware_flop"],
        wall_s=spent.wall_s,
        roles=_roles(run, spent, kept, devices),
        memory=memory_of(run),
        energy_kwh=None if energy_j is None else energy_j / 3.6e6,
        joules_per_token=energy_j / tokens if energy_j is not None and tokens else None,
        cost=cost,
        cost_per_million_tokens=cost / tokens * 1e6 if cost is not None and tokens else None,
        notes=tuple(notes),
    )


def _sum(run: Run, key: str, kept: Sequence[range]) -> float:
    """Of a rate or share over the time of these steps."""
    if key not in run.columns:
        return 0.0
    return math.fsum(finite(array("d", map(mul, at(run.column(key), kept), at(run.column("perf/step_time"), kept)))))


def _num_devices(run: Run) -> float:
    """Of the job: by the ratio that rows are scaled with, else one for each rank."""
    devices = run.last("ranks").get("devices")
    found = known([devices], LARGEST)
    return found[0] if found and found[0] > 0 else float(max(run.header.world_size, 1))


def _roles(run: Run, spent: Goodput, kept: Sequence[range], devices: float) -> tuple[Role, ...]:
    """Training is the time of the steps without their passes without gradients."""
    others = {name: spent.pause_s[name] for name in spent.roles}
    if in_step_s := _sum(run, "perf/no_grad_share", kept):
        others["no_grad"] = others.get("no_grad", 0.0) + in_step_s
    peaks, prefix = flop_per_s(run.peaks), f"{ROW}model_flop/"
    seen = [mapping(count.get("by_role")) for count in run.named("count")]
    flop = {TRAINING: {
        key.removeprefix(prefix): math.fsum(finite(at(values, kept)))
        for key, values in run.work.items() if key.startswith(prefix)
    }}  # fmt: skip
    for name in others:
        looks = known((by_role.get(name) for by_role in seen), LARGEST)
        if len(looks) >= MIN_LOOKS and len(peaks) == 1:
            flop[name] = dict.fromkeys(peaks, math.fsum(looks) / len(seen) * spent.num_steps * devices)
    times = {TRAINING: spent.productive_s - in_step_s, **dict(sorted(others.items(), key=lambda item: -item[1]))}
    return tuple(
        Role(
            name=clean(name, 60),
            seconds=role_s,
            share=role_s / spent.wall_s if spent.wall_s > 0 else None,
            flop=math.fsum(flop[name].values()) if flop.get(name) else None,
            utilisation=utilisation(flop[name], peaks, role_s * devices) if flop.get(name) else None,
        )
        for name, role_s in times.items()
    )


def memory_of(run: Run) -> tuple[Memory, ...]:
    """By device, from the samples of a run."""
    most: dict[str, dict[str, float]] = {}
    for event in run.named("resources"):
        for key, value in mapping(event.get("metrics")).items():
            name, _, device = key.removeprefix("resource/").partition("/")
            amount = number_or_nan(value, LARGEST)
            if name in _MEMORY and amount >= 0:
                own, pick = most.setdefault(clean(device, 40), {}), min if name == "host_free_bytes" else max
                own[name] = pick(own.get(name, amount), amount)
    first, found = most.get("", {}), []
    for device, own in most.items():
        peak, total, held = (own.get(f"memory_{name}_bytes") for name in ("peak", "total", "reserved"))
        # NVML tells what all processes use, and the driver with them.
        others = max(own.get("gpu_memory_bytes", 0.0) - (held or 0.0), 0.0)
        room = None if total is None else total - others - (peak or 0.0)
        if peak is None:
            peak, room = first.get("process_memory_bytes"), first.get("host_free_bytes")
        if peak:
            name = device or clean(run.header.device, 40)
            found.append(
                Memory(device=name, peak_bytes=peak, reserved_bytes=held, total_bytes=total, headroom_bytes=room)
            )
    return tuple(found)


_MEMORY = frozenset((
    *("memory_peak_bytes", "memory_reserved_bytes", "memory_total_bytes", "gpu_memory_bytes", "process_memory_bytes"),
    "host_free_bytes",
))  # fmt: skip


def _mean_power_w(run: Run) -> float | None:
    """Over the time between samples, each of which stands for the time since the one before it, or since its start."""
    samples = [
        (time_s, watts)
        for event in run.named("resources")
        if (time_s := number_or_nan(event.get("time"), LATEST_S)) > 0
        and (watts := number_or_nan(mapping(event.get("metrics")).get("resource/gpu_power_w"), LARGEST)) >= 0
    ]
    starts = sound([header.started_at for header in run.headers], LATEST_S)
    spans, before_s = [], -math.inf
    for time_s, watts in samples:
        begin_s = max((at_s for at_s in starts if before_s < at_s <= time_s), default=before_s)
        spans.append((time_s - begin_s, watts))
        before_s = time_s
    inside = [(span_s, watts) for span_s, watts in spans if 0 < span_s <= MAX_SILENCE_S]
    total_s = math.fsum(span_s for span_s, _ in inside)
    if total_s:
        return math.fsum(span_s * watts for span_s, watts in inside) / total_s
    return fmean(watts for _, watts in samples) if samples else None

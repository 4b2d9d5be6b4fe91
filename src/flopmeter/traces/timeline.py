"""What of a trace is kept? A few numbers for each event that shows where time went, in columns; its text is not kept.

About 100 bytes are held for an event that is kept, against some 300 of its text; flows, counters, stacks and queries
are not kept.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import msgspec

from flopmeter.devices.kernels import is_communication
from flopmeter.flops.formulas import Formula, Work, find
from flopmeter.profiling.recorded import NODE, Activity, Phase, Range, recorded_flop
from flopmeter.traces.events import UNREADABLE, Args, TraceEvent

MAX_EVENTS = 20_000_000
"""Most events that are kept; about 2 GB."""
_MAX_RECORD_BYTES = 1 << 16
"""Arguments longer than this are lists of thousands of tensors; no operator with a formula has them."""

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,15})")
_FETCH = re.compile(r"enumerate\(DataLoader\)|dataloader_next|DataLoaderIter\.__next__", re.IGNORECASE)
_CANNOT_LAUNCH = re.compile(
    r"Query|Occupancy|Attribute|Capturing|CaptureInfo|LastError|Synchronize|WaitEvent|EventRecord|EventCreate"
    r"|Malloc|Free|HostAlloc|Priority|GetDevice|DriverGet|Pointer"
)
_ACCELERATORS = ("mtia_ccp_events", "mtia_insight", "mtia_workloadd", "hpu_op", "glow_runtime")
"""Events of devices whose work is not read: what the host did beside it is not what the device did."""
_WAITS = re.compile(r"(Stream|Device|Event|Ctx)Synchronize$")


@dataclass(slots=True)
class DeviceEvents:
    """All that ran on the device, one entry each, in the order of the trace: kernels and copies, or operators."""

    start_us: array[float] = field(default_factory=lambda: array("d"))
    end_us: array[float] = field(default_factory=lambda: array("d"))
    activity: array[int] = field(default_factory=lambda: array("b"))
    """`Activity`, at first by the name alone, after `place` by what it was launched for."""
    name: array[int] = field(default_factory=lambda: array("l"))
    """Position in `Timeline.kernel_names`, or `operator_names`."""
    correlation: array[int] = field(default_factory=lambda: array("q"))
    """The call that launched a kernel; -1 when the trace does not say."""
    phase: list[Phase] = field(default_factory=list)
    """The phase that launched it; this and what follows is filled in by `place`."""
    launch_us: array[float] = field(default_factory=lambda: array("d"))
    """When the host launched it; NaN when the trace does not say."""
    thread: array[int] = field(default_factory=lambda: array("l"))
    """The thread that launched it; -1 when the trace does not say."""

    def __len__(self) -> int:
        return len(self.start_us)


@dataclass(slots=True)
class Spans:
    """Stretches of host time, one entry each."""

    start_us: array[float] = field(default_factory=lambda: array("d"))
    end_us: array[float] = field(default_factory=lambda: array("d"))
    thread: array[int] = field(default_factory=lambda: array("l"))
    """Threads are numbered as they come."""

    def __len__(self) -> int:
        return len(self.start_us)

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        return zip(self.start_us, self.end_us, self.thread, strict=True)

    def add(self, start_us: float, end_us: float, thread: int) -> None:
        self.start_us.append(start_us)
        self.end_us.append(end_us)
        self.thread.append(thread)


@dataclass(slots=True)
class Timeline:
    """One rank's trace, reduced to what is used."""

    device_events: DeviceEvents = field(default_factory=DeviceEvents)
    """Empty where there is no accelerator."""
    kernel_names: list[str] = field(default_factory=list)
    launches: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Correlation to the start of the launching call and its thread."""
    device_ids: set[Any] = field(default_factory=set)
    operators: list[Range] = field(default_factory=list)
    """Calls of operators that have a FLOP formula."""
    dispatched: Spans = field(default_factory=Spans)
    """Every operator."""
    dispatched_name: array[int] = field(default_factory=lambda: array("l"))
    """For each of them, the position in `operator_names`."""
    operator_names: list[str] = field(default_factory=list)
    graph_making: Spans = field(default_factory=Spans)
    """Operators that make an autograd node: the forward pass, or its repetition inside the backward pass."""
    nodes: Spans = field(default_factory=Spans)
    """Nodes of the backward pass."""
    optimizer: Spans = field(default_factory=Spans)
    fetches: Spans = field(default_factory=Spans)
    """Waits for the next batch."""
    waits: dict[str, list[float]] = field(default_factory=dict)
    """Calls in which the host waits for the device: name to their times."""
    softmaxes: list[tuple[float, bytes]] = field(default_factory=list)
    """Times and recorded shapes of softmax calls: a quadratic one is attention spelled out."""
    optimizer_ops: set[str] = field(default_factory=set)
    """Fused and foreach operators that were called, by name, and the optimizers' own names."""
    steps: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """Number of a ProfilerStep to its host start, end and thread."""
    device_steps: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """The same as the device saw them; used where the host was not recorded."""
    elsewhere: set[str] = field(default_factory=set)
    """Signs that an accelerator worked, apart from kernels that can be read: categories of events, launching calls."""
    num_events: int = 0
    """Events seen, of all kinds."""
    num_unsound: int = 0
    """Events of interest whose times are impossible."""
    has_values: bool = False
    """Whether arguments other than tensors were recorded (strides, flags)."""

    def outermost(self) -> Iterator[tuple[float, float, int]]:
        """Start, end and name of the operators that lie in no other."""
        last_end, last_thread = -math.inf, -1
        rows = zip(self.dispatched, self.dispatched_name, strict=True)
        for (start, end, thread), name in sorted(rows, key=lambda row: (row[0][2], row[0][0], -row[0][1])):
            if thread != last_thread or start >= last_end:
                yield start, end, name
                last_end, last_thread = end, thread


class Collector:
    """Fills a Timeline from batches of events."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._kernel_names: dict[str, int] = {}
        self._operator_names: dict[str, int] = {}
        self._threads: dict[Any, int] = {}
        self._num_kept = 0
        self._on_category: dict[str, Callable[[TraceEvent, float, float], None]] = {
            **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"), self._device_event),
            **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime", "runtime"), self._call),
            **dict.fromkeys(("xpu_runtime", "xpu_driver", "mtia_runtime"), self._call),
            **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), self._call),
            **dict.fromkeys(_ACCELERATORS, lambda event, *_: self.timeline.elsewhere.add(event.cat)),
            **dict.fromkeys(("cpu_op", "Operator", "user_annotation"), self._host),
            "gpu_user_annotation": self._device_annotation,
        }

    @property
    def is_full(self) -> bool:
        """Whether no more events can be kept."""
        return self._num_kept >= MAX_EVENTS

    def take(self, batch: list[TraceEvent]) -> None:
        """Keep what is needed of the events."""
        self.timeline.num_events += len(batch)
        on_category = self._on_category
        for event in batch:
            if event.ph != "X":
                continue
            handler = on_category.get(event.cat)
            if handler is None:
                continue
            start_us, end_us = event.ts, event.ts + event.dur
            if not -1e17 < start_us <= end_us < 1e17:  # NaN fails as well
                self.timeline.num_unsound += 1
                continue
            self._num_kept += 1
            handler(event, start_us, end_us)

    def _device_event(self, event: TraceEvent, start_us: float, end_us: float) -> None:
        columns, args = self.timeline.device_events, event.args
        columns.start_us.append(start_us)
        columns.end_us.append(end_us)
        columns.activity.append(_activity(event.cat, event.name))
        columns.name.append(self._kernel_names.setdefault(event.name, len(self._kernel_names)))
        columns.correlation.append(_integer(args.correlation) if args is not None else -1)
        if args is not None and args.device is not None:
            self.timeline.device_ids.add(args.device)

    def _call(self, event: TraceEvent, start_us: float, end_us: float) -> None:
        effect = _effect(event.name)
        if effect == "kernel":
            self.timeline.elsewhere.add(event.name)
        if effect == "waits":
            self.timeline.waits.setdefault(event.name, []).append(start_us)
        elif effect != "none" and event.args is not None:
            correlation = _integer(event.args.correlation)
            if correlation >= 0:
                self.timeline.launches[correlation] = (start_us, self._thread(event.tid))

    def _host(self, event: TraceEvent, start_us: float, end_us: float) -> None:
        kind, formula = _meaning(event.name)
        if not kind:
            return
        timeline, thread = self.timeline, self._thread(event.tid)
        if kind == "dispatched":
            timeline.dispatched.add(start_us, end_us, thread)
            timeline.dispatched_name.append(self._operator_names.setdefault(event.name, len(self._operator_names)))
            if event.args is not None:
                self._see_arguments(event.name, event.args, start_us, end_us, thread)
            if formula is not None:
                flop, dtype = _recorded(formula, event.args)
                operator = Range(event.name, start_us, end_us, thread, formula=formula, flop=flop, dtype=dtype)
                timeline.operators.append(operator)
                timeline.has_values |= event.args is not None and bool(bytes(event.args.values))
        elif kind == "steps":
            timeline.steps[int(_STEP.findall(event.name)[0])] = (start_us, end_us, thread)
        else:
            getattr(timeline, kind).add(start_us, end_us, thread)
            if kind == "optimizer":
                timeline.optimizer_ops.add(event.name)

    def _see_arguments(self, name: str, args: Args, start_us: float, end_us: float, thread: int) -> None:
        if args.sequence is not None and not args.forward_thread and _integer(args.sequence) >= 0:
            self.timeline.graph_making.add(start_us, end_us, thread)
        if name == "aten::_softmax":
            self.timeline.softmaxes.append((start_us, bytes(args.shapes)))
        elif name.startswith(("aten::_fused_", "aten::_foreach_")):
            self.timeline.optimizer_ops.add(name)

    def _device_annotation(self, event: TraceEvent, start_us: float, end_us: float) -> None:
        if match := _STEP.search(event.name):
            self.timeline.device_steps[int(match[1])] = (start_us, end_us, -1)

    def _thread(self, tid: Any) -> int:
        return self._threads.setdefault(tid, len(self._threads))

    def finish(self) -> Timeline:
        """What was kept, once all events were taken."""
        self.timeline.kernel_names, self.timeline.operator_names = list(self._kernel_names), list(self._operator_names)
        return self.timeline


@lru_cache(maxsize=65536)
def _meaning(name: str) -> tuple[str, Formula | None]:
    """Which field of `Timeline` keeps an operator or annotation of the host, "" for none; and an operator's formula."""
    if name.startswith(NODE):
        return "nodes", None
    if name.startswith("Optimizer.step#"):
        return "optimizer", None
    if _STEP.search(name):
        return "steps", None
    if _FETCH.search(name):
        return "fetches", None
    if "::" in name and " " not in name and not name.startswith("torch::autograd"):
        return "dispatched", find(name)
    return "", None


@lru_cache(maxsize=4096)
def _effect(name: str) -> Literal["waits", "kernel", "launches", "none"]:
    """What a call of the runtime may do: wait for the device, launch a kernel, launch anything, or neither."""
    if _WAITS.search(name):
        return "waits"
    if _CANNOT_LAUNCH.search(name):
        return "none"
    return "kernel" if "launchkernel" in name.lower() or "kernellaunch" in name.lower() else "launches"


def _integer(value: Any) -> int:
    if type(value) is int and 0 <= value < 1 << 62:
        return value
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < 1 << 62 else -1


@lru_cache(maxsize=65536)
def _activity(category: str, name: str) -> Activity:
    """Compute, communication or copy; what a compute kernel is for is known from its launch alone."""
    if category.lower() == "kernel":
        return Activity.COMMUNICATION if is_communication(name) else Activity.OTHER_COMPUTE
    is_within = category.lower().endswith("memset") or "DtoD" in name or "Device -> Device" in name
    return Activity.DEVICE_COPY if is_within else Activity.HOST_COPY


def _recorded(formula: Formula, args: Args | None) -> tuple[Work | None, str]:
    """FLOPs and dtype of a call; None when they do not follow from its record."""
    texts = (bytes(args.shapes), bytes(args.dtypes), bytes(args.values)) if args is not None else (b"", b"", b"")
    if not texts[0] or sum(map(len, texts)) > _MAX_RECORD_BYTES:
        return None, ""
    return _evaluate(formula.op, *texts)


@lru_cache(maxsize=16384)
def _evaluate(op: str, *texts: bytes) -> tuple[Work | None, str]:
    """A step repeats the same few calls."""
    formula = find(op)
    assert formula is not None
    try:
        shapes, dtypes, values = (msgspec.json.decode(text or b"[]", type=list[Any]) for text in texts)
    except UNREADABLE:
        return None, ""
    return recorded_flop(formula, shapes, dtypes, values + [""] * (len(shapes) - len(values)))

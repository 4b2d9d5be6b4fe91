"""How does a monitor take part in a job of several ranks? The seam between it and `distributed`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.distributed import COMMUNICATION, Ranks, RankStep, join_job
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.workload import PatchWindow, Workload
from flopmeter.metrics import Measured, utilisation
from flopmeter.monitor.header import device_of, device_uuid
from flopmeter.schema import RUN_FILE
from flopmeter.sinks import GIVEN
from flopmeter.timing import StepTime
from flopmeter.timing.cuda import waits_of

if TYPE_CHECKING:
    from flopmeter.distributed import Emit
    from flopmeter.monitor.measuring import FlopSource
    from flopmeter.monitor.recorder import Recorder
    from flopmeter.monitor.step_record import StepRecord

logger = logging.getLogger("flopmeter")

_BULKY = ("by_op", "by_module", "uncounted", "formula", "left_out", "workload", "needs")
"""What a prediction does not need: it would be most of the note."""


def my_rank() -> int | None:
    """This process's rank; None as long as torch.distributed does not say."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def seen_from_here(path: Path) -> Path:
    """Relative to the current folder where it lies below that, as most people give it."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # it lies elsewhere, or the current folder is gone
        return path


def record_path(output_dir: Path, rank: int, config: MonitorConfig) -> Path:
    """Where this rank's record goes: rank 0 keeps the job's, the others one of their own when asked, else none."""
    if rank == 0:
        return output_dir / RUN_FILE
    stem, _, suffix = RUN_FILE.partition(".")
    is_asked = config.monitoring.distributed.record_every_rank
    return output_dir / f"{stem}.rank{rank}.{suffix}" if is_asked else Path(os.devnull)


def sink_names(config: MonitorConfig, rank: int, *, is_function_given: bool) -> tuple[str, ...]:
    """The sinks of this rank: all of them on rank 0, elsewhere a Prometheus page when asked."""
    if rank == 0:
        return (*config.sink_names, GIVEN) if is_function_given else config.sink_names
    return tuple(name for name in config.sink_names if name == "prometheus" and config.prometheus.ranks == "all")


def join(model: nn.Module, config: MonitorConfig, recorder: Recorder, emit: Emit) -> Ranks | None:
    """Connect the parts of this rank's monitor with the job; None when it is alone, or when that fails."""
    clock = recorder.clock
    try:
        ranks = join_job(model, config.monitoring.distributed, lambda: clock.current, emit, _device_name(model))
        if ranks is not None:
            ranks.blocking.is_on = config.monitoring.patches
            _connect(ranks, recorder, model)
            ranks.start()
    except Exception as error:  # noqa: BLE001 - a job without statistics is still a job
        logger.warning("the ranks are not compared: %s: %s", type(error).__name__, error)
        return None
    return ranks


def _connect(ranks: Ranks, recorder: Recorder, model: nn.Module) -> None:
    recorder.follow_ranks(ranks.blocking)
    if recorder.source is not None:
        recorder.source.ranks = ranks
        ranks.on_count = recorder.source.take_count
    connect_device(ranks, recorder, model)


def connect_device(ranks: Ranks, recorder: Recorder, model: nn.Module) -> None:
    """Let the ranks know what the device does, where there is one."""
    if (device_time := recorder.device_time) is not None:
        device_time.on_step = ranks.add_device
        ranks.blocking.on_backward_computed = lambda: device_time.mark_inside_backward(COMMUNICATION)
        if ranks.blocking.is_on and _is_sharded(model):
            device_time.waits = waits_of(device_of(model), lambda: recorder.clock.current)
            if device_time.waits is not None:
                device_time.waits.attach()


def _is_sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it, which takes a second
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def _device_name(model: nn.Module | None) -> str:
    """Names a device among those of its host; the CPU is one, however many ranks compute on it."""
    device = device_of(model)
    return device_uuid(device) or str(device)


def rank_step(item: StepRecord, step: Measured, time_: StepTime, source: FlopSource | None) -> RankStep:
    """What this rank tells the others of a step. FLOPs that are only estimated are kept, unless that is the mode."""
    peaks = source.peaks if source is not None else {}
    is_told = source is not None and (source.has_count or source.mode == "estimate")
    flop = step.get("model_flop") if is_told else None
    return RankStep(
        item.index,
        time_.step_ns / 1e9,
        [ns / 1e9 for ns in time_.phase_ns],
        None if item.blocked_ns is None else [ns / 1e9 for ns in item.blocked_ns],
        None if flop is None else sum(flop.values()),
        None if flop is None else utilisation(flop, peaks, 1.0),
        step.get("tokens_processed"),
        step.get("samples"),
    )


def note_of(count: FlopCount, workload: Workload) -> dict[str, Any]:
    """A count and what it was counted for, as plain values."""
    plain = {f.name: getattr(count, f.name) for f in fields(count) if f.name not in _BULKY}
    return {"count": plain, "workload": asdict(workload)}


def read_note(note: Mapping[str, Any]) -> tuple[FlopCount, Workload]:
    """The same on the other side."""
    workload = dict(note["workload"])
    if workload["patch_window"] is not None:
        workload["patch_window"] = PatchWindow(*workload["patch_window"])
    workload["shape"] = tuple([tuple(map(tuple, call)) for call in workload.get("shape", ())])
    return FlopCount(**note["count"]), Workload(**workload)

"""Which numbers exist, in which unit, what they mean, and how the ranks of a job combine them.

Every sink, the run file and the report use these keys and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCHEMA_VERSION = 2
"""Raised when a reader of the old run file would misread the new one."""

RUN_FILE = "run.jsonl"
TRACE_FILE = "trace.json"
"""The profile of the last sampled step, where `monitoring.keep_trace` keeps it."""

PHASES = ("data_wait", "host_to_device", "forward", "backward", "optimizer", "no_grad", "other")
"""The parts of a step; they add up to it. Pauses (evaluation, checkpoints) and named roles are no part of it."""

StepMark = Literal["warmup", "observed", "profiled"]
"""Why a step does not represent the run. Marked steps are recorded, and left out of every aggregate."""

RankRule = Literal["sum", "mean", "max", "rank0"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that flopmeter reports."""

    key: str
    """Name in every sink and in the run file; `<...>` stands for a name of the user's."""
    unit: str
    """Unit of the value; "1" for a fraction between 0 and 1, "" for a plain number."""
    ranks: RankRule
    """How the values of the ranks make the value of the job."""
    meaning: str
    """What it says, in one sentence."""


METRICS: tuple[Metric, ...] = (
    Metric("global_step", "", "rank0", "Optimizer steps done so far; gradient accumulation counts as one."),
    Metric("training/loss", "", "rank0", "The loss as the training loop reports it."),
    Metric("training/lr", "", "rank0", "The learning rate as the training loop reports it."),
    Metric("training/epoch", "", "rank0", "The epoch as the training loop reports it."),
    Metric("training/grad_norm", "", "rank0", "The gradient norm as the training loop reports it."),
    Metric("perf/mfu", "1", "mean", "Model FLOPs per second of wall time over the device's peak."),
    Metric("perf/mfu_percent", "%", "mean", "perf/mfu times 100."),
    Metric("perf/hfu", "1", "mean", "Like perf/mfu with every FLOP that ran, recomputation included."),
    Metric("perf/mfu_processed", "1", "mean", "Like perf/mfu with padding counted as if it were work."),
    Metric("perf/model_flop", "FLOP", "sum", "FLOPs that the model's mathematics needs for the step."),
    Metric("perf/flop_error", "1", "max", "Error of the last prediction that a count has tested, as a share of that."),
    Metric("perf/step_time", "s", "max", "Wall time of an optimizer step: with the wait for data, without pauses."),
    Metric("perf/steps_per_second", "1/s", "rank0", "Optimizer steps per second of step time."),
    Metric("perf/tokens_per_second", "1/s", "sum", "Tokens that are not padding, per second of step time."),
    Metric("perf/tokens_processed_per_second", "1/s", "sum", "All tokens, padding included, per second of step time."),
    Metric("perf/samples_per_second", "1/s", "sum", "Samples per second of step time."),
    *(
        Metric(f"perf/{phase}_share", "1", "mean", f"Share of the step spent in {phase.replace('_', ' ')}.")
        for phase in PHASES
    ),
    Metric("perf/exposed_communication_share", "1", "mean", "Share in which backward only waits for other ranks."),
    Metric(
        "perf/data_wait_cpu_share", "1", "mean", "Share of the wait for data in which the training thread computed."
    ),
    Metric("perf/overhead_share", "1", "mean", "Share of wall time that flopmeter itself used."),
    Metric("perf/goodput", "1", "rank0", "Share of the wall time since this start's first step that went into steps."),
    Metric("resource/gpu_memory_bytes", "byte", "max", "Memory of the GPU in use, by all processes."),
    Metric("resource/gpu_memory_share", "1", "max", "Share of the GPU's memory in use."),
    Metric("resource/gpu_utilisation", "1", "mean", "Share of time in which any kernel ran; says little about MFU."),
    Metric("resource/gpu_power_w", "W", "sum", "Power that the GPU draws."),
    Metric("resource/gpu_temperature_c", "degree Celsius", "max", "Temperature of the GPU."),
    Metric("resource/gpu_clock_hz", "Hz", "mean", "Clock of the GPU's multiprocessors."),
    Metric("resource/gpu_power_limit_w", "W", "sum", "Power that the GPU may draw."),
    Metric("resource/gpu_throttle_reasons", "", "max", "What holds the clock down, as NVML's bits; 0 for nothing."),
    Metric("resource/memory_allocated_bytes", "byte", "max", "Memory of the device that tensors take."),
    Metric("resource/memory_reserved_bytes", "byte", "max", "The same with what torch's allocator keeps for later."),
    Metric("resource/memory_peak_bytes", "byte", "max", "The most that tensors took at once so far."),
    Metric("resource/memory_total_bytes", "byte", "max", "Memory of the device."),
    Metric("resource/host_free_bytes", "byte", "rank0", "Memory that the process may still take on the host."),
    Metric("resource/process_memory_bytes", "byte", "sum", "Resident memory of the training process."),
    Metric("resource/process_cpu_cores", "", "sum", "CPU cores that the training process keeps busy."),
    Metric("resource/cpu_wait_share", "1", "max", "Share of time that the training thread is ready and has no core."),
    Metric("resource/num_workers", "", "sum", "Data loader workers that are alive."),
    Metric("resource/worker_cpu_cores", "", "sum", "CPU cores that the workers keep busy: workers that wait use none."),
    Metric("counter/tensor_active", "1", "rank0", "Share of cycles in which tensor pipes worked; stands beside HFU."),
    Metric("counter/sm_active", "1", "rank0", "Share of cycles in which a multiprocessor had work."),
    Metric("counter/dram_active", "1", "rank0", "Share of cycles in which the device's memory was read or written."),
    *(
        Metric(f"rank/{name}_time_{which}", "s", "rank0", f"{meaning}: {which} over the ranks, mean of an interval.")
        for name, meaning in (
            ("step", "Wall time of a step"),
            ("own", "Time of a step without the wait for other ranks"),
            ("blocked", "Time of a step in which a rank waits for others"),
        )
        for which in ("min", "mean", "max")
    ),
    Metric("rank/slowest", "", "rank0", "The rank with the longest own time."),
    Metric("rank/memory_max_bytes", "byte", "rank0", "Memory of the rank that uses most."),
    Metric("rank/num_missing", "", "rank0", "Ranks of which nothing was heard in the interval."),
    Metric("dataset/<name>/loss", "", "mean", "Mean loss of the samples of one dataset."),
    Metric("dataset/<name>/accuracy", "1", "mean", "Share of right predictions on one dataset."),
    Metric("dataset/<name>/samples", "", "sum", "Samples seen of one dataset."),
)

METRICS_BY_KEY = {metric.key: metric for metric in METRICS}

USUAL = frozenset((
    *("training/loss", "training/lr", "training/epoch", "training/grad_norm", "global_step", "perf/mfu", "perf/hfu"),
    *("perf/mfu_percent", "perf/step_time", "perf/steps_per_second", "perf/tokens_per_second", "perf/goodput"),
    *("perf/samples_per_second", "perf/data_wait_share"),
))  # fmt: skip
"""What a sink with a page of charts gets unless more is asked for."""

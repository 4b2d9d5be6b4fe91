"""Which numbers exist, in which unit, what they mean, and how the ranks of a job combine them.

Every sink, the run file and the report use these keys and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

SCHEMA_VERSION = 1
"""Raised when a reader of the old run file would misread the new one."""

RUN_FILE = "run.jsonl"

PHASES = ("data_wait", "host_to_device", "forward", "backward", "optimizer", "other")
"""The parts of a step; they add up to it. Pauses (evaluation, checkpoints) lie between steps."""

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
    Metric("perf/flop_error", "1", "max", "Distance of the last predicted model FLOPs from the count that tested it."),
    Metric("perf/step_time", "s", "max", "Wall time of an optimizer step: with the wait for data, without pauses."),
    Metric("perf/steps_per_second", "1/s", "rank0", "Optimizer steps per second of step time."),
    Metric("perf/tokens_per_second", "1/s", "sum", "Tokens that are not padding, per second of step time."),
    Metric("perf/tokens_processed_per_second", "1/s", "sum", "All tokens, padding included, per second of step time."),
    Metric("perf/samples_per_second", "1/s", "sum", "Samples per second of step time."),
    *(
        Metric(f"perf/{phase}_share", "1", "mean", f"Share of the step spent in {phase.replace('_', ' ')}.")
        for phase in PHASES
    ),
    Metric(
        "perf/exposed_communication_share",
        "1",
        "mean",
        "Share of the step in which the backward pass only waits for gradients of other ranks; lies in backward's.",
    ),
    Metric(
        "perf/data_wait_cpu_share",
        "1",
        "mean",
        "Share of the wait for data in which the training thread itself computed; on every seventh batch.",
    ),
    Metric("perf/overhead_share", "1", "mean", "Share of wall time that flopmeter itself used."),
    Metric(
        "perf/goodput",
        "1",
        "rank0",
        "Share of the wall time since this start's first step spent in steps; the report's goodput counts starting up, "
        "restarts and lost work, too.",
    ),
    Metric("resource/gpu_memory_bytes", "byte", "max", "Memory of the GPU in use, by all processes."),
    Metric("resource/gpu_memory_share", "1", "max", "Share of the GPU's memory in use."),
    Metric("resource/gpu_utilisation", "1", "mean", "Share of time in which any kernel ran; says little about MFU."),
    Metric("resource/gpu_power_w", "W", "sum", "Power that the GPU draws."),
    Metric("resource/gpu_temperature_c", "degree Celsius", "max", "Temperature of the GPU."),
    Metric("resource/process_memory_bytes", "byte", "sum", "Resident memory of the training process."),
    Metric("resource/process_cpu_cores", "", "sum", "CPU cores that the training process keeps busy."),
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


class Touched(NamedTuple):
    """Something of the user's process that flopmeter hooks, replaces or adds to."""

    name: str
    """The full name of a function or class that is replaced; words for anything else."""
    when: str
    why: str
    until: str


_RUN, _STEP, _RANKS, _SCRIPT = "a run", "a measured step", "a job of several ranks", "flopmeter run"
_END, _STEP_END, _EXIT = "finish_training", "the step's end", "the process ends"
_DISTRIBUTED = "torch.distributed."

TOUCHED: tuple[Touched, ...] = (
    Touched("torch.autograd.backward", _RUN, "when a backward pass begins and ends", _END),
    Touched("torch.cuda.make_graphed_callables", _RUN, "it refuses a model with hooks: ours go meanwhile", _END),
    Touched("torch.cuda.graphs.make_graphed_callables", _RUN, "the same function under its other name", _END),
    Touched("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", _RUN, "waits of the given loader", _END),
    Touched("torch.jit._recursive.create_script_module", _RUN, "a scripted model carries no hook of ours", _END),
    Touched("torch.nn.modules.module.Module.__getstate__", _RUN, "a pickle carries no hook; or the model's own", _END),
    Touched("torch.autograd.profiler.profile._prepare_trace", _RUN, "ours ends where the program's begins", _END),
    Touched("torch.autograd.profiler.profile.__exit__", _RUN, "the program's profiler has ended", _END),
    Touched("torch.autograd._engine_run_backward", _STEP, "which work is a backward pass's", _STEP_END),
    Touched("torch.utils.checkpoint._StopRecomputationError", _STEP, "work that recomputation left early", _STEP_END),
    Touched("torch._dynamo.eval_frame._callback_from_stance", "torch before 2.10", "ours ends there", _STEP_END),
    Touched("torch.nn.functional.scaled_dot_product_attention", "a count on shapes", "it runs on shapes", "the count"),
    Touched("torch.autocast.__init__", "a count on shapes", "shapes have no autocast of their own", "the count"),
    Touched(_DISTRIBUTED + "Work.wait", _RANKS, "time blocked in a collective", _END),
    Touched(_DISTRIBUTED + "_functional_collectives.AsyncCollectiveTensor.wait", _RANKS, "the same", _END),
    Touched(_DISTRIBUTED + "_functional_collectives.AsyncCollectiveTensor.trigger_wait", _RANKS, "the same", _END),
    Touched("torch.nn.parallel.distributed.DistributedDataParallel._sync_buffers", _RANKS, "the same", _END),
    Touched("FSDPParamGroup.wait_for_unshard", "FSDP2 on a GPU", "the device waits for weights", _END),
    Touched("FSDPParamGroup.post_backward", "FSDP2 on a GPU", "it waits for memory of gradients", _END),
    Touched("FSDPState._root_post_backward_final_callback", "FSDP2 on a GPU", "it waits for gradients", _END),
    Touched("torch.amp.grad_scaler.GradScaler.step", _SCRIPT, "steps that an overflow skips", _EXIT),
    Touched("forward hooks on the given model", _RUN, "when a forward pass begins and ends", _END),
    Touched("forward hooks on all of its modules", _STEP, "which module does the work", _STEP_END),
    Touched("step hooks on the given optimizer", _RUN, "when a step ends", _END),
    Touched("torch.optim.optimizer._global_optimizer_pre_hooks", _STEP, "which work is the optimizer's", _STEP_END),
    Touched("torch.optim.optimizer._global_optimizer_post_hooks", _STEP, "the same; all along in `run`", _STEP_END),
    Touched("a hook on the loss", "DDP", "when the backward pass has computed", "the loss is freed"),
    Touched("a dispatch mode, or torch's profiler", _STEP, "which operators run", _STEP_END),
    Touched("gc.callbacks", _RUN, "time in collections of garbage", _END),
    Touched("atexit", _RUN, "a forgotten finish_training still closes the record", _END),
    Touched("os.register_at_fork", "import", "a forked child measures nothing", _EXIT),
    Touched("a handler on the logger `flopmeter`", _RUN, "warnings say whose they are", _EXIT),
    Touched("threads named `flopmeter`, `flopmeter-...`", _RUN, "files, sinks and other ranks", _END),
    Touched("KINETO_LOG_LEVEL", "the start of a profile", "Kineto prints no line of it", "at once"),
    Touched("sys.meta_path, PYTHONPATH, FLOPMETER_RUN", _SCRIPT, "to be there with torch", "torch is imported"),
)
"""All of it: `docs/what_it_touches.md` and `flopmeter doctor` show this table, and a test looks for anything else."""

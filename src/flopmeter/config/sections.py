"""Which settings are there, what does each do, and what may it be?

One class per section of the YAML file, with the file's own key names. The text under a field is its documentation:
`docs/settings.md` is made from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from flopmeter.config.reading import Section
from flopmeter.schema import METRICS_BY_KEY


def check_metric_keys(found: tuple[str, ...]) -> None:
    """Which metrics a sink gets; one that is no metric is named by its place."""
    for place, pattern in enumerate(found):
        if pattern not in ("usual", "all") and not any(fnmatchcase(key, pattern) for key in METRICS_BY_KEY):
            raise ValueError(f"[{place}]", pattern)


_NAME = r"\A([a-z_][a-z0-9_]*|[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*)\Z"
_MOST = sys.float_info.max
_SINKS = "a list of lower-case names such as console, wandb, or package.module:function"
_QUOTES = "in quotes where YAML would read a number or a date"
_RATE = "FLOP/s, more than 0, such as 989.4e12"
_BUDGET = "a share above 0 and up to 0.5; 0.005 is half a percent"
Switch = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(description=f"text, {_QUOTES}")]
Texts = Annotated[tuple[str, ...], Meta(description=f"a list of texts, each {_QUOTES}")]
Frequency = Annotated[int, Meta(ge=0, le=2**63 - 1, description="a whole number of steps, 0 or more")]
Steps = Annotated[int, Meta(ge=1, le=2**63 - 1, description="a whole number of steps, 1 or more")]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1, description="a whole number, 1 or more")]
Seconds = Annotated[float, Meta(gt=0, le=_MOST, description="seconds, more than 0")]
FlopRate = Annotated[float, Meta(gt=0, le=_MOST, description=_RATE)]
Amount = Annotated[float, Meta(ge=0, le=_MOST, description="a number, 0 or more")]
Budget = Annotated[float, Meta(gt=0, le=0.5, description=_BUDGET)]
Port = Annotated[int, Meta(ge=1, le=65535, description="a port from 1 to 65535")]
Host = Annotated[str, Meta(pattern=r"\A\S+\Z", description="a host name or address")]
SinkNames = Annotated[tuple[Annotated[str, Meta(pattern=_NAME)], ...], Meta(description=_SINKS)]
_KEYS = Meta(description="a list of usual, all, and keys such as perf/mfu or 'rank/*'")
Keys = Annotated[tuple[str, ...], _KEYS, check_metric_keys]
Mode = Literal["smart", "profiler", "estimate", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class SinkSection(Section):
    """A section that switches a sink on; a bare true or false in its place does just that."""

    bare: ClassVar[str | None] = "enabled"

    enabled: Switch = False
    """Send metrics there. Naming the sink in `monitoring.sinks` does the same."""
    metrics: Keys = ("all",)
    """Which of flopmeter's metrics: `usual` (loss, lr, epoch, grad_norm, MFU, HFU, goodput, step time, rates,
    data wait), `all`, and keys, where `*` stands for anything. Numbers of your own always go."""


@dataclass(frozen=True, kw_only=True)
class SmartMode(Section):
    """How smart mode measures."""

    initial_profiling: Switch = True
    """Observe one real step soon after the start; false waits for the first recalibration."""
    calibration_enabled: Switch = True
    """Correct the formula by what was observed; false keeps the uncorrected estimate."""
    recalibration_frequency: Frequency = 1000
    """Observe a step again every so many steps, in smart mode; 0 = never again after the first."""


@dataclass(frozen=True, kw_only=True)
class HybridMode(Section):
    """What hybrid mode may use."""

    hardware_counters_enabled: Switch = True
    """Read the device's own counters and show them beside the counted FLOPs."""
    fallback_to_profiler: Switch = True
    """Use the profiler where there are no counters; false counts as smart mode does."""


@dataclass(frozen=True, kw_only=True)
class PhaseFrequency(Section):
    """The measuring frequency after `set_training_phase`, by phase."""

    warmup: Frequency = 1000
    """Measure every so many steps in the warm-up phase; 0 = never again after the first."""
    main: Frequency = 500
    """The same in the main phase."""
    finetune: Frequency = 200
    """The same in the fine-tuning phase."""


@dataclass(frozen=True, kw_only=True)
class PerformanceMonitoring(Section):
    """When FLOPs are measured."""

    measure_flops_frequency: Frequency = 500
    """Measure the FLOPs of a step every so many steps; 0 = never again after the first."""
    smart_mode: SmartMode = SmartMode()
    hybrid_mode: HybridMode = HybridMode()
    phase_frequency: PhaseFrequency = PhaseFrequency()


@dataclass(frozen=True, kw_only=True)
class Distributed(Section):
    """Jobs of several ranks."""

    statistics_every: Steps = 50
    """Compare the ranks (step time, phases, memory) every so many steps."""
    statistics_s: Seconds = 1.0
    """And at most every so many seconds, however short the steps are."""
    join_s: Seconds = 30.0
    """How long rank 0 waits for the others, from its first step on, before it gives up comparing. Nothing blocks."""
    data_parallel_size: Count | None = None
    """How many groups of ranks see different tokens, such as world size / (tensor x pipeline parallel) in a job without
    device meshes; not given: read from the device meshes of the parameters."""
    record_every_rank: Switch = False
    """Let each of the other ranks write a run file of its own, `run.rank<N>.jsonl`, beside the job's."""


@dataclass(frozen=True, kw_only=True)
class Monitoring(Section):
    """What is measured, how often, and where it goes."""

    mfu_calculation_mode: Mode = "smart"
    """Where the FLOPs come from: an estimate corrected by observed steps, the profiler, the estimate alone, or hardware
    counters beside the count."""
    flops_profile_freq: Frequency | None = None
    """Measure every so many steps; 0 = never again after the first. Stronger than `measure_flops_frequency`."""
    convention: Literal["exact", "full"] = "exact"
    """exact counts non-padding tokens and the query-key pairs that the mask lets through; full counts all of them."""
    overhead_budget: Budget = 0.005
    """The share of training time that flopmeter may cost; intervals are stretched to stay below it."""
    price_per_device_hour: Amount | None = None
    """What an hour of one device costs, in any currency: the report then says what the run, a million tokens and each
    finding cost."""
    patches: Switch = True
    """Replace functions of torch while the run is on (`docs/what_it_touches.md` lists them); false leaves hooks on the
    given objects alone: FLOPs are estimated, no step is observed or profiled, and backward passes, waits for data and
    for other ranks are not told apart from the rest of the step."""
    profile_steps: Switch = True
    """Profile one step soon after the start, now and then later, and when MFU falls: tells where the time goes inside
    forward and backward. Never in estimate mode, and never beside another profiler."""
    keep_trace: Switch = False
    """Keep the profile of the last sampled step as `trace.json` beside the run file, for Perfetto and
    `flopmeter report`."""
    peak_flop_per_s: FlopRate | None = None
    """The peak of one device, for a device that is not on file or when you know better; not given: looked up."""
    detail_every: Steps = 50
    """Send the gradient norm and `perf/*` to the sinks every so many steps; the run file has every step."""
    dataset_metrics_every: Steps = 10
    """Look at the loss and accuracy per dataset in one batch of so many; they are sent every `detail_every` steps."""
    dataset_labels_shifted: Switch = True
    """Accuracy per dataset: logits answer for the next position's label; false for masked models and token classes."""
    flush_every: Steps = 200
    """Write the run file to disk every so many steps; kill -9 costs at most two times as many."""
    flush_s: Seconds = 5.0
    """Write the run file to disk about every so many seconds."""
    sinks: SinkNames = ("console",)
    """Where metrics go besides the run file; the sinks that their own section enables are added."""
    report: Switch = True
    """Write `report.html` beside the run file when the run ends."""
    performance_monitoring: PerformanceMonitoring = PerformanceMonitoring()
    distributed: Distributed = Distributed()

    def __post_init__(self) -> None:
        if not self.patches:
            object.__setattr__(self, "mfu_calculation_mode", "estimate")
            object.__setattr__(self, "profile_steps", False)

    @classmethod
    def check(cls, written: Mapping[str, Any]) -> str | None:
        mode = written.get("mfu_calculation_mode") or "estimate"
        is_in_vain = written.get("patches") is False and mode != "estimate"
        return f"patches: false measures no step (mfu_calculation_mode: estimate, not {mode})" if is_in_vain else None


@dataclass(frozen=True, kw_only=True)
class MonitorFreq(Section):
    """The older spelling of the measuring frequency."""

    flops_profile_freq: Frequency | None = None
    """Means the same as `monitoring.flops_profile_freq`, which is stronger."""


@dataclass(frozen=True, kw_only=True)
class Monitor(Section):
    """The older dialect, read for configs that have it."""

    freq: MonitorFreq = MonitorFreq()


@dataclass(frozen=True, kw_only=True)
class Wandb(SinkSection):
    """Weights & Biases. Any other key here goes to `wandb.init` as it is, which judges it."""

    has_foreign_keys: ClassVar[bool] = True

    metrics: Keys = ("usual",)
    """The same for W&B, where every metric is a chart."""
    project: Text | None = None
    """The project that the run is filed under."""
    run_name: Text | None = None
    """The run's display name; `name` means the same."""
    tags: Texts = ()
    """Tags of the run."""
    log_dataset_metrics: Switch = True
    """Send the metrics per dataset too."""
    reduced_logging: Switch = False
    """Send W&B basic metrics half as often, and details at most every 100 steps."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """All other keys."""

    @classmethod
    def check(cls, written: Mapping[str, Any]) -> str | None:
        names = {written.get("run_name"), written.get("name")} - {None}
        return "run_name and name differ but mean the same (keep one of them)" if len(names) > 1 else None

    def init_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `wandb.init`: only what was written, under its names."""
        own = {"project": self.project, "name": self.run_name, "tags": self.tags or None}
        arguments = {**self.more, **{name: value for name, value in own.items() if value is not None}}
        if arguments.get("mode") is False:
            arguments["mode"] = "disabled"  # YAML reads a bare off as false
        return arguments


@dataclass(frozen=True, kw_only=True)
class Tensorboard(SinkSection):
    """TensorBoard event files."""


@dataclass(frozen=True, kw_only=True)
class Prometheus(SinkSection):
    """A page that a Prometheus server can scrape."""

    host: Host = "127.0.0.1"
    """The address to listen on; the default is reachable from this machine only."""
    port: Port = 9464
    """The port to listen on; with `ranks: all`, each rank of a machine adds its local rank."""
    ranks: Literal["first", "all"] = "first"
    """first: one page, with the numbers of the job. all: every other rank has a page of its own numbers as well."""
    job: Text | None = None
    """The label `job` of every sample; not given: the name of the output folder."""


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    """The trainer's own section, of which flopmeter reads one key."""

    has_foreign_keys: ClassVar[bool] = True

    logging_steps: Steps = 1
    """Send basic metrics (loss, learning rate, epoch) every so many steps."""


@dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """All of them. Sections that are not listed here belong to somebody else and are left alone."""

    has_foreign_keys: ClassVar[bool] = True

    monitoring: Monitoring = Monitoring()
    monitor: Monitor = Monitor()
    wandb: Wandb = Wandb()
    tensorboard: Tensorboard = Tensorboard()
    prometheus: Prometheus = Prometheus()
    training: Training = Training()

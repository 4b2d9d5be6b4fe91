"""Which settings are there, what does each do, and what may it be?

One class per section of the YAML file, with the file's own key names. The text under a field is its documentation:
`docs/settings.md` and the error messages are made from it. A setting written as null counts as not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from flopmeter.config.values import (
    Budget,
    Count,
    FlopRate,
    Frequency,
    Host,
    Mode,
    Port,
    Seconds,
    SinkNames,
    Steps,
    Switch,
    Text,
    Texts,
    Values,
    WandbMode,
)

# Close enough to be the same word with a slip in it: "loging_steps" is, "log_steps" and "tensorboard_dir" are not.
_MISSPELLING_CUTOFF = 0.88
_SLIP = "unknown key (did you mean {meant}? If the key is your own, give {meant} beside it)"


class Section(BaseModel):
    """A section that is all ours: an unknown key in it is refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return {} if data is None else data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class SharedSection(Section):
    """A section that we share with the user's own code: foreign keys are left alone, but a slip in one of ours is not.

    A key is taken for a slip only while the key it resembles is absent, so a foreign key can always be kept.
    """

    model_config = ConfigDict(extra="ignore")
    guarded: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspellings(cls, data: Any) -> Any:
        keys = [key for key in data if isinstance(key, str)] if isinstance(data, Mapping) else []
        absent = [name for name in cls.guarded if name not in keys]
        for key in keys:
            meant = get_close_matches(key.lower(), absent, n=1, cutoff=_MISSPELLING_CUTOFF)
            if meant and key not in cls.model_fields:
                raise PydanticCustomError("unknown_key", _SLIP, {"key": key, "meant": meant[0]})
        return data


class SinkSection(Section):
    """A section that switches a sink on; a bare true or false in its place does just that."""

    enabled: Switch = False
    """Send metrics there. Naming the sink in `monitoring.sinks` does the same."""

    @model_validator(mode="before")
    @classmethod
    def _read_bare_switch(cls, data: Any) -> Any:
        return {"enabled": data} if isinstance(data, bool) else data


class SmartMode(Section):
    """How smart mode measures."""

    initial_profiling: Switch = True
    """Observe one real step soon after the start; false waits for the first recalibration."""
    calibration_enabled: Switch = True
    """Correct the formula by what was observed; false keeps the uncorrected estimate."""
    recalibration_frequency: Frequency = 1000
    """Observe a step again every so many steps, in smart mode; 0 = never again after the first."""


class HybridMode(Section):
    """What hybrid mode may use."""

    hardware_counters_enabled: Switch = True
    """Read the device's own counters and show them beside the counted FLOPs."""
    fallback_to_profiler: Switch = True
    """Use the profiler where there are no counters; false counts as smart mode does."""


class PhaseFrequency(Section):
    """The measuring frequency after `set_training_phase`, by phase."""

    warmup: Frequency = 1000
    """Measure every so many steps in the warm-up phase; 0 = never again after the first."""
    main: Frequency = 500
    """The same in the main phase."""
    finetune: Frequency = 200
    """The same in the fine-tuning phase."""


class PerformanceMonitoring(Section):
    """When FLOPs are measured."""

    measure_flops_frequency: Frequency = 500
    """Measure the FLOPs of a step every so many steps; 0 = never again after the first."""
    smart_mode: SmartMode = SmartMode()
    hybrid_mode: HybridMode = HybridMode()
    phase_frequency: PhaseFrequency = PhaseFrequency()


class Distributed(Section):
    """Jobs of several ranks."""

    statistics_every: Steps = 50
    """Compare the ranks (step time, phases, memory) every so many steps."""
    statistics_s: Seconds = 1.0
    """And at most every so many seconds, however short the steps are."""
    join_s: Seconds = 30.0
    """How long rank 0 waits for the others, from its first step on, before it gives up comparing. Nothing blocks."""
    data_parallel_size: Count | None = None
    """How many groups of ranks see different tokens; not given: told from the device meshes of the parameters."""
    record_every_rank: Switch = False
    """Let each of the other ranks write a run file of its own, `run.rank<N>.jsonl`, beside the job's."""


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
    patches: Switch = True
    """Replace functions of torch while the run is on (`docs/what_it_touches.md` lists them); false leaves hooks on the
    given objects alone: FLOPs are estimated, no step is observed or profiled, and backward passes, waits for data and
    for other ranks are not told apart from the rest of the step."""
    profile_steps: Switch = True
    """Profile one step soon after the start, now and then later, and when MFU falls: tells where the time goes inside
    forward and backward. Never in estimate mode, and never beside another profiler."""
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

    @model_validator(mode="before")
    @classmethod
    def _measure_nothing_without_patches(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("patches") is not False:
            return data
        mode = data.get("mfu_calculation_mode") or "estimate"
        if mode != "estimate":
            raise ValueError(f"patches: false measures no step (mfu_calculation_mode: estimate, not {mode})")
        return {**data, "mfu_calculation_mode": mode, "profile_steps": False}


class MonitorFreq(Section):
    """The older spelling of the measuring frequency."""

    flops_profile_freq: Frequency | None = None
    """Means the same as `monitoring.flops_profile_freq`, which is stronger."""


class Monitor(Section):
    """The older dialect, read for configs that have it."""

    freq: MonitorFreq = MonitorFreq()


class Wandb(SinkSection):
    """Weights & Biases. What is not flopmeter's own here goes to `wandb.init` as it is."""

    project: Text | None = None
    """The project that the run is filed under."""
    run_name: Text | None = None
    """The run's display name; `name` means the same."""
    tags: Texts = ()
    """Tags of the run."""
    log_dataset_metrics: Switch = True
    """Send the metrics per dataset too."""
    reduced_logging: Switch = False
    """Send basic metrics half as often, and details at most every 100 steps."""
    entity: Text | None = None
    """For `wandb.init`: the user or team that owns the run."""
    name: Text | None = None
    """For `wandb.init`: means the same as `run_name`."""
    group: Text | None = None
    """For `wandb.init`: the group that the run belongs to."""
    job_type: Text | None = None
    """For `wandb.init`: the kind of run within its group."""
    notes: Text | None = None
    """For `wandb.init`: a longer description."""
    dir: Text | None = None
    """For `wandb.init`: the folder for its local files."""
    id: Text | None = None
    """For `wandb.init`: the run's unique id, needed to resume it."""
    mode: WandbMode | None = None
    """For `wandb.init`: whether it talks to the server; a bare `off` means disabled."""
    resume: Switch | Literal["allow", "never", "must", "auto"] | None = None
    """For `wandb.init`: whether a run with the same id is continued."""
    resume_from: Text | None = None
    """For `wandb.init`: the run and step to go on from."""
    fork_from: Text | None = None
    """For `wandb.init`: the run and step to branch off from."""
    reinit: Switch | Literal["default", "return_previous", "finish_previous", "create_new"] | None = None
    """For `wandb.init`: what happens to a run that is already active."""
    force: Switch | None = None
    """For `wandb.init`: stop when the user is not logged in."""
    save_code: Switch | None = None
    """For `wandb.init`: keep a copy of the main script."""
    sync_tensorboard: Switch | None = None
    """For `wandb.init`: copy TensorBoard's logs too."""
    monitor_gym: Switch | None = None
    """For `wandb.init`: record videos of gym environments."""
    allow_val_change: Switch | None = None
    """For `wandb.init`: let config values change later."""
    config: Values | None = None
    """For `wandb.init`: values to show as the run's config."""
    config_include_keys: Texts | None = None
    """For `wandb.init`: the config keys to keep."""
    config_exclude_keys: Texts | None = None
    """For `wandb.init`: the config keys to leave out."""
    settings: Values | None = None
    """For `wandb.init`: its own further settings."""

    @model_validator(mode="after")
    def _refuse_two_names(self) -> Wandb:
        if self.run_name and self.name and self.run_name != self.name:
            raise ValueError("run_name and name differ but mean the same (keep one of them)")
        return self

    def init_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `wandb.init`: only what was written, under its names."""
        own = {"enabled", "run_name", "log_dataset_metrics", "reduced_logging"}
        arguments = {name: getattr(self, name) for name in self.model_fields_set - own}
        return {**arguments, "name": self.run_name} if self.run_name else arguments


class Tensorboard(SinkSection):
    """TensorBoard event files."""


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


class Training(SharedSection):
    """The trainer's own section, of which flopmeter reads one key."""

    guarded: ClassVar[tuple[str, ...]] = ("logging_steps",)

    logging_steps: Steps = 1
    """Send basic metrics (loss, learning rate, epoch) every so many steps."""

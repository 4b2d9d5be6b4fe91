"""What did the user ask for? Every dialect of settings ends as one `MonitorConfig`.

    config = MonitorConfig.load("train.yaml")         # or a preset such as "smart", a mapping, None for the defaults
    config.monitoring.mfu_calculation_mode            # "smart"
    config.measuring_interval(phase="warmup").steps   # 1000

A whole training config may be handed over: sections that are not flopmeter's are left alone. Whatever is wrong in ours
is a `ConfigError` of one line that names the setting's full path, its value, and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import ValidationError

from flopmeter.config.refusals import refusal, shown
from flopmeter.config.sections import (
    Monitor,
    Monitoring,
    PhaseFrequency,
    Prometheus,
    Section,
    SharedSection,
    SinkSection,
    Tensorboard,
    Training,
    Wandb,
)
from flopmeter.config.yaml_file import read_yaml
from flopmeter.errors import ConfigError, did_you_mean

__all__ = ["MeasuringInterval", "MonitorConfig", "preset_paths"]

_PERFORMANCE = "monitoring.performance_monitoring"
_RECALIBRATION = f"{_PERFORMANCE}.smart_mode.recalibration_frequency"
_FREQUENCIES = (
    "monitoring.flops_profile_freq",
    "monitor.freq.flops_profile_freq",
    f"{_PERFORMANCE}.measure_flops_frequency",
)
_REDUCED_DETAIL_STEPS = 100


class MeasuringInterval(NamedTuple):
    """How often FLOPs are measured, and who said so."""

    steps: int
    """Steps from one measurement to the next; 0 = never again after the first."""
    setting: str | None
    """The setting or argument that somebody wrote, by its path; None where a default applies."""

    @property
    def is_explicit(self) -> bool:
        """In profiler mode, an interval that somebody asked for is stronger than the overhead budget."""
        return self.setting is not None


class MonitorConfig(SharedSection):
    """All settings. Sections that are not listed here belong to somebody else and are left alone."""

    guarded: ClassVar[tuple[str, ...]] = ("monitoring", "wandb", "tensorboard", "prometheus")

    monitoring: Monitoring = Monitoring()
    monitor: Monitor = Monitor()
    wandb: Wandb = Wandb()
    tensorboard: Tensorboard = Tensorboard()
    prometheus: Prometheus = Prometheus()
    training: Training = Training()

    def __init__(self, /, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(refusal(error, MonitorConfig)) from None

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | MonitorConfig | None = None) -> MonitorConfig:
        """Settings from a YAML file, a preset's name, a mapping, or None for the defaults.

        A bare preset name such as "smart" always means the preset; a file of that name is "./smart".
        """
        if isinstance(source, MonitorConfig):
            return source
        if source is None or isinstance(source, Mapping):
            return cls._from_mapping(source or {})
        if isinstance(source, (str, os.PathLike)):
            return cls._from_file(os.path.expanduser(os.fsdecode(source)))
        raise ConfigError(f"config: expected a YAML file, a preset, a mapping or a MonitorConfig, not {shown(source)}")

    @classmethod
    def _from_mapping(cls, sections: Mapping[Any, Any]) -> MonitorConfig:
        for key in sections:
            if not isinstance(key, str):
                raise ConfigError(f"the key {shown(key)} at the top level is not text; a section's name is")
        return cls(**sections)

    @classmethod
    def _from_file(cls, name: str) -> MonitorConfig:
        presets = preset_paths()
        if name not in presets and not os.path.lexists(name):
            raise ConfigError(
                f"{shown(name, 200)}: no such file and no such preset: {did_you_mean(name[:200], presets)}"
            )
        try:
            return cls._from_mapping(read_yaml(presets.get(name) or Path(name)))
        except ConfigError as error:
            raise ConfigError(f"{shown(name, 200)}: {error}") from None

    def measuring_interval(self, *, argument: int | None = None, phase: str | None = None) -> MeasuringInterval:
        """The steps between two measurements of FLOPs, and the setting that decides.

        The first that was written wins: the phase's frequency once a phase is set (its default counts too); the
        argument; in smart mode `recalibration_frequency`; `monitoring.flops_profile_freq`; `monitor.freq`;
        `measure_flops_frequency`. With none written it is 1000 in smart mode, else 500. Estimate mode never measures.

        Args:
            argument: `flops_profile_freq` as given to the monitor's constructor.
            phase: as last given to `set_training_phase`.
        """
        asked = _checked_frequency(argument)
        phase_path = None if phase is None else _phase_path(phase)
        mode = self.monitoring.mfu_calculation_mode
        if mode == "estimate":
            return MeasuringInterval(0, None)
        if phase_path:
            return self._interval_of(phase_path)
        if asked is not None:
            return MeasuringInterval(asked, "the argument flops_profile_freq")
        candidates = [_RECALIBRATION, *_FREQUENCIES] if mode == "smart" else list(_FREQUENCIES)
        default = _RECALIBRATION if mode == "smart" else _FREQUENCIES[-1]
        return self._interval_of(next(filter(self._is_written, candidates), default))

    def _interval_of(self, path: str) -> MeasuringInterval:
        section, name = self._find(path)
        return MeasuringInterval(getattr(section, name), path if self._is_written(path) else None)

    def _is_written(self, path: str) -> bool:
        section, name = self._find(path)
        return name in section.model_fields_set

    def _find(self, path: str) -> tuple[Section, str]:
        *sections, name = path.split(".")
        return reduce(getattr, sections, self), name

    @property
    def basic_every(self) -> int:
        """Steps between basic metrics in the sinks: `logging_steps`, doubled by `reduced_logging`."""
        return self.training.logging_steps * (2 if self.wandb.reduced_logging else 1)

    @property
    def has_explicit_logging_steps(self) -> bool:
        """Whether somebody asked for this very rate: then the sinks get it, whatever it costs."""
        return "logging_steps" in self.training.model_fields_set

    @property
    def details_every(self) -> int:
        """Steps between details in the sinks: `detail_every`, at least 100 with `reduced_logging`."""
        every = self.monitoring.detail_every
        return max(every, _REDUCED_DETAIL_STEPS) if self.wandb.reduced_logging else every

    @property
    def sink_names(self) -> tuple[str, ...]:
        """The sinks to open, each once: those listed, then those that their own section enables."""
        enabled = [name for name, section in self if isinstance(section, SinkSection) and section.enabled]
        return tuple(dict.fromkeys([*self.monitoring.sinks, *enabled]))


def preset_paths() -> dict[str, Path]:
    """The settings files that ship with flopmeter, by name."""
    package = Path(__file__).resolve().parents[1]
    homes = (package / "configs", package.parents[1] / "configs")  # in a wheel; in a checkout
    home = next((home for home in homes if home.is_dir()), homes[0])
    return {path.stem: path for path in sorted(home.glob("*.yaml"))}


def _checked_frequency(argument: Any) -> int | None:
    try:
        return Monitoring(flops_profile_freq=argument).flops_profile_freq
    except ValidationError as error:
        raise ConfigError(refusal(error, Monitoring)) from None


def _phase_path(phase: str) -> str:
    names = list(PhaseFrequency.model_fields)
    if phase not in names:
        raise ConfigError(f"training phase: {shown(phase)} is not allowed (expected {', '.join(names)})")
    return f"{_PERFORMANCE}.phase_frequency.{phase}"

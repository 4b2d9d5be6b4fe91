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
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from flopmeter.config.reading import read_settings, read_yaml, settings_of, shown
from flopmeter.config.sections import Monitoring, PhaseFrequency, Settings, SinkSection
from flopmeter.errors import ConfigError, did_you_mean

__all__ = ["MeasuringInterval", "MonitorConfig", "preset_paths"]

SOURCES = "a YAML file, a preset, a mapping or a MonitorConfig"
_PERFORMANCE = "monitoring.performance_monitoring"
_RECALIBRATION = f"{_PERFORMANCE}.smart_mode.recalibration_frequency"
_FREQUENCIES = (
    "monitoring.flops_profile_freq",
    "monitor.freq.flops_profile_freq",
    f"{_PERFORMANCE}.measure_flops_frequency",
)


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


class MonitorConfig(Settings):
    """All settings, and which of them somebody wrote. Cannot be changed."""

    def __init__(self, /, **sections: Mapping[str, Any]) -> None:
        self._read(sections)

    def _read(self, sections: Mapping[Any, Any]) -> None:
        values, written = read_settings(MonitorConfig, sections)
        vars(self).update(values, _written=written)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | MonitorConfig | None = None) -> MonitorConfig:
        """Settings from a YAML file, a preset's name, a mapping, or None for the defaults.

        A bare preset name such as "smart" always means the preset; a file of that name is "./smart".
        """
        if isinstance(source, MonitorConfig):
            return source
        config = cls()
        if source is None:
            return config
        if isinstance(source, Mapping):
            config._read(source)
        elif isinstance(source, (str, os.PathLike)):
            name, presets = os.path.expanduser(os.fsdecode(source)), preset_paths()
            if name not in presets and not os.path.lexists(name):
                nearest = did_you_mean(name[:200], presets)
                raise ConfigError(f"{shown(name, 200)}: no such file and no such preset: {nearest}")
            try:
                config._read(read_yaml(presets.get(name) or Path(name)))
            except ConfigError as error:
                raise ConfigError(f"{shown(name, 200)}: {error}") from None
        else:
            raise ConfigError(f"config: expected {SOURCES}, not {shown(source)}")
        return config

    def is_written(self, path: str) -> bool:
        """Whether somebody wrote this setting, be it with the default's value."""
        return path in vars(self)["_written"]

    def as_written(self) -> dict[str, Any]:
        """All that was written in our sections, as `load` takes it."""
        tree: dict[str, Any] = {}
        for path, value in vars(self)["_written"].items():
            *sections, name = path.split(".", 1) if path.startswith("wandb.") else path.split(".")
            reduce(lambda section, key: section.setdefault(key, {}), sections, tree)[name] = value
        return tree

    def measuring_interval(self, *, argument: int | None = None, phase: str | None = None) -> MeasuringInterval:
        """The steps between two measurements of FLOPs, and the setting that decides.

        The first that was written wins: the phase's frequency once a phase is set (its default counts too); the
        argument; in smart mode `recalibration_frequency`; `monitoring.flops_profile_freq`; `monitor.freq`;
        `measure_flops_frequency`. With none written it is 1000 in smart mode, else 500. Estimate mode never measures.

        Args:
            argument: `flops_profile_freq` as given to the monitor's constructor.
            phase: as last given to `set_training_phase`.
        """
        asked = read_settings(Monitoring, {"flops_profile_freq": argument})[0].get("flops_profile_freq")
        known = list(settings_of(PhaseFrequency))
        if phase is not None and phase not in known:
            raise ConfigError(f"training phase: {shown(phase)} is not allowed (expected {', '.join(known)})")
        mode = self.monitoring.mfu_calculation_mode
        if mode == "estimate":
            return MeasuringInterval(0, None)
        if phase is None and asked is not None:
            return MeasuringInterval(asked, "the argument flops_profile_freq")
        candidates = [_RECALIBRATION, *_FREQUENCIES] if mode == "smart" else list(_FREQUENCIES)
        if phase is not None:
            candidates = [f"{_PERFORMANCE}.phase_frequency.{phase}"]
        default = candidates[-1] if mode != "smart" else candidates[0]
        path = next(filter(self.is_written, candidates), default)
        return MeasuringInterval(attrgetter(path)(self), path if self.is_written(path) else None)

    @property
    def sink_names(self) -> tuple[str, ...]:
        """The sinks to open, each once: those listed, then those that their own section enables."""
        sections = {name: getattr(self, name) for name in settings_of(MonitorConfig)}
        enabled = [name for name, section in sections.items() if isinstance(section, SinkSection) and section.enabled]
        return tuple(dict.fromkeys([*self.monitoring.sinks, *enabled]))


def preset_paths() -> dict[str, Path]:
    """The settings files that ship with flopmeter, by name."""
    package = Path(__file__).resolve().parents[1]
    homes = (package / "configs", package.parents[1] / "configs")  # in a wheel; in a checkout
    home = next((home for home in homes if home.is_dir()), homes[0])
    return {path.stem: path for path in sorted(home.glob("*.yaml"))}

"""What does the settings page say? It is made from the settings themselves:

python -m flopmeter.config > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flopmeter.config import MonitorConfig, preset_paths
from flopmeter.config.refusals import expected, section_of, shown

_INTRODUCTION = """\
# Settings

Made by `python -m flopmeter.config > docs/settings.md`; change the descriptions in `src/flopmeter/config/sections.py`.

`TrainingMonitor(..., config=...)` takes a path to a YAML file, the name of a preset, a dict, or nothing for the
defaults. A whole training config may be handed over: sections that are not listed here are left alone.

- An unknown key in one of the sections below is refused, with the setting that was probably meant.
- `training` is the trainer's own section, so other keys there are left alone. Only what looks like a slip in
  `logging_steps` (`loging_steps`) is refused, and only while `logging_steps` itself is absent. The same holds for a
  top-level section whose name is one slip away from `monitoring`, `wandb`, `tensorboard` or `prometheus`.
- A setting written as `null` counts as not written, and so does an empty section.
- `wandb: true` is short for `wandb: {enabled: true}`; so are `tensorboard: true` and `prometheus: true`.
- `989e12` is text in YAML 1.1; wherever a number is expected, such text is read as the number.
- A file that is empty, is not UTF-8, is larger than 1 MB, gives a key twice, or holds a tag is refused.

## How often FLOPs are measured

The first of these that was written decides:

1. after `set_training_phase`: that phase's `phase_frequency`, written or not;
2. the constructor's argument `flops_profile_freq`;
3. in smart mode: `smart_mode.recalibration_frequency`;
4. `monitoring.flops_profile_freq`;
5. `monitor.freq.flops_profile_freq`;
6. `measure_flops_frequency`;
7. the default: 1000 steps in smart mode, 500 in the others.

In profiler mode a frequency that somebody wrote is stronger than `overhead_budget`. Estimate mode never measures.
"""


def settings_page() -> str:
    """The Markdown page that lists every preset and every setting: what it does, its default, what is allowed."""
    return "\n".join([_INTRODUCTION, *_preset_lines(), *_section_lines(MonitorConfig, "")])


def _preset_lines() -> Iterator[str]:
    yield from ("## Presets", "", "| Preset | What it is for |", "|---|---|")
    for name, path in preset_paths().items():
        yield f"| `{name}` | {_first_comment(path)} |"
    yield ""


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _section_lines(model: type[BaseModel], prefix: str) -> Iterator[str]:
    settings = {name: field for name, field in model.model_fields.items() if not section_of(field)}
    if settings:
        yield from ("| Setting | Default | Allowed | What it does |", "|---|---|---|---|")
        yield from (
            f"| `{prefix}{name}` | {_default(field)} | {expected(field)} | {_description(field)} |"
            for name, field in settings.items()
        )
        yield ""
    for name, field in model.model_fields.items():
        if section := section_of(field):
            yield from (f"## {prefix}{name}", "", section.__doc__ or "", "")
            yield from _section_lines(section, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, tuple):
        return f"`[{', '.join(default)}]`"
    if default is None:
        return "not given"
    return f"`{default}`" if isinstance(default, str) else f"`{shown(default)}`"


def _description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    print(settings_page())

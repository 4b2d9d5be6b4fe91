"""What does the settings page say? It is made from the settings themselves:

python scripts/write_settings.py > docs/settings.md
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from flopmeter.config import MonitorConfig, preset_paths, sections
from flopmeter.config.reading import Section, allowed, settings_of, shown

INTRODUCTION = """\
# Settings

Made by `python scripts/write_settings.py > docs/settings.md`; change the descriptions in
`src/flopmeter/config/sections.py`.

`TrainingMonitor(..., config=...)` takes a path to a YAML file, the name of a preset, a dict, or nothing for the
defaults. A whole training config may be handed over: sections that are not listed here are left alone.

- An unknown key in one of the sections below is refused, with the setting that was probably meant.
- `training` is the trainer's own section, so other keys there are left alone, and other keys in `wandb` go to
  `wandb.init`. Only what looks like a slip in a key of ours (`loging_steps`) is refused, and only while that key itself
  is absent. The same holds for a top-level section whose name is one slip away from one of ours.
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
    presets = ["## Presets", "", "| Preset | What it is for |", "|---|---|"]
    for name, path in preset_paths().items():
        presets.append(f"| `{name}` | {path.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')} |")
    return "\n".join([INTRODUCTION, *presets, "", *_section_lines(MonitorConfig, "")])


def descriptions() -> dict[tuple[str, str], str]:
    """The text under each field, by class and field."""
    found = {}
    for node in ast.parse(inspect.getsource(sections)).body:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    name, text = ast.unparse(field.target), ast.literal_eval(below.value)
                    found[node.name, name] = " ".join(text.split())
    return found


def _section_lines(section: type[Section], prefix: str) -> Iterator[str]:
    known, texts = settings_of(section), descriptions()
    settings = {name: kind for name, kind in known.items() if not isinstance(kind, type)}
    if settings:
        yield from ("| Setting | Default | Allowed | What it does |", "|---|---|---|---|")
        for name, kind in settings.items():
            owner = next(heir.__name__ for heir in section.__mro__ if name in heir.__annotations__)
            yield f"| `{prefix}{name}` | {_default(getattr(section, name))} | {allowed(kind)} | {texts[owner, name]} |"
        yield ""
    for name, kind in known.items():
        if isinstance(kind, type):
            yield from (f"## {prefix}{name}", "", kind.__doc__ or "", "")
            yield from _section_lines(kind, f"{prefix}{name}.")


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if value is None:
        return "not given"
    return f"`{value}`" if isinstance(value, str) else f"`{shown(value)}`"


if __name__ == "__main__":
    print(settings_page())

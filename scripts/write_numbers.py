"""What does each number mean? The page is made from the schema:

python scripts/write_numbers.py > docs/numbers.md
"""

from __future__ import annotations

from flopmeter.schema import METRICS

_INTRODUCTION = """\
# Every number

Made by `python scripts/write_numbers.py > docs/numbers.md` from `src/flopmeter/schema.py`.

A logged `perf/*` value is the aggregate since the last one; the run file has every step, as it was measured, and
`load_run` derives these numbers of it: `load_run(...).derived({"bf16": 989e12})` with other peaks. Warm-up, observed
and profiled steps are recorded with a mark and left out of every aggregate. An unknown number is absent, never 0.
*Ranks* says how values of several ranks combine (Prometheus pages, run files by rank). The job's own run file has the
job's FLOPs, MFU, tokens and samples, and otherwise rank 0's values.
"""
_UNITS = {"": "", "1": "share, 0 to 1"}


def page() -> str:
    """The page as Markdown."""
    rows = [f"| `{m.key}` | {_UNITS.get(m.unit, m.unit)} | {m.ranks} | {m.meaning} |\n" for m in METRICS]
    return f"{_INTRODUCTION}\n| key | unit | ranks | meaning |\n|---|---|---|---|\n{''.join(rows)}"


if __name__ == "__main__":
    print(page(), end="")

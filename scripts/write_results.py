"""Which figures does the README show? Those of `benchmarks/results/`, put between its markers:

    python scripts/write_results.py            # rewrite README.md and README.zh-CN.md
    python scripts/write_results.py --check    # exit 1 when they say something else

A block begins with `<!-- results: NAME -->` and ends with `<!-- end of results -->`; what stands between is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
READMES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh-CN.md"}
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

COUNTERS = {
    "flopmeter": "**flopmeter**",
    "deepspeed": "DeepSpeed flops profiler",
    "FlopCounterMode": "torch FlopCounterMode",
    "profiler": "torch.profiler(with_flops)",
    "hf_6nd": "HF Trainer, 6ND",
    "6n": "6N",
}
VARIANTS = {
    "flopmeter estimate": ("flopmeter estimate", "flopmeter estimate"),
    "flopmeter smart": ("flopmeter smart, measured steps included", "flopmeter smart（含被测步）"),
    "flopmeter profiler": ("flopmeter profiler, every 50 steps", "flopmeter profiler，每 50 步一次"),
    "flopmeter hybrid": ("flopmeter hybrid", "flopmeter hybrid"),
    "Lightning Throughput": ("Lightning Throughput", "Lightning Throughput"),
    "before": ("the loop of old", "旧式循环"),
    "torch.profiler scheduled": ("torch.profiler, one step in ten", "torch.profiler，每十步一步"),
    "FlopCounterMode every step": ("FlopCounterMode at every step", "每步 FlopCounterMode"),
}


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers."""
    heads = list(headings)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in map(list, lines))


def load(name: str) -> dict[str, Any]:
    """The result file of one benchmark."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def accuracy(language: str) -> str:
    """How many of the rows each counter gets right."""
    summary, num_rows = load("flop_accuracy")["summary"], len(load("flop_accuracy")["rows"])
    heads = {
        "en": ("counter", f"forward right, of {num_rows}", f"training right, of {num_rows}"),
        "zh": ("计数器", f"前向正确（共 {num_rows}）", f"训练正确（共 {num_rows}）"),
    }
    rows = [(COUNTERS.get(name, name), *_right(found)) for name, found in summary.items()]
    rows.sort(key=lambda row: (-int(row[1]), -int(row[2])))
    return table(heads[language], rows)


def _right(found: dict[str, Any]) -> tuple[str, str]:
    """Rows within half a percent, attention in full: the only convention that all counters know."""
    forward, training = (str(found[f"full {name}"]["within 0.5%"]) for name in ("forward_flop", "model_flop"))
    return forward, training


def overhead(language: str) -> str:
    """What each way to measure adds to a small GPT's step."""
    found = load("overhead")["variants"]
    place = 0 if language == "en" else 1
    heads = {
        "en": ("variant", "steps", "overhead", "steps/s", "MFU", "ms per measured step", "extra memory", "FLOP error"),
        "zh": ("方式", "步数", "开销", "步/秒", "MFU", "每个被测步毫秒", "额外内存", "FLOP 误差"),
    }
    rows = [
        (
            names[place],
            f"{found[key]['steps']}",
            f"{found[key]['overhead_percent']:.2f} ± {found[key]['error_percent']:.2f} %",
            f"{found[key]['steps_per_s']:.1f}",
            _or_dash(found[key].get("median_mfu"), "{:.1%}"),
            _or_dash(found[key]["ms_per_measurement"], "{:.0f}"),
            _or_dash(found[key]["extra_memory_mb"], "{:.0f} MB"),
            _or_dash(found[key].get("flop_error"), "{:.2%}"),
        )
        for key, names in VARIANTS.items()
        if key in found
    ]
    return table(heads[language], rows)


def tiny(language: str) -> str:
    """CPU that a steady step costs, in microseconds."""
    heads = {
        "en": ("microseconds a step", "training thread", "whole process", "wall"),
        "zh": ("每步微秒", "训练线程", "整个进程", "墙钟"),
    }
    keys = ("thread_us", "process_us", "wall_us")
    rows = [
        (name, *(f"{cost[f'added_{key}']:.0f} ± {cost[f'error_{key}']:.0f}" for key in keys))
        for name, cost in load("overhead")["tiny"].items()
    ]
    return table(heads[language], rows)


def planted(language: str) -> str:
    """Planted causes, and what the first verdict was."""
    found = load("planted")
    verdicts: dict[str, dict[str, int]] = {}
    for outcome in found["outcomes"]:
        if len(outcome["planted"]) == 1:
            (name,) = outcome["planted"]
            row = verdicts.setdefault(name, {})
            row[outcome["verdict"] or "failed"] = row.get(outcome["verdict"] or "failed", 0) + 1
    heads = {
        "en": ("planted", "first verdict (runs)", "predicted / real gain"),
        "zh": ("植入的原因", "首个诊断（次数）", "预测收益 / 实际收益"),
    }
    rows = []
    for name, row in verdicts.items():
        said = ", ".join(f"{verdict} {num}" for verdict, num in sorted(row.items(), key=lambda item: -item[1]))
        ratio = found["gains"].get(name, {}).get("predicted_over_real")
        rows.append((name, said, _or_dash(ratio, "{:.2f}")))
    return table(heads[language], rows)


def traces(language: str) -> str:
    """Traces against HolisticTraceAnalysis."""
    heads = {
        "en": ("trace", "flopmeter, s", "HTA, s", "flopmeter, MB", "HTA, MB", "shares differ by", "MFU"),
        "zh": ("trace", "flopmeter 秒", "HTA 秒", "flopmeter MB", "HTA MB", "占比差异", "MFU"),
    }
    rows = [
        (
            result["file"],
            *(f"{result['process_s'][who]:.2f}" for who in ("ours", "hta")),
            *(f"{result['rss_mb'][who]:.0f}" for who in ("ours", "hta")),
            f"{result['difference']:.2%}",
            _or_dash(result["mfu"], "{:.2%}"),
        )
        for result in load("traces")["files"]
    ]
    return table(heads[language], rows)


def report(language: str) -> str:
    """What a report of a long run costs."""
    heads = {
        "en": ("steps, ranks", "seconds", "peak memory", "page"),
        "zh": ("步数，rank 数", "秒", "内存峰值", "页面"),
    }
    rows = [
        (
            f"{result['num_steps']:,}, {result['num_ranks']:,}",
            f"{result['report_s']:.1f}",
            f"{result['peak_rss_mb']:.0f} MB",
            f"{result['page_mb']:.1f} MB",
        )
        for result in load("report")["results"]
    ]
    return table(heads[language], rows)


TABLES: dict[str, Callable[[str], str]] = {
    "accuracy": accuracy, "overhead": overhead, "tiny": tiny, "planted": planted, "traces": traces, "report": report,
}  # fmt: skip


def _or_dash(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def rewritten(text: str, language: str) -> str:
    """A README with its tables made anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]](language) + block[3], text)


def main() -> int:
    """Rewrite, or compare."""
    texts = {path: rewritten(path.read_text("utf-8"), language) for language, path in READMES.items()}
    stale = [path.name for path, text in texts.items() if text != path.read_text("utf-8")]
    if "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}" if stale else "the READMEs show the results on file")
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"rewritten: {', '.join(stale) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which figures do the READMEs and docs/results.md show? Those of `benchmarks/results/`, put between markers:

    python scripts/write_results.py            # rewrite them
    python scripts/write_results.py --check    # exit 1 when they say something else

A block begins with `<!-- results: NAME -->` and ends with `<!-- end of results -->`; what stands between is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    ROOT / "README.md": "en", ROOT / "README.zh-CN.md": "zh",
    ROOT / "docs" / "results.md": "en", ROOT / "docs" / "modes.md": "en",
}  # fmt: skip
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
    "baseline": "a plain loop against itself",
    "flopmeter estimate": "flopmeter estimate",
    "flopmeter smart": "flopmeter smart, measured steps included",
    "flopmeter profiler": "flopmeter profiler, every 50 steps",
    "flopmeter hybrid": "flopmeter hybrid",
    "Lightning Throughput": "Lightning Throughput",
    "before": "a naive loop",
    "torch.profiler scheduled": "torch.profiler, one step in ten",
    "FlopCounterMode every step": "FlopCounterMode at every step",
}
WAYS = {
    "by_hand": "`TrainingMonitor` by hand",
    "run": "`flopmeter run`",
    "transformers": "callback of the Hugging Face Trainer",
    "lightning": "Lightning callback",
    "accelerate": "`watch(accelerator=...)`",
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


def accuracy(_: str) -> str:
    """How many of the rows each counter gets right."""
    summary, num_rows = load("flop_accuracy")["summary"], len(load("flop_accuracy")["rows"])
    heads = ("counter", f"forward right, of {num_rows}", f"training right, of {num_rows}")
    rows = [(COUNTERS.get(name, name), *_right(found)) for name, found in summary.items()]
    rows.sort(key=lambda row: (-int(row[1]), -int(row[2])))
    return table(heads, rows)


def _right(found: dict[str, Any]) -> tuple[str, str]:
    """Rows within half a percent, attention in full: the only convention that all counters know."""
    forward, training = (str(found[f"full {name}"]["within 0.5%"]) for name in ("forward_flop", "model_flop"))
    return forward, training


def overhead(_: str) -> str:
    """What each way to measure adds to a small GPT's step."""
    found = load("overhead")["variants"]
    heads = ("variant", "steps", "overhead", "steps/s", "MFU", "ms per measured step", "extra memory", "FLOP error")
    rows = [
        (
            label,
            f"{found[key]['steps']}",
            f"{found[key]['overhead_percent']:.2f} ± {found[key]['error_percent']:.2f} %",
            f"{found[key]['steps_per_s']:.1f}",
            _or_dash(found[key].get("median_mfu"), "{:.1%}"),
            _or_dash(found[key]["ms_per_measurement"], "{:.0f}"),
            _or_dash(None if key == "baseline" else found[key]["extra_memory_mb"], "{:.0f} MB"),
            _or_dash(found[key].get("flop_error"), "{:.2%}"),
        )
        for key, label in VARIANTS.items()
        if key in found
    ]
    profiled_ms, step_ms = found["flopmeter profiler"]["ms_per_measurement"], found["baseline"]["median_step_ms"]
    shares = ", ".join(f"{every}: {profiled_ms / every / step_ms:.2%}" for every in (1, 10, 50, 100, 500))
    return table(heads, rows) + f"\nA profiled step every N steps costs {shares}.\n"


def tiny(_: str) -> str:
    """CPU that a steady step costs, in microseconds."""
    heads = ("microseconds a step", "training thread", "whole process", "wall", "called by itself")
    keys = ("thread_us", "process_us", "wall_us")
    rows = [
        (
            name,
            *(f"{cost[f'added_{key}']:.0f} ± {cost[f'error_{key}']:.0f}" for key in keys),
            _or_dash(cost.get("by_itself_us"), "{:.0f}"),
        )
        for name, cost in load("overhead")["tiny"].items()
    ]
    return table(heads, rows)


def planted(_: str) -> str:
    """Planted causes, and what the first verdict was."""
    found = load("planted")
    verdicts: dict[str, dict[str, int]] = {}
    for outcome in found["outcomes"]:
        if len(outcome["planted"]) == 1:
            (name,) = outcome["planted"]
            row = verdicts.setdefault(name, {})
            row[outcome["verdict"] or "failed"] = row.get(outcome["verdict"] or "failed", 0) + 1
    heads = ("planted", "first verdict (runs)", "predicted / real gain")
    rows = []
    for name, row in verdicts.items():
        said = ", ".join(f"{verdict} {num}" for verdict, num in sorted(row.items(), key=lambda item: -item[1]))
        ratio = found["gains"].get(name, {}).get("predicted_over_real")
        rows.append((name, said, _or_dash(ratio, "{:.2f}")))
    return table(heads, rows) + "\n" + _planted_summary(found)


def _planted_summary(found: dict[str, Any]) -> str:
    """The same in a sentence."""
    of = {key: tuple(value) for key, value in found.items() if isinstance(value, list) and key != "outcomes"}
    right, total = of["right"]
    line = (
        "First verdict right in {} of {} runs ({:.1%}; {} of {} on models that thresholds were not set on); false"
        " alarms in {} of {} healthy runs; with two faults at once, one of them named first in {} of {}; gain"
        " within 30 % for {} of {} plants. Of the short runs that were each fault's healthy twin, {} of {} were called"
        " something else than healthy. Every run lasted at least {:g} s.\n"
    )
    keys = ("right_where_not_tuned", "false_alarms", "right_pairs", "plants_with_right_gain", "twin_false_alarms")
    numbers = [number for key in keys for number in of[key]]
    return line.format(right, total, right / total, *numbers, found["seconds"])


def traces(_: str) -> str:
    """Traces against HolisticTraceAnalysis."""
    heads = ("trace", "flopmeter, s", "HTA, s", "flopmeter, MB", "HTA, MB", "shares differ by", "MFU")
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
    return table(heads, rows)


def report(_: str) -> str:
    """What a report of a long run costs."""
    heads = ("steps, ranks", "seconds", "peak memory", "page")
    rows = [
        (
            f"{result['num_steps']:,}, {result['num_ranks']:,}",
            f"{result['report_s']:.1f}",
            f"{result['peak_rss_mb']:.0f} MB",
            f"{result['page_mb']:.1f} MB",
        )
        for result in load("report")["results"]
    ]
    return table(heads, rows)


def counts(_: str) -> str:
    """Seconds to count a large model on shapes."""
    found = load("count_speed")["results"]
    heads = ("one training step of", "flopmeter, s", "FlopCounterMode, s", "memory")
    rows = [
        (
            model,
            f"{by['flopmeter']['count_s']:.1f}",
            _or_dash(by.get("FlopCounterMode", {}).get("count_s"), "{:.1f}"),
            f"{by['flopmeter']['peak_rss_mb']:.0f} MB",
        )
        for model, by in found.items()
    ]
    return table(heads, rows)


def published(_: str) -> str:
    """Published runs that the conventions give back."""
    found = load("published")
    line = (
        "Published: of {rows} runs, {recomputable} give all that a recomputation needs; {within} of them come out"
        " within 0.5 % of what their authors say, {disagreeing} ({share:.1%}) do not.\n"
    )
    return line.format(
        rows=found["rows"], recomputable=found["recomputable"], within=found["within_0.5_percent"],
        disagreeing=found["disagreeing"], share=found["disagreeing_share"],
    )  # fmt: skip


def ranks(_: str) -> str:
    """What rank statistics add to a step."""
    heads = (
        "ranks",
        "step",
        "added wall time",
        "CPU for it on rank 0",
        "exchange, output and training thread of rank 0, per 50 steps",
    )
    rows = [
        (
            str(row["ranks"]),
            f"{row['step_ms']:.0f} ms",
            f"{row['added_share'] * 100:.2f} ± {row['added_share_error'] * 100:.2f} %",
            f"{row['added_cpu_share_rank_0']:.2%}",
            " + ".join(f"{ms:.1f}" for ms in row["ms_per_interval_rank_0"].values()) + " ms",
        )
        for row in load("distributed")["measured"]
    ]
    return table(heads, rows)


def run_script(_: str) -> str:
    """What `flopmeter run` adds to a program."""
    found = load("run_script")
    heads = ("`flopmeter run` beside `python`", "more")
    rows = [(f"a step of {found['in_turns']['step_s'] * 1e3:.0f} ms", _more(found["in_turns"]))]
    for name, process in found["processes"].items():
        rows.append((f"`{name}`, another process, {found['num_sets']} times", _more(process)))
    watched = found["processes"]["flopmeter run"]
    rows += [
        (
            f"{watched['num_measured']} measured steps, spread over {watched['num_steps']}",
            f"{watched['measuring_s'] / watched['step_s']:.2%}",
        ),
        ("the first 20 steps together", f"{watched['start_s'] * 1e3:.0f} ms"),
    ]
    for name, times in found["start_up_s"].items():
        rows.append((f"start-up of {name}", f"{(times['flopmeter run'] - times['python']) * 1e3:.0f} ms"))
    return table(heads, rows)


def _more(found: Mapping[str, float]) -> str:
    return f"{found['more_s'] / found['step_s'] * 100:.2f} ± {found['error_s'] / found['step_s'] * 100:.2f} %"


def waterfall(_: str) -> str:
    """How much of a planted delay shows in its own part, and in any other."""
    found = load("waterfall")
    heads = ("planted in", "own part", "largest other")
    rows = [(name, f"{own:.3f}", f"{found['largest_other'][name]:.3f}") for name, own in found["own"].items()]
    return table(heads, rows)


def prediction(_: str) -> str:
    """How steps that were not measured are predicted, and which of them are marked as not known."""
    found = load("prediction")
    heads = ("model, sizes that vary", "shapes", "observed", "largest error", "of their sum", "not known")
    errors = "largest error of known steps", "total of known steps"
    rows = [
        (name, str(row["num_shapes"]), str(row["observed"]), *(_or_dash(row[key], "{:.2%}") for key in errors),
         f"{row['marked late']:.0%}") for name, row in found["rows"].items()
    ]  # fmt: skip
    return table(heads, rows)


def mutation(_: str) -> str:
    """How many planted errors in the source the tests catch."""
    found = load("mutation")
    heads = ("room", "caught", "of")
    rows = [(room, *map(str, numbers)) for room, numbers in found["by_room"].items()]
    rooms = table(heads, [*rows, ("all", *map(str, found["caught"]))])
    left = [f"- `{m['file']}`, line {m['line']}: `{m['was']}` became `{m['becomes']}`\n" for m in found["not_caught"]]
    return f"{rooms}\nSeed {found['seed']}. Not caught:\n\n{''.join(left) or '- none'}"


def wild(_: str) -> str:
    """What is said first about programs from elsewhere, and what is true."""
    found = load("wild")
    heads = (
        "program",
        "kind",
        "truth",
        "first verdict",
        "judged",
        "gain predicted / real",
        "MFU over hand",
        "same end, losses",
    )
    rows = []
    for row in found["rows"]:
        gains = " / ".join(_or_dash(row[key], "{:+.0%}") for key in ("predicted_gain", "real_gain"))
        name = f"{row['name']} `{row['commit']}`" + (" (fault put in)" if row["fault_put_in"] else "")
        same = ", ".join("yes" if row[key] else "no" for key in ("same_exit_code", "same_losses"))
        by_hand = _or_dash(row["mfu_over_hand"], "{:.3f}")
        rows.append((name, row["kind"], row["truth"], row["verdict"], row["judged"], gains, by_hand, same))

    def said(part: Mapping[str, Any]) -> str:
        shares = ", ".join(
            f"{name} {part[f'{name} %']:.0f} %" for name in ("right", "wrong", "undetermined") if "right %" in part
        )
        return f"{part['runs']} programs, {part.get('not judged', 0)} not judged; of the others: {shares or '-'}"

    parts = {"All": "all", "Chosen after the rules were frozen": "chosen_after", "With a fault put in": "faults_put_in"}
    lines = [f"- {name}: {said(found[key])}.\n" for name, key in parts.items()]
    right, total = found["mfu_right"]
    fair, promised = found["gain_right"]
    lines.append(
        f"- MFU within 2 % of a count by hand: {right} of {total}. Gain not promised too high: {fair} of {promised}.\n"
    )
    return table(heads, rows) + "\n" + "".join(lines)


def tried(_: str) -> str:
    """What was predicted of changes, what was measured, and what the best one then brought by hand."""
    found = load("tried")
    heads = ("program", "change", "predicted", "measured, with its interval", "by hand", "losses")
    rows = []
    for row in found["rows"]:
        for one in row["rows"]:
            gain, is_best = one["gain"], one["names"][0] == row["best"] and row.get("by_hand") is not None
            measured = one["outcome"]
            if gain:
                measured = f"{gain['expected']:+.0%} ({100 * gain['low']:.0f} to {100 * gain['high']:.0f})"
            hand = f"{row['by_hand']:+.0%}{'' if row['is_inside'] else ', outside'}" if is_best else "-"
            likely = _or_dash(one["predicted"] and one["predicted"]["expected"], "{:+.0%}")
            rows.append((row["name"], one["names"][0], likely, measured, hand, one["losses"]))
    inside, narrow, within = (found[key] for key in ("inside", "narrow", "prediction_ranges_right"))
    error = _or_dash(found["median_prediction_error"] and 100 * found["median_prediction_error"], "{:.0f}")
    return table(heads, rows) + (
        f"\n- The gain had by hand lies inside the stated interval for {inside[0]} of {inside[1]} programs.\n"
        f"- {narrow[0]} of {narrow[1]} intervals are within 5 points, or a quarter of the gain, on either side.\n"
        f"- Of {within[1]} measured gains {within[0]} lie in the predicted range; the median error of a prediction is "
        f"{error} points.\n"
    )


def integrations(_: str) -> str:
    """Whether every way to attach the monitor says the same."""
    rows = [
        (WAYS[name], str(way["steps"]), f"{way['mfu_over_clock']:.4f}", f"{way['model_flop'] / 1e9:.4f}")
        for name, way in load("integrations")["ways"].items()
    ]
    return table(("attached by", "steps", "MFU over an outside clock's", "GFLOP a step"), rows)


def soak(_: str) -> str:
    """What a long run leaves behind."""
    found = load("soak")
    counts = ("files", "threads")
    rows = [
        (
            name,
            f"{one['record']['num_steps']:,}",
            f"{one['rss_bytes_per_step']:.1f}",
            *(_both(one[key]) for key in counts),
        )
        for name, one in found["runs"].items()
    ]
    cycles = found["cycles"]
    rows.append((f"{cycles['num_cycles']} starts and stops", "-", "-", *(_both(cycles[key]) for key in counts)))
    return table(("run", "steps", "bytes of memory a step", "open files, early and late", "threads"), rows)


def _both(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def measuring(_: str) -> str:
    """What a measured step costs, by the kind of model."""
    rows = [
        (name.replace("_", " "), f"{case['plain_step_ms']:.0f} ms", f"{case['observed_ratio']:.2f}",
         f"{case['profiled_ratio']:.2f}", f"{case['stop_and_read_ms']:.0f} ms")
        for name, case in load("profiler_cost")["cases"].items()
    ]  # fmt: skip
    return table(
        ("model", "plain step", "observed, times that", "profiled, times that", "of it reading the profile"), rows
    )


def measured(_: str) -> str:
    """When each benchmark was run, and on which source."""
    files = sorted(path.stem for path in RESULTS.glob("*.json"))
    found = {name: load(name) for name in files}
    rows = [(f"`{name}.py`", one.get("date", "-"), f"`{one.get('source', '-')}`") for name, one in found.items()]
    return table(("benchmark", "date", "`src/`, by Git's name of the tree"), rows)


TRUST = {
    "en": (
        ("the question", "the answer", "how it was found"),
        (
            "Is the count right?",
            "{ours} of {rows} training steps within 0.5 % of hand formulas; the next best, {peer}, has {peers}",
            "[accuracy](docs/results.md#accuracy)",
        ),
        (
            "Does it give back published MFU?",
            "{within} of {of} runs within 0.5 % of what their authors say",
            "[published runs](docs/results.md#published-runs)",
        ),
        (
            "Is the first sentence right on programs that we did not write?",
            "of {programs} runs {right} right, {wrong} wrong, {undetermined} undetermined",
            "[programs from elsewhere](docs/results.md#programs-from-elsewhere)",
        ),
        (
            "Is a planted fault found?",
            "{planted[0]} of {planted[1]} first verdicts right; {alarms[0]} of {alarms[1]} healthy runs called faulty",
            "[planted causes](docs/results.md#planted-causes)",
        ),
        (
            "Do fixes bring what `try` measured?",
            "by hand inside the stated interval for {inside[0]} of {inside[1]} programs",
            "[changes that were tried](docs/results.md#changes-that-were-tried)",
        ),
        (
            "What does it cost?",
            "{smart:.1f} ± {error:.1f} % of a step of {step_ms:.0f} ms; at worst, where a step does next"
            " to nothing, {tiny:.0f} to {sinks:.0f} µs a step (TraceML: {traceml:.0f} µs)",
            "[overhead](docs/results.md#overhead)",
        ),
        ("Which torch?", "2.6 to 2.15", "[versions](docs/versions.md)"),
        (
            "Which GPUs?",
            "the CUDA path runs on torch's real CUDA build over a simulated H100; results from hardware are"
            " wanted: `make gpu-evidence`",
            "[GPUs](docs/gpus.md)",
        ),
    ),
    "zh": (
        ("问题", "结果", "依据"),
        (
            "计数准确吗？",
            "{rows} 个训练 step 中 {ours} 个与手写公式相差不到 0.5%；其次是 {peer}，{peers} 个",
            "[准确度](docs/results.md#accuracy)",
        ),
        (
            "能重现论文里的 MFU 吗？",
            "{of} 个可重算的运行中，{within} 个与作者所述相差不到 0.5%",
            "[已发表的运行](docs/results.md#published-runs)",
        ),
        (
            "对别人写的程序，第一句诊断对吗？",
            "{programs} 次运行：正确 {right}，错误 {wrong}，无法确定 {undetermined}",
            "[外部程序](docs/results.md#programs-from-elsewhere)",
        ),
        (
            "植入的故障能找到吗？",
            "{planted[1]} 次中 {planted[0]} 次首个诊断正确；{alarms[1]} 次健康运行中误报 {alarms[0]} 次",
            "[植入的故障](docs/results.md#planted-causes)",
        ),
        (
            "`try` 量出的收益可信吗？",
            "{inside[1]} 个程序中，{inside[0]} 个手工改动后的收益落在给出的区间内",
            "[实测的改动](docs/results.md#changes-that-were-tried)",
        ),
        (
            "开销多大？",
            "{step_ms:.0f} 毫秒的 step 增加 {smart:.1f} ± {error:.1f}%；最坏情况（几乎不计算的 step）"
            "每步 {tiny:.0f} 到 {sinks:.0f} 微秒（TraceML：{traceml:.0f} 微秒）",
            "[开销](docs/results.md#overhead)",
        ),
        ("支持哪些 torch？", "2.6 到 2.15", "[版本](docs/versions.md)"),
        (
            "支持哪些 GPU？",
            "CUDA 路径已在真正的 CUDA 版 torch 与模拟的 H100 上运行；欢迎提供真机结果：`make gpu-evidence`",
            "[GPU](docs/gpus.md)",
        ),
    ),
}
"""The README's table: a row for each thing that a reader may doubt."""


def trust(language: str) -> str:
    """The README's table, with the figures on file."""
    counted, published_, programs = load("flop_accuracy"), load("published"), load("wild")["all"]
    right = {name: _right(found)[1] for name, found in counted["summary"].items()}
    peer = max((name for name in right if name != "flopmeter"), key=lambda name: int(right[name]))
    costs, tiny_us = (
        load("overhead")["variants"],
        {name: row["added_thread_us"] for name, row in load("overhead")["tiny"].items()},
    )
    figures = {
        "rows": len(counted["rows"]), "ours": right["flopmeter"], "peer": COUNTERS.get(peer, peer),
        "peers": right[peer], "planted": load("planted")["right"], "alarms": load("planted")["false_alarms"],
        "within": published_["within_0.5_percent"], "of": published_["recomputable"], "programs": programs["runs"],
        **{name: f"{programs[f'{name} %']:.0f} %" for name in ("right", "wrong", "undetermined")},
        "inside": load("tried")["inside"],
        "smart": costs["flopmeter smart"]["overhead_percent"], "error": costs["flopmeter smart"]["error_percent"],
        "step_ms": costs["baseline"]["median_step_ms"], "tiny": tiny_us["flopmeter, no sinks"],
        "sinks": tiny_us["flopmeter, all sinks"], "traceml": tiny_us["TraceML"],
    }  # fmt: skip
    heads, *rows = ([cell.format(**figures) for cell in row] for row in TRUST[language])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * 3, *rows))


TABLES: dict[str, Callable[[str], str]] = {
    "accuracy": accuracy, "overhead": overhead, "tiny": tiny, "planted": planted, "traces": traces, "report": report,
    "counts": counts, "published": published, "ranks": ranks, "trust": trust, "waterfall": waterfall,
    "mutation": mutation, "run_script": run_script, "integrations": integrations, "tried": tried, "soak": soak,
    "measuring": measuring,
    "measured": measured, "prediction": prediction, "wild": wild,
}  # fmt: skip


def _or_dash(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def rewritten(text: str, language: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]](language) + block[3], text)


def main() -> int:
    """Rewrite, or compare."""
    texts = {path: rewritten(path.read_text("utf-8"), language) for path, language in PAGES.items()}
    stale = [path.name for path, text in texts.items() if text != path.read_text("utf-8")]
    if "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}" if stale else "the pages show the results on file")
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"rewritten: {', '.join(stale) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

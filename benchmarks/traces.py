"""Does `flopmeter report` agree with HolisticTraceAnalysis, and what does each of them cost?

    python benchmarks/traces.py FILE... [--repeats 3] [--short] [--hta-python PATH] [--record FILE]

Every file is read by both, in processes of their own, in turn, byte-compiled as pip leaves them. HTA gets a virtual
environment of its own, made in the user's cache folder at the first run, unless --hta-python names a Python that has
it; with "none" ours runs alone.

Definitions. HTA looks at one window for the whole file: from the start of the first kernel to the end of the last,
kernels launched in the last ProfilerStep left out. compute is the union of all kernels that are neither NCCL's nor
copies; idle is when nothing runs; the rest ("other") is copies and communication that no compute hides. overlap is the
share of NCCL's time during which compute runs. flopmeter looks at each step in a window of its own, the last one and
the host's time before the first kernel included, so its own shares differ a little. For the comparison it is asked for
HTA's window, and given HTA's rounding: HTA moves the start of each kernel up to a whole microsecond and its end down to
one, which shortens kernels of a few microseconds in traces that have fractions ("ours, their way"). HTA also takes
synchronisation records (category cuda_sync) for kernels; in these files that does not show.

Seconds are those of the analysis, of the whole process with its imports, and of CPU time (all threads, imports
included), which a busy machine disturbs less; memory is the peak of the process. The last line printed is JSON; the
exit code is 1 when a goal is missed: shares within a point, five times as fast, less memory.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import flopmeter
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
HTA_REQUIREMENT = "HolisticTraceAnalysis==0.5.0"
MIN_SPEED_UP = 5.0
MAX_DIFFERENCE = 0.01
"""Largest difference of a share under the same definition."""
LIMIT_S = 1200
SHARES = ("idle", "compute", "other", "overlap")

Result = dict[str, Any]

PEAK_MB = """
def peak_mb():  # ru_maxrss would hold what the parent had when it forked
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
"""

OURS = """
import json, sys, time
from flopmeter.flops.formulas import all_formulas
from flopmeter.traces import load_trace
all_formulas()
begin = time.perf_counter()
trace = load_trace(sys.argv[1])
trace.as_run()
seconds, rank = time.perf_counter() - begin, trace.ranks[0]
names = ("step_s", "idle_s", "compute_s", "communication_s", "exposed_communication_s", "copy_s")
total = {name: sum(getattr(step, name) for step in rank.times) for name in names}
flop = [dict(step.model) for step in rank.flops]
ideal_s = [rank.mfu(each, 1.0) for each in flop]
print(json.dumps({"analysis_s": seconds, "cpu_s": time.process_time(), "rss_mb": peak_mb(), "total": total,
                  "events": rank.num_events, "mfu_reason": rank.mfu_reason,
                  "mfu": None if rank.mfu_reason else sum(ideal_s) / total["step_s"],
                  "tflop_per_s": sum(sum(each.values()) for each in flop) / total["step_s"] / 1e12 or None}))
"""

HTA = """
import json, logging, math, sys, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
begin = time.perf_counter()
analyzer = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
split = analyzer.get_temporal_breakdown(visualize=False).iloc[0]
try:
    overlap = float(analyzer.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]) / 100
except Exception:
    overlap = math.nan
seconds = time.perf_counter() - begin
window = float(split["kernel_time(us)"])
print(json.dumps({"analysis_s": seconds, "cpu_s": time.process_time(), "idle": float(split["idle_time(us)"]) / window,
                  "compute": float(split["compute_time(us)"]) / window,
                  "other": float(split["non_compute_time(us)"]) / window, "rss_mb": peak_mb(),
                  "overlap": None if math.isnan(overlap) else overlap}))
"""


def run(python: str, code: str, file: Path) -> Result:
    """One analysis in a process of its own; `error` instead of numbers when it failed."""
    begin = time.perf_counter()
    command = [python, "-c", PEAK_MB + code, str(file.resolve())]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if answer.returncode:
        return {"error": (answer.stderr.strip().splitlines() or ["no message"])[-1]}
    return {**json.loads(answer.stdout.splitlines()[-1]), "process_s": time.perf_counter() - begin}


def their_way(file: Path) -> dict[str, float | None]:
    """Our reading of the file, asked for the window and the shares that HTA defines."""
    from flopmeter.profiling.recorded import Activity, segments
    from flopmeter.traces.rank import read_timeline

    timeline, _, _ = read_timeline(file)
    events = timeline.device_events
    limit_us = max((start for start, _, _ in timeline.steps.values()), default=math.inf)
    if len(timeline.steps) < 2:  # HTA then keeps everything
        kept = list(range(len(events)))
    else:
        launches = (timeline.launches.get(correlation, (math.inf, -1))[0] for correlation in events.correlation)
        kept = [position for position, launch_us in enumerate(launches) if launch_us < limit_us]
    starts, ends = [math.ceil(events.start_us[i]) for i in kept], [math.floor(events.end_us[i]) for i in kept]
    works = [events.activity[i] for i in kept]
    window = {"idle": 0.0, "compute": 0.0, "communication": 0.0, "exposed": 0.0}
    for segment in segments(starts, ends, works, (min(starts), max(ends))):
        length = segment.end - segment.start
        window["idle"] += length * (segment.activity == Activity.IDLE)
        window["compute"] += length * (segment.activity == Activity.OTHER_COMPUTE)
        window["communication"] += length * segment.is_communicating
        window["exposed"] += length * (segment.activity == Activity.COMMUNICATION)
    whole = max(ends) - min(starts)
    idle, compute = window["idle"] / whole, window["compute"] / whole
    hidden = window["communication"] - window["exposed"]
    overlap = hidden / window["communication"] if window["communication"] else None
    return {"idle": idle, "compute": compute, "other": 1 - idle - compute, "overlap": overlap}


def our_way(total: dict[str, float]) -> dict[str, float | None]:
    """The shares of all steps, as `flopmeter report` prints them."""
    hidden_s = total["communication_s"] - total["exposed_communication_s"]
    return {
        "idle": total["idle_s"] / total["step_s"],
        "compute": total["compute_s"] / total["step_s"],
        "other": (total["exposed_communication_s"] + total["copy_s"]) / total["step_s"],
        "overlap": hidden_s / total["communication_s"] if total["communication_s"] else None,
    }


def compare(file: Path, hta_python: str, repeats: int) -> Result:
    """Run both in turn and put the results side by side."""
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(run(sys.executable, OURS, file))
        theirs += [] if hta_python == "none" else [run(hta_python, HTA, file)]
    result: Result = {"file": file.name, "bytes": file.stat().st_size}
    failures = [answer["error"] for answer in (*ours, *theirs) if "error" in answer]
    if failures:
        return {**result, "error": failures[0]}
    for key in ("analysis_s", "process_s", "cpu_s", "rss_mb"):
        values = [statistics.median(answer[key] for answer in answers) for answers in (ours, theirs or ours)]
        result[key] = {"ours": values[0], "hta": values[1], "ratio": values[1] / values[0]} if theirs else values[0]
    result |= {name: ours[0][name] for name in ("events", "tflop_per_s", "mfu", "mfu_reason")}
    result["shares"] = {
        "hta": {name: theirs[0][name] if theirs else None for name in SHARES},
        "ours, their way": their_way(file),
        "ours": our_way(ours[0]["total"]),
    }
    result["difference"] = _difference(result["shares"])
    return result


def _difference(shares: dict[str, dict[str, float | None]]) -> float:
    pairs = [(shares["hta"][name], shares["ours, their way"][name]) for name in SHARES]
    known = [abs(theirs - ours) for theirs, ours in pairs if theirs is not None and ours is not None]
    return max(known, default=0.0)


def hta_environment() -> str:
    """A Python that has HTA, made at the first call and kept in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flopmeter" / "hta"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making {folder} for {HTA_REQUIREMENT} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
    probe = [str(python), "-c", "import hta.trace_analysis"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", HTA_REQUIREMENT], check=True)
    return str(python)


def show(result: Result) -> None:
    """One file in a few lines."""
    print(f"\n{result['file']} ({result['bytes'] / 1e6:.2f} MB)")
    if "error" in result:
        print(f"  failed: {result['error']}")
        return
    for name, shares in result["shares"].items():
        cells = (f"{key} {'-' if (share := shares[key]) is None else f'{share:.1%}'}" for key in SHARES)
        print(f"  {name:16} " + "  ".join(cells))
    for key, unit in (("analysis_s", "s"), ("process_s", "s"), ("cpu_s", "s"), ("rss_mb", "MB")):
        row = result[key]
        print(
            f"  {key:16} ours {row['ours']:.3g} {unit}  HTA {row['hta']:.3g} {unit}  ratio {row['ratio']:.1f}"
            if isinstance(row, dict)
            else f"  {key:16} ours {row:.3g} {unit}"
        )
    speed = "-" if result["tflop_per_s"] is None else f"{result['tflop_per_s']:.4g} TFLOP/s"
    mfu = f"MFU unknown: {result['mfu_reason']}" if result["mfu"] is None else f"MFU {result['mfu']:.2%}"
    print(f"  {speed}; {mfu}")


def missed(result: Result) -> list[str]:
    """Goals that this file misses."""
    if "error" in result:
        return [f"{result['file']}: {result['error']}"]
    found: list[str] = []
    if not isinstance(result["rss_mb"], dict):
        return found
    if result["difference"] > MAX_DIFFERENCE:
        found.append(f"{result['file']}: shares differ by {result['difference']:.1%}")
    for key in ("analysis_s", "process_s"):
        if result[key]["ratio"] < MIN_SPEED_UP:
            found.append(f"{result['file']}: {key} only {result[key]['ratio']:.1f} times HTA's")
    if result["rss_mb"]["ratio"] <= 1:
        found.append(f"{result['file']}: more memory than HTA")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="one repeat of the smallest file, for CI")
    parser.add_argument("--hta-python", help="a Python that has HTA")
    add_record_option(parser)
    options = parser.parse_args()
    compileall.compile_dir(Path(flopmeter.__file__).parent, quiet=1)
    files = sorted(options.files, key=lambda file: file.stat().st_size)
    files, repeats = (files[:1], 1) if options.short else (files, options.repeats)
    hta_python = options.hta_python or hta_environment()
    results = []
    for file in files:
        results.append(compare(file, hta_python, repeats))
        show(results[-1])
    failures = [failure for result in results for failure in missed(result)]
    print("\n" + ("\n".join(f"missed: {failure}" for failure in failures) or "all goals are met"))
    figures = {"hta": HTA_REQUIREMENT, "repeats": repeats, "files": results, "missed": failures}
    finish("traces", BENCHMARK_VERSION, figures, options.record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

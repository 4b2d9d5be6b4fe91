"""What does flopmeter show on this GPU? Ten minutes of measuring, and one file that can be sent as a pull request.

    make gpu-evidence                                  # measures, writes benchmarks/results/gpu/<card>.json
    python scripts/gpu_evidence.py --pages [--check]   # docs/gpus.md from the files that are there

Five parts: the tests of tests/gpu; what watching adds to a step; a sampled step against torch.profiler's trace of steps
of the same loop; counted FLOPs against the GPU's own counters; six planted faults and what the diagnosis says first. A
part that fails says so in the file, and the others go on. On the simulated device of tests/simcuda everything runs as
well, but what comes of it says nothing about any GPU: the file is marked and kept out of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "gpus.md"
IS_SIMULATED = "SIMCUDA_DEVICES" in os.environ
LIMIT_S, TESTS_S = 600.0, 240.0
"""For everything, and what is kept for the tests of it."""
START_S = time.monotonic()
PLANTS = ("slow_disk", "tiny_batch", "eager_attention", "padding", "checkpointing", "host_sync")
PLANT_S = 10
NUM_PAIRS, BLOCK = 20, 25
NUM_TRACED = 5
COUNTED_S = 3.0


def left_s(kept_s: float = 0.0) -> float:
    """Seconds that there still are, without those that are kept for something else."""
    return max(1.0, START_S + LIMIT_S - kept_s - time.monotonic())


def environment() -> dict[str, Any]:
    """What was measured, and with what."""
    import torch

    import flopmeter

    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "card": properties.name,
        "num_cards": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flopmeter": flopmeter.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # noqa: BLE001 - a driver that does not tell its version runs all the same
        return f"not known ({type(error).__name__})"


def run_tests() -> dict[str, Any]:
    """tests/gpu, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--confcutdir=tests/gpu", f"--junitxml={report}", "tests/gpu"]
        subprocess.run(command, cwd=ROOT, check=False, timeout=left_s(), stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = {
        str(case.get("name")): str(found.get("message"))
        for case in cases
        if (found := case.find("skipped")) is not None
    }
    num_passed = len(cases) - len(failed) - len(skipped)
    return {"num_passed": num_passed, "failed": failed, "skipped": skipped}


class Loop:
    """Eight linears under autocast: a step of some milliseconds on a large card."""

    def __init__(self, width: int = 2048, rows: int = 4096) -> None:
        import torch

        self.torch = torch
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(rows, width, device="cuda")

    def steps(self, number: int) -> float:
        """Seconds a step, the device included."""
        self.torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(number):
            with self.torch.autocast("cuda", self.torch.bfloat16):
                loss = self.model(self.batch).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / number


def compare_step_times() -> dict[str, Any]:
    """A loop that is watched against one that is not, block by block in turn."""
    from flopmeter import watch

    plain, ours = Loop(), Loop()
    with tempfile.TemporaryDirectory() as folder:
        config = {"monitoring": {"sinks": [], "report": False}}
        monitor = watch(ours.model, ours.optimizer, output_dir=folder, config=config)
        plain.steps(BLOCK), ours.steps(BLOCK)
        pairs = [(plain.steps(BLOCK), ours.steps(BLOCK)) for _ in range(NUM_PAIRS)]
        monitor.finish_training()
    ratios = [on / off - 1 for off, on in pairs]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "plain_step_s": statistics.median(off for off, _ in pairs),
        "watched_step_s": statistics.median(on for _, on in pairs),
        "added_share": statistics.median(ratios),
        "added_share_middle_half": [quarters[0], quarters[2]],
    }


def compare_with_trace() -> dict[str, Any]:
    """Seconds of matmuls and of all other kernels in a step: the sampled step's, and those of a trace."""
    from torch.profiler import ProfilerActivity, profile

    from flopmeter import load_run, watch
    from flopmeter.devices.kernels import is_matmul

    loop = Loop()
    with tempfile.TemporaryDirectory() as folder:
        # One profile is wanted soon, whatever it costs: this loop is here for nothing else.
        config = {"monitoring": {"sinks": [], "report": False, "overhead_budget": 0.5}}
        monitor = watch(loop.model, loop.optimizer, output_dir=folder, config=config)
        loop.steps(200)
        monitor.finish_training()
        samples = [event for event in load_run(folder).events if event["event"] == "profile"]
    if not samples:
        return {"error": "no step was sampled"}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        loop.steps(NUM_TRACED)
    traced = {"matmul_s": 0.0, "other_s": 0.0}
    for event in trace.events():
        if str(event.device_type) == "DeviceType.CUDA" and not event.is_user_annotation:
            traced["matmul_s" if is_matmul(event.name) else "other_s"] += event.device_time / 1e6 / NUM_TRACED
    sampled = {
        "matmul_s": samples[-1]["matmul_s"],
        "other_s": sum(samples[-1][f"{kind}_s"] for kind in ("non_matmul", "optimizer", "copy")),
    }
    busy_s = sum(traced.values())
    apart = {name: (sampled[name] - traced[name]) / busy_s for name in traced}
    return {"sampled": sampled, "traced": traced, "apart_as_share_of_busy_time": apart}


def compare_with_counters() -> dict[str, Any]:
    """How busy the tensor cores were, by the GPU's counters and by the FLOPs of the products that ran."""
    import torch

    from flopmeter import peak_flops
    from flopmeter.counters import CounterUnavailableError, open_counters

    try:
        counters = open_counters("cuda:0", uuid=str(torch.cuda.get_device_properties(0).uuid))
    except CounterUnavailableError as error:
        return {"error": str(error)}
    size, num_products = 8192, 0
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    torch.mm(square, square)
    torch.cuda.synchronize()
    counters.start()
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < COUNTED_S:
        for _ in range(20):
            torch.mm(square, square)
        torch.cuda.synchronize()
        num_products += 20
    elapsed_s = time.perf_counter() - start_s
    reading = counters.read()
    counters.close()
    counted = 2 * size**3 * num_products / elapsed_s / peak_flops("cuda:0", "bf16").flop_per_s
    return {"reader": counters.name, "tensor_active": reading["tensor_active"], "counted_share_of_peak": counted}


def find_planted_faults() -> dict[str, Any]:
    """Six faults in a small run, and what the diagnosis says first of each."""
    sys.path.append(str(ROOT / "benchmarks"))
    from plants import find_plant

    found: dict[str, Any] = {}
    for name in PLANTS:
        found[name] = {"wanted": find_plant(name).rule}
        try:
            with tempfile.TemporaryDirectory() as folder:
                _run(str(ROOT / "benchmarks" / "plant_training.py"), name, "--seconds", str(PLANT_S), "-o", folder)
                findings = json.loads(_run("-m", "flopmeter", "report", "--json", folder))["findings"]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found[name] |= {"first": None, "why_not": str(error)}
            continue
        rules = [finding["rule"] for finding in findings]
        found[name] |= {"first": rules[0] if rules else "healthy", "all": rules}
    return found


def _run(*command: str) -> str:
    answer = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=left_s(TESTS_S),
    )
    if answer.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(answer.stderr.strip().splitlines() or ['?'])[-1]}")
    return answer.stdout


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "step_time": compare_step_times,
    "trace": compare_with_trace,
    "counters": compare_with_counters,
    "planted": find_planted_faults,
    "tests": run_tests,
}


def measure() -> Path:
    """Run all parts and write the file."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: make gpu-evidence uses the simulated one")
    result: dict[str, Any] = {"is_simulated": IS_SIMULATED, "environment": environment(), "seconds": {}}
    for name, part in PARTS.items():
        part_s = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            result[name] = part()
        except Exception as error:  # noqa: BLE001 - what a card cannot do is a result as well
            result[name] = {"error": f"{type(error).__name__}: {error}"}
        result["seconds"][name] = round(time.monotonic() - part_s, 1)
        print(f"  {json.dumps(result[name])[:300]}", flush=True)
    name = re.sub(r"[^a-z0-9]+", "-", result["environment"]["card"].lower()).strip("-")
    folder = ROOT / ".venv-gpu" if IS_SIMULATED else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"simulated-{name}.json" if IS_SIMULATED else f"{name}.json")
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return path


HEAD = """# GPUs on which flopmeter was measured

Made by `scripts/gpu_evidence.py` from the files in `benchmarks/results/gpu/`, one for each card. If you have a card
that is not here: `make gpu-evidence` takes at most ten minutes and writes its file. Send it as a pull request.

"""
NONE = "No card has been measured yet: nothing that flopmeter says of GPUs was checked on one.\n"


def page() -> str:
    """docs/gpus.md, one row for each file."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        if found["is_simulated"]:
            raise ValueError(f"{path} is of the simulated device and no result")
        here = found["environment"]
        cells = (
            f"{here['card']} x {here['num_cards']}",
            f"torch {here['torch']}, driver {here['driver']}, {here['date']}",
            _cell(found["tests"], lambda part: f"{part['num_passed']} passed, {len(part['failed'])} failed"),
            _cell(
                found["step_time"], lambda part: f"{part['added_share']:+.2%} of {part['plain_step_s'] * 1e3:.2f} ms"
            ),
            _cell(found["trace"], lambda part: f"{part['apart_as_share_of_busy_time']['matmul_s']:+.1%}"),
            _cell(found["counters"], lambda part: f"{part['counted_share_of_peak']:.1%} / {part['tensor_active']:.1%}"),
            _cell(found["planted"], lambda part: f"{_num_right(part)} of {len(part)}"),
        )
        rows.append("| " + " | ".join(cells) + " |\n")
    if not rows:
        return HEAD + NONE
    columns = (
        "Card",
        "With",
        "tests/gpu",
        "Added to a step",
        "Matmuls, sampled against traced",
        "FLOPs / tensor cores busy",
        "Faults found first",
    )
    return HEAD + f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n" + "".join(rows)


def _num_right(planted: dict[str, dict[str, Any]]) -> int:
    return sum(fault["first"] == fault["wanted"] for fault in planted.values())


def _cell(part: dict[str, Any], say: Callable[[dict[str, Any]], str]) -> str:
    return "not measured" if "error" in part else say(part)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure flopmeter on this GPU, or write docs/gpus.md.")
    parser.add_argument("--pages", action="store_true", help="write docs/gpus.md from the files on record")
    parser.add_argument("--check", action="store_true", help="with --pages: exit 1 when it says something else")
    arguments = parser.parse_args()
    if not arguments.pages:
        path = measure()
        print(f"written: {path.relative_to(ROOT)}")
        if IS_SIMULATED:
            print("this device is simulated: the file is no result and is not to be sent")
            return
    text = page()
    if not arguments.check:
        PAGE.write_text(text, "utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.exit("docs/gpus.md is not what scripts/gpu_evidence.py --pages writes")


if __name__ == "__main__":
    main()

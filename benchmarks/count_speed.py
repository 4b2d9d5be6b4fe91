"""How long does it take to count a model that fits no machine here, and how much memory? flopmeter and its peers.

    python benchmarks/count_speed.py [--models llama-3-70b] [--peers none] [--repeats 3] [--quick] [--record FILE]

Forward and backward of one sequence of 8192 tokens, no weight allocated; GLM-5, whose sparse attention has 2048 keys
for each query, also at up to 131072 tokens, by flopmeter alone. Every count runs in a process of its own:
imports apart, then the model is built on the meta device, then counted. Peers get the same model on the meta device,
with a ready mask, without which transformers looks at values, and without an image; those that see one direction count
the forward pass, times three. Counts are compared with the truth file's hand formulas: flopmeter's with the exact
pairs, the peers' with all pairs, which is what they aim at. The last line printed is JSON; the exit code is 1 when a
goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import truth
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
LENGTH = 8192
OURS = "flopmeter"
PEERS = ("FlopCounterMode", "fvcore", "calflops", "ptflops", "deepspeed")
LONG = {f"glm_moe_dsa at {length}": length for length in (4096, 32768, 131072)}
MAX_COUNT_S = {"llama-3-70b": 2.0, "llama-3.1-405b": 2.0} | dict.fromkeys(LONG, 60.0)
MAX_ANY_COUNT_S = 5.0
MAX_RSS_MB, MAX_LONG_RSS_MB = 1000, 2000
LIMIT_S = 600
WHOLE = truth.causal([LENGTH], LENGTH)

Result = dict[str, Any]
"""Seconds, memory and FLOP of one process, or the reason why there are none."""


def decoder(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: int) -> SimpleNamespace:
    """A published configuration under transformers' names."""
    return SimpleNamespace(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, intermediate_size=ffn, vocab_size=vocab, **more,
    )  # fmt: skip


DEEPSEEK_V3 = SimpleNamespace(  # arXiv:2412.19437 section 4.2
    num_hidden_layers=61, hidden_size=7168, num_attention_heads=128, intermediate_size=18432, vocab_size=129280,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048,
    first_k_dense_replace=3,
)  # fmt: skip
GLM_5 = SimpleNamespace(  # zai-org/GLM-5's config.json, which transformers' GlmMoeDsaConfig has as its default
    num_hidden_layers=78, hidden_size=6144, num_attention_heads=64, intermediate_size=12288, vocab_size=154880,
    q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
    n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048,
    first_k_dense_replace=3, index_n_heads=32, index_head_dim=128, index_topk=2048,
)  # fmt: skip
QWEN_VISION = SimpleNamespace(  # arXiv:2502.13923 table 1
    depth=32, hidden_size=1280, intermediate_size=3456, num_heads=16, out_hidden_size=8192, patch_size=14,
    spatial_merge_size=2, temporal_patch_size=2, in_channels=3, window_size=112, fullatt_block_indexes=(7, 15, 23, 31),
)  # fmt: skip
IMAGE = (1, 32, 32)  # 448 x 448 pixels in patches of 14

TRUTHS: dict[str, truth.Truth] = {
    "llama-3-8b": truth.llama(WHOLE, decoder(32, 4096, 32, 8, 14336, 128256)),
    "llama-3-70b": truth.llama(WHOLE, decoder(80, 8192, 64, 8, 28672, 128256)),
    "llama-3.1-405b": truth.llama(WHOLE, decoder(126, 16384, 128, 8, 53248, 128256)),
    "mixtral-8x22b": truth.mixtral(
        WHOLE, decoder(56, 6144, 48, 8, 16384, 32000, num_local_experts=8, num_experts_per_tok=2)
    ),
    "deepseek-v3": truth.deepseek_v3(WHOLE, DEEPSEEK_V3),
    "qwen2.5-vl-72b": truth.qwen2_5_vl(WHOLE, [IMAGE], decoder(80, 8192, 64, 8, 29568, 152064), QWEN_VISION),
} | {name: truth.deepseek_v32(truth.causal([length], length), length, GLM_5) for name, length in LONG.items()}


def work(counter: str, name: str) -> Result:
    """Inside the counter's own process."""
    started = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    count = prepare_flopmeter(name) if counter == OURS else prepare_peer(counter, name)
    imported = time.perf_counter()
    build, run = count
    model = build()
    built, cpu_before = time.perf_counter(), time.process_time()
    flop = run(model)
    result = {
        "import_s": imported - started,
        "build_s": built - imported,
        "count_s": time.perf_counter() - built,
        "count_cpu_s": time.process_time() - cpu_before,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "flop": flop,
    }
    expected = TRUTHS[name].exact if counter == OURS else TRUTHS[name].full
    return result | {"counted_over_true": flop / expected.model_flop}


Stages = tuple[Callable[[], Any], Callable[[Any], float]]
"""How to build the model, and how to count it; both come with all they need imported."""


def prepare_flopmeter(name: str) -> Stages:
    from flopmeter.flops.count import count_flops
    from flopmeter.flops.models import load_model

    spec, batch = name.partition(" at ")[0], (1, LONG.get(name, LENGTH))
    load_model(f"{spec}:layers=1")  # transformers imports a model's code when it is first built
    return lambda: load_model(spec), lambda model: count_flops(model, batch).model_flop


def prepare_peer(counter: str, name: str) -> Stages:
    import torch

    import peers
    from cases import training_case
    from flopmeter.flops.models import load_model

    load_model(f"{name}:layers=1")
    peer = peers.PEERS[counter]
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta")
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")

    def count(model: Any) -> float:
        model.config.get_text_config().use_cache = False
        case = training_case(model, {"input_ids": ids, "attention_mask": mask, "labels": ids})
        return peer.training(case) if peer.training else 3 * peer.forward(case)

    return lambda: load_model(name).to("meta"), count


def work_and_report(counter: str, name: str) -> None:
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = work(counter, name)
    except Exception as error:  # noqa: BLE001 - a peer that fails must show why
        result = {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    print(json.dumps(result), flush=True)


def run(counter: str, name: str) -> Result:
    """One count in a new process."""
    command = [sys.executable, __file__, "--worker", counter, "--models", name]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"reason": f"not done after {LIMIT_S} s"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"reason": f"its process ended with exit code {done.returncode}"}


def run_all(counters: Sequence[str], names: Sequence[str], repeats: int) -> dict[str, dict[str, Result]]:
    """Medians by model and counter. Rounds go through all of them, so that a slow minute hits everyone."""
    results: dict[tuple[str, str], list[Result]] = {}
    for index in range(repeats):
        for name in names:
            for counter in counters if name not in LONG else (OURS,):
                tried = results.setdefault((name, counter), [])
                if tried and "reason" in tried[-1]:
                    continue
                print(f"round {index + 1}: {name} by {counter}", file=sys.stderr)
                tried.append(run(counter, name))
    medians: dict[str, dict[str, Result]] = {name: {} for name in names}
    for (name, counter), tried in results.items():
        medians[name][counter] = median(tried)
    return medians


def median(tried: Sequence[Result]) -> Result:
    if failed := [result for result in tried if "reason" in result]:
        return failed[0]
    middle = {key: statistics.median(result[key] for result in tried) for key in tried[0]}
    return middle | {"count_s_all": [round(result["count_s"], 3) for result in tried]}


def missed_goals(results: dict[str, dict[str, Result]]) -> list[str]:
    missed = []
    for name, by_counter in results.items():
        ours = by_counter[OURS]
        if "reason" in ours:
            missed.append(f"{name}: {ours['reason']}")
            continue
        if ours["count_s"] > MAX_COUNT_S.get(name, MAX_ANY_COUNT_S):
            missed.append(f"{name}: counted in {ours['count_s']:.2f} s")
        if ours["peak_rss_mb"] > (MAX_LONG_RSS_MB if name in LONG else MAX_RSS_MB):
            missed.append(f"{name}: {ours['peak_rss_mb']:.0f} MB")
        if abs(ours["counted_over_true"] - 1) > 1e-9:
            missed.append(f"{name}: counted / true is {ours['counted_over_true']:.6f}")
    return missed


def show(results: dict[str, dict[str, Result]]) -> None:
    table = Table("model", "counter", title=f"Counting one step of {LENGTH} tokens, no weight allocated")
    for heading in ("import s", "build s", "count s", "peak MB", "counted / true"):
        table.add_column(heading, justify="right")
    for name, by_counter in results.items():
        for counter, result in by_counter.items():
            if "reason" in result:
                table.add_row(name, counter, "", "", escape(result["reason"]))
                continue
            times = [f"{result[key]:.2f}" for key in ("import_s", "build_s", "count_s")]
            table.add_row(name, counter, *times, f"{result['peak_rss_mb']:.0f}", f"{result['counted_over_true']:.4f}")
    Console(width=150).print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="comma-separated names; all by default")
    parser.add_argument("--peers", help="comma-separated names, or none; all by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one model, one peer, once, to see that it runs")
    add_record_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(argument: str | None, known: Sequence[str]) -> list[str]:
    names = list(known) if argument is None else [name for name in argument.split(",") if name != "none"]
    if unknown := set(names) - set(known):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return names


def main() -> int:
    arguments = parse_arguments()
    names = chosen(arguments.models or ("llama-3-8b" if arguments.quick else None), tuple(TRUTHS))
    if arguments.worker:
        work_and_report(arguments.worker, names[0])
        return 0
    counters = (OURS, *chosen(arguments.peers or (PEERS[0] if arguments.quick else None), PEERS))
    results = run_all(counters, names, 1 if arguments.quick else arguments.repeats)
    show(results)
    from peers import installed_versions  # brings torch, which the processes above must not pay for

    missed = missed_goals(results)
    for goal in missed:
        print(f"goal missed, {goal}")
    figures = {"installed": installed_versions(), "length": LENGTH, "missed": missed, "results": results}
    finish("count_speed", BENCHMARK_VERSION, figures, arguments.record)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""Sizes are those of public configs; expected counts are worked out here, or printed in the source that is named."""

from __future__ import annotations

import csv
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopmeter.conventions import (
    CONVENTIONS,
    MODELS,
    NAMED,
    RECOMPUTE_MODES,
    Architecture,
    architecture_from_config,
    read_config,
)
from flopmeter.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT.parent / "shared" / "data" / "published_mfu.csv"
LLAMA = MODELS["llama-3.1-8b"]
TINY = Architecture(layers=2, hidden=8, heads=2, kv_heads=1, ffn=16, vocab=10)


def test_llama_3_1_8b_has_the_parameters_that_its_sizes_give_by_hand() -> None:
    query_output, key_value, mlp = 2 * 4096 * 4096, 2 * 4096 * 1024, 3 * 4096 * 14336
    lm_head, norms = 128256 * 4096, (2 * 32 + 1) * 4096

    assert LLAMA.num_matmul_params == 32 * (query_output + key_value + mlp) + lm_head == 7_504_658_432
    assert LLAMA.num_params == 7_504_658_432 + lm_head + norms == 8_030_261_248


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_known_models_have_the_size_of_their_published_checkpoints(name: str, stored: int) -> None:
    assert MODELS[name].num_stored_params == stored


def test_a_tied_output_and_an_ungated_mlp_each_save_one_matrix() -> None:
    assert replace(TINY, tied=True).num_matmul_params == TINY.num_matmul_params
    assert replace(TINY, tied=True).num_params == TINY.num_params - 10 * 8
    assert replace(TINY, gated=False).num_matmul_params == TINY.num_matmul_params - 2 * 8 * 16


def test_given_parameters_replace_n_and_leave_p() -> None:
    given_params = replace(TINY, params=12345)

    assert given_params.num_params == 12345
    assert given_params.num_matmul_params == TINY.num_matmul_params


def test_a_token_of_a_mixture_meets_its_active_and_shared_experts_and_the_router() -> None:
    arch = Architecture(
        layers=3, hidden=8, heads=2, ffn=16, vocab=10, experts=6, active_experts=2, expert_ffn=4, shared_experts=1,
        dense_layers=1,
    )  # fmt: skip
    attention, dense, expert, router = 4 * 8 * 8, 3 * 8 * 16, 3 * 8 * 4, 8 * 6

    assert arch.num_matmul_params == 3 * attention + dense + 2 * ((2 + 1) * expert + router) + 10 * 8
    assert arch.num_stored_params - arch.num_params == 2 * (6 - 2) * expert


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": 0}, "layers"),
        ({"hidden": -8}, "hidden"),
        ({"vocab": 1.5}, "vocab"),
        ({"heads": True}, "heads"),
        ({"heads": 3}, "heads=3 does not divide hidden=8"),
        ({"kv_heads": 3, "heads": 4}, "kv_heads=3"),
        ({"head_dim": -1}, "head_dim"),
        ({"gated": "yes"}, "gated"),
        ({"experts": 4}, "active_experts=0"),
        ({"experts": 4, "active_experts": 5}, "active_experts=5"),
        ({"dense_layers": 9}, "dense_layers"),
        ({"params": -1}, "params"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 16, "vocab": 10, **change}

    with pytest.raises(ConfigError, match=named):
        Architecture(**sizes)


_P, _N, _ATTENTION, _EMBEDDING = 7_504_658_432, 8_030_261_248, 32 * 4096 * 8192, 128256 * 4096


@pytest.mark.parametrize(
    ("convention", "flop", "gflop"),
    [
        ("palm", 6 * _N + 12 * _ATTENTION, 61.07),
        ("6p_full", 6 * _P + 12 * _ATTENTION, 57.91),
        ("6p_causal", 6 * _P + 6 * _ATTENTION, 51.47),
        ("verl", 6 * (_P + _EMBEDDING) + 6 * _ATTENTION, 54.62),
        ("6n", 6 * _N, 48.18),
        ("gpt", 72 * 32 * 4096**2 * (1 + 8192 / (6 * 4096) + 128256 / (12 * 32 * 4096)), 54.69),
    ],
)
def test_a_llama_token_at_8192_costs_what_the_formula_says(convention: str, flop: float, gflop: float) -> None:
    counted = CONVENTIONS[convention].model_flop_per_token(LLAMA, 8192)

    assert counted == pytest.approx(flop, rel=1e-12)
    assert round(counted / 1e9, 2) == gflop


def test_gpt_with_full_recomputation_is_equation_3_of_the_sc21_paper() -> None:
    layers, hidden, seq, vocab = 32, 4096, 8192, 128256
    equation_3 = 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    flop = CONVENTIONS["gpt"].hardware_flop_per_token(LLAMA, 8192, "full")

    assert flop == pytest.approx(equation_3)
    assert round(flop / 1e9, 2) == 71.87


def test_exact_is_the_sum_over_every_matmul_and_every_visible_pair() -> None:
    seq = 5
    weights = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16) + 10 * 8
    visible = sum(position + 1 for position in range(seq))
    forward = 2 * weights * seq + 2 * (2 * visible * 4 + 2 * visible * 4) * 2  # two heads of 4 channels, two layers

    assert CONVENTIONS["exact"].model_flop_per_token(TINY, seq) == pytest.approx(3 * forward / seq)


@given(seq=st.integers(1, 60), window=st.integers(1, 60))
def test_exact_pairs_of_a_window_are_those_of_the_mask(seq: int, window: int) -> None:
    arch = Architecture(layers=1, hidden=1, heads=1, ffn=1, vocab=1, window=window)
    pairs = sum(1 for query in range(seq) for key in range(seq) if 0 <= query - key < window)

    flop = CONVENTIONS["exact"].model_flop_per_token(arch, seq)

    assert flop == pytest.approx(6 * arch.num_matmul_params + 12 * pairs / seq)


def test_exact_and_half_the_pairs_differ_by_half_of_the_diagonal() -> None:
    exact, causal = (CONVENTIONS[name].model_flop_per_token(LLAMA, 8192) for name in ("exact", "6p_causal"))

    assert exact - causal == 6 * 32 * 4096


@pytest.mark.parametrize("name", ["palm", "6n"])
def test_hfu_with_full_recomputation_is_four_thirds_where_llm_foundry_says_so(name: str) -> None:
    convention = CONVENTIONS[name]

    ratio = convention.hardware_flop_per_token(LLAMA, 8192, "full") / convention.model_flop_per_token(LLAMA, 8192)

    assert ratio == pytest.approx(4 / 3)


_LAYERS_AGAIN = 2 * 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
_ATTENTION_AGAIN = 2 * 2 * 4 * (4 * 15) / 5  # layers x heads x channels x 4 FLOPs for each of 15 pairs, of 5 tokens


@pytest.mark.parametrize(
    ("mode", "flop"), [("full", _LAYERS_AGAIN + _ATTENTION_AGAIN), ("selective", _ATTENTION_AGAIN)]
)
def test_exact_recomputation_runs_layers_or_attention_again_but_never_the_output(mode: Any, flop: float) -> None:
    convention = CONVENTIONS["exact"]
    again = convention.hardware_flop_per_token(TINY, 5, mode) - convention.model_flop_per_token(TINY, 5)

    assert again == pytest.approx(flop)


def test_gpt_selective_recomputation_turns_s_over_6h_into_s_over_3h() -> None:
    layers, hidden, seq, vocab = 48, 6144, 2048, 51200
    arch = Architecture(layers=layers, hidden=hidden, heads=64, ffn=24576, vocab=vocab, gated=False)
    printed = 72 * layers * hidden**2 * (1 + seq / (3 * hidden) + vocab / (12 * hidden * layers))

    assert CONVENTIONS["gpt"].hardware_flop_per_token(arch, seq, "selective") == pytest.approx(printed)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_recomputation_never_lowers_the_count(name: str) -> None:
    none, full, selective = (CONVENTIONS[name].hardware_flop_per_token(LLAMA, 4096, mode) for mode in RECOMPUTE_MODES)

    assert none == CONVENTIONS[name].model_flop_per_token(LLAMA, 4096)
    assert none <= selective <= full


def test_every_convention_says_where_it_is_from_and_what_it_leaves_out() -> None:
    for convention in CONVENTIONS.values():
        assert all((convention.formula, convention.meaning, convention.used_by, convention.left_out, convention.source))
    assert set(NAMED) <= set(CONVENTIONS)


def test_the_bloom_log_line_is_reproduced_to_four_digits() -> None:
    """bigscience tr11-176B-ml chronicles: 105.22 s for 2048 sequences on 384 GPUs is printed as TFLOPs: 149.02."""
    bloom = Architecture(layers=70, hidden=14336, heads=112, ffn=4 * 14336, vocab=250880, gated=False, tied=True)

    flop = CONVENTIONS["gpt"].hardware_flop_per_token(bloom, 2048, "full")

    assert round(flop * 2048 * 2048 / 105.22 / 384 / 1e12, 2) == 149.02


_LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_a_llama_config_is_read_from_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA_CONFIG))

    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == LLAMA


def test_gpt2_writes_its_sizes_its_own_way() -> None:
    arch = architecture_from_config(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None, "vocab_size": 50257}
    )

    assert arch == Architecture(layers=12, hidden=768, heads=12, ffn=3072, vocab=50257, gated=False, tied=True)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_are_read_under_both_names_in_use(key: str) -> None:
    mixtral = {**_LLAMA_CONFIG, "model_type": "mixtral", "vocab_size": 32000, key: 8, "num_experts_per_tok": 2}
    qwen = {**mixtral, "model_type": "qwen3_moe", "moe_intermediate_size": 768, "mlp_only_layers": []}

    assert architecture_from_config(mixtral) == MODELS["mixtral-8x7b"]
    assert architecture_from_config(qwen).expert_ffn == 768


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, 0),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 32}, 4096),
    ],
)
def test_the_window_is_the_one_that_layers_use(settings: dict[str, Any], window: int) -> None:
    assert architecture_from_config({**_LLAMA_CONFIG, "model_type": "mistral", **settings}).window == window


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "deepseek_v3"}, "--arch"),
        ({"model_type": None}, "--arch"),
        ({"model_type": ["llama"]}, "--arch"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "4096"}, "hidden must be a positive whole number"),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, "not all alike"),
        ({"sliding_window": 64, "use_sliding_window": True}, "not all alike"),
        ({"decoder_sparse_step": 2}, "not all alike"),
    ],
)
def test_a_config_that_we_cannot_vouch_for_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_from_config({**_LLAMA_CONFIG, **settings})


@pytest.mark.parametrize("text", ["[1, 2]", "{", "", '"llama"'])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_conventions_need_no_torch() -> None:
    code = "import sys, flopmeter.conventions; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def published() -> ModuleType:
    return importlib.import_module("published")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    if not TABLE.is_file():
        pytest.skip("the shared table of published runs is not beside this repository")
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("arguments", "told"), [([], "needs a table"), (["--table", "nowhere.csv"], "nowhere.csv is no file")]
)
def test_without_its_table_the_benchmark_says_in_one_line_what_it_needs(
    published: ModuleType,
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    assert published.main() == 2
    assert capsys.readouterr().err == f"published.py: {told}: name a CSV of published runs with --table\n"


def _row(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    (match,) = [row for row in rows if all(row[key].startswith(value) for key, value in wanted.items())]
    return match


def test_at_most_one_row_in_twenty_disagrees_and_each_shows_why(published: ModuleType, rows: list[Any]) -> None:
    verdicts = published.judge_table(TABLE)
    recomputed = [verdict for verdict in verdicts if not verdict.obstacle]
    disagreeing = [verdict for verdict in recomputed if abs(verdict.error) > 0.005]

    assert len(verdicts) == len(rows)
    assert len(recomputed) >= 0.5 * len(rows)
    assert len(disagreeing) <= 0.05 * len(recomputed)
    assert all(verdict.reason for verdict in disagreeing)


def test_the_recorded_result_is_what_the_benchmark_prints_now(published: ModuleType, rows: list[Any]) -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())
    now = published.summarise(published.judge_table(TABLE))

    assert {key: recorded[key] for key in now} == now


def test_no_published_figure_has_a_say_in_the_convention(published: ModuleType, rows: list[dict[str, str]]) -> None:
    for line, row in enumerate(rows, start=2):
        figures = {key: "12.34" for key in ("reported_mfu", "reported_hfu", "tflops_per_gpu") if row[key]}
        true, false = published.judge(line, row), published.judge(line, {**row, **figures})
        assert (true.convention, true.obstacle, true.ours) == (false.convention, false.obstacle, false.ours)


def test_a_false_figure_is_found_out(published: ModuleType, rows: list[dict[str, str]]) -> None:
    row = _row(rows, model="PaLM 540B")

    assert published.judge(2, row).agrees()
    assert not published.judge(2, {**row, "reported_mfu": "45.7"}).agrees()  # the paper's figure without attention
    assert not published.judge(2, {**row, "reported_mfu": "45.7"}).reason


def test_palm_540b_is_46_2_percent(published: ModuleType, rows: list[dict[str, str]]) -> None:
    by_hand = (6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048) * 238300 / (6144 * 275e12)
    verdict = published.judge(2, _row(rows, model="PaLM 540B"))

    assert round(by_hand, 3) == 0.462
    assert verdict.ours == {"mfu": pytest.approx(by_hand)}


def test_the_first_llm_foundry_row_is_41_25_percent_and_55_with_recomputation(
    published: ModuleType, rows: list[dict[str, str]]
) -> None:
    by_hand = (6 * 64_862_437_376 + 12 * 80 * 8192 * 2048) * 515636 / (512 * 989.5e12)
    verdict = published.judge(2, rows[0])

    assert round(by_hand, 4) == 0.4125
    assert round(verdict.ours["mfu"], 4) == 0.4125
    assert round(verdict.ours["hfu"], 4) == 0.5500


def test_deepseek_v3_is_reproduced_under_both_of_its_conventions(
    published: ModuleType, rows: list[dict[str, str]]
) -> None:
    model = "DeepSeek-V3 671B-A37B (MPFT)"
    full = published.judge(2, _row(rows, model=model, attention_convention="full"))
    causal = published.judge(2, _row(rows, model=model, attention_convention="causal"))

    assert published._deepseek_v3_weights() == 36_624_596_992
    assert full.ours["mfu"] == pytest.approx(0.4373, rel=0.005)
    assert causal.ours["mfu"] == pytest.approx(0.3894, rel=0.005)
    # The pair's difference is half of attention: 6 FLOPs x 61 layers x 128 heads x 160 channels x 4096 tokens.
    half = 6 * 61 * 128 * 160 * 4096 * 3157407 / (2048 * 989e12)
    assert full.ours["mfu"] - causal.ours["mfu"] == pytest.approx(half)


def test_the_22b_row_of_the_recomputation_paper_gives_its_mfu_and_hfu(
    published: ModuleType, rows: list[dict[str, str]]
) -> None:
    row = _row(rows, source="arXiv:2205.05198", model="GPT 22B", step_time_s="1.1")
    layers, hidden, seq, vocab = 48, 6144, 2048, 51200
    model_flop = 72 * 4 * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    verdict = published.judge(2, row)

    assert verdict.ours["mfu"] == pytest.approx(model_flop / (1.1 * 8 * 312e12))
    assert verdict.ours["mfu"] == pytest.approx(0.415, rel=0.005)
    assert verdict.ours["hfu"] == pytest.approx(0.437, rel=0.005)

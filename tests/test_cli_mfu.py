"""The command is run as users run it: through the application, on text arguments."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flopmeter.cli import build_app

ROOT = Path(__file__).resolve().parents[1]
H100 = "NVIDIA H100 80GB HBM3"
LLAMA = "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"
PALM = "layers=118,hidden=18432,heads=48,kv_heads=1,head_dim=256,ffn=73728,vocab=256000,params=540350000000"
REST = "--seq 8192 --tokens-per-second 80000 --gpus 8 --peak-flop-per-s 1e15 --dtype bf16"


def run(arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["mfu", *shlex.split(arguments)], standalone_mode=False)


def answer(arguments: str) -> dict[str, Any]:
    result = run(f"{arguments} --json")
    assert result.exit_code == 0, result.exception
    reply = json.loads(result.stdout)
    assert isinstance(reply, dict)
    return reply


def complaint(arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "flopmeter", "mfu", *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def refusal(arguments: str) -> str:
    error = run(arguments).exception
    assert type(error).__name__ == "BadParameter", error
    assert "\n" not in str(error)
    return str(error)


def test_mfu_is_the_exact_flops_over_the_peak() -> None:
    reply = answer(f"--arch {LLAMA} {REST}")

    flop_per_token = 6 * 7_504_658_432 + 6 * 32 * 4096 * 8193
    assert reply["flop_per_s_per_gpu"] == pytest.approx(flop_per_token * 10_000)
    assert reply["mfu"] == reply["hfu"] == reply["conventions"]["exact"] == pytest.approx(flop_per_token * 1e4 / 1e15)


def test_every_named_convention_is_answered() -> None:
    reply = answer(f"--arch {LLAMA} {REST}")

    # GFLOP a token, worked out in test_conventions.py, times 10,000 tokens/s a GPU, over 1e15.
    expected = {"palm": 0.6107, "6p_full": 0.5791, "6p_causal": 0.5147, "6n": 0.4818}
    assert list(reply["conventions"]) == ["exact", *expected]
    assert {name: round(reply["conventions"][name], 4) for name in expected} == expected
    assert {name: round(mfu, 4) for name, mfu in reply["other_conventions"].items()} == {"verl": 0.5462, "gpt": 0.5469}


def test_palm_540b_answers_with_the_46_2_percent_of_its_paper() -> None:
    reply = answer(
        f"--arch {PALM} --seq 2048 --tokens-per-second 238300 --gpus 6144 --peak-flop-per-s 275e12 --dtype bf16"
    )

    assert round(reply["conventions"]["palm"], 3) == 0.462
    assert round(reply["conventions"]["6n"], 3) == 0.457


def test_step_time_and_batch_are_the_same_as_tokens_per_second() -> None:
    by_step = "--seq 8192 --step-time 2 --global-batch 16 --gpus 8 --peak-flop-per-s 1e15"
    by_rate = f"--seq 8192 --tokens-per-second {16 * 8192 / 2} --gpus 8 --peak-flop-per-s 1e15"

    assert answer(f"--arch {LLAMA} {by_step}") == answer(f"--arch {LLAMA} {by_rate}")


def test_a_name_a_config_and_its_sizes_are_one_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    by_sizes = answer(f"--arch {LLAMA} {REST}")

    assert answer(f"--model llama-3.1-8b {REST}") == by_sizes
    assert answer(f"--model {shlex.quote(str(tmp_path))} {REST}") == by_sizes


def test_the_peak_of_a_device_comes_from_the_table() -> None:
    arguments = "--seq 8192 --tokens-per-second 80000 --gpus 8 --dtype bf16"
    reply = answer(f"--arch {LLAMA} {arguments} --device '{H100}'")

    assert reply["peak"]["source"] == "table"
    assert reply["peak"]["flop_per_s"] == pytest.approx(989.4e12, rel=2e-4)
    assert reply["mfu"] == pytest.approx(reply["flop_per_s_per_gpu"] / reply["peak"]["flop_per_s"])


def test_an_unknown_device_is_a_failure_not_a_guess() -> None:
    exit_code, stderr = complaint(
        f"--arch {LLAMA} --seq 8 --tokens-per-second 8 --gpus 8 --dtype bf16 --device 'NVIDIA X999'"
    )

    assert exit_code == 1
    assert "NVIDIA X999" in stderr
    assert stderr.count("\n") == 1


def test_recomputation_raises_hfu_and_leaves_mfu() -> None:
    none, full = (answer(f"--arch {LLAMA} {REST} --recompute {mode}") for mode in ("none", "full"))

    assert full["conventions"] == none["conventions"]
    assert full["mfu"] == none["mfu"] == none["hfu"]
    # One more forward pass of the layers: a third of the training FLOPs without the output projection's.
    lm_head = 6 * 128256 * 4096 * 10_000 / 1e15
    assert full["hfu"] == pytest.approx(full["mfu"] + (full["mfu"] - lm_head) / 3)


def test_an_mfu_above_one_is_shown_as_it_is_and_called_impossible() -> None:
    arguments = f"--arch {LLAMA} --seq 8192 --tokens-per-second 400000 --gpus 8 --peak-flop-per-s 1e15"
    result, table = run(f"{arguments} --json"), run(arguments)

    assert json.loads(result.stdout)["mfu"] == pytest.approx(2.57356, rel=1e-4)
    assert json.loads(result.stdout)["warning"].startswith("impossible: 257.4 %")
    assert "impossible: 257.4 %" in result.stderr
    assert "257.4 %" in table.stdout
    assert answer(f"--arch {LLAMA} {REST}")["warning"] is None


def test_the_table_shows_every_convention_with_mfu_hfu_and_rate() -> None:
    output = run(f"--arch {LLAMA} {REST} --recompute full").stdout

    row = next(line for line in output.splitlines() if line.strip().startswith("palm"))
    assert row.split()[:6] == ["palm", "61.1", "%", "81.4", "%", "610.7"]
    assert all(
        re.search(rf"^ *{name} ", output, re.M) for name in ("exact", "6p_full", "6p_causal", "6n", "verl", "gpt")
    )


@pytest.mark.parametrize(
    ("arch", "named"),
    [
        ("layer=32", "did you mean 'layers'"),
        ("kvheads=8", "did you mean 'kv_heads'"),
        ("zzzz=1", "unknown key 'zzzz'"),
        ("layers", "'layers' is not of the form key=value"),
        ("", "key=value"),
        ("layers=32", "hidden, heads, ffn, vocab missing"),
        (LLAMA + ",layers=3", "layers is given twice"),
        (LLAMA.replace("layers=32", "layers=0"), "layers must be a positive whole number, not 0"),
        (LLAMA.replace("layers=32", "layers=-1"), "layers must be a positive whole number, not -1"),
        (LLAMA.replace("layers=32", "layers=1.5"), "layers must be a positive whole number"),
        (LLAMA.replace("layers=32", "layers=inf"), "layers must be a positive whole number"),
        (LLAMA.replace("heads=32", "heads=30"), "heads=30 does not divide hidden=4096"),
        (LLAMA.replace("kv_heads=8", "kv_heads=5"), "kv_heads=5 does not divide heads=32"),
        (LLAMA + ",gated=perhaps", "gated must be true or false"),
        (LLAMA + ",tied=1", "tied must be true or false"),
    ],
)
def test_wrong_sizes_are_refused_by_key(arch: str, named: str) -> None:
    message = refusal(f"--arch '{arch}' {REST}")

    assert message.startswith("--arch: ")
    assert named in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"--seq 8 --gpus 8 --arch {LLAMA} --tokens-per-second 9", "--device"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --tokens-per-second 9 --device X --peak-flop-per-s 1", "--device"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1", "--tokens-per-second"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --step-time 2", "--global-batch is missing"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --global-batch 2", "--step-time is missing"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --step-time 2 --tokens-per-second 3", "either"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --step-time 0 --global-batch 2", "--step-time"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --step-time 1 --global-batch -2", "--global-batch"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s nan --tokens-per-second 9", "--peak-flop-per-s"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --tokens-per-second inf", "--tokens-per-second"),
        (f"--seq 0 --gpus 8 --arch {LLAMA} --peak-flop-per-s 1 --tokens-per-second 9", "--seq must be"),
        (f"--seq 8 --gpus 0 --arch {LLAMA} --peak-flop-per-s 1 --tokens-per-second 9", "--gpus must be"),
        (f"{REST}", "--model or --arch"),
        (f"--arch {LLAMA} --model llama-3.1-8b {REST}", "--model or --arch"),
        (f"--model llama-3.1-9b {REST}", "did you mean 'llama-3.1-8b'?"),
        (f"--model zzz {REST}", "it is one of llama-2-7b, "),
        (
            f"--seq 8 --gpus 8 --arch {LLAMA} --tokens-per-second 9 --peak-flop-per-s 989",
            "--peak-flop-per-s is in FLOP/s: 989 TFLOP/s is 989e12",
        ),
        (f"--arch {LLAMA} {REST} --recompute ful", "did you mean 'full'"),
        (f"--seq 8 --gpus 8 --arch {LLAMA} --tokens-per-second 9 --device '{H100}' --dtype bf17", "bf17"),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments: str, named: str) -> None:
    error = run(arguments).exception

    assert named in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("name", "same"), [("llama-3-8b", "llama-3.1-8b"), ("Llama-3-70B", "llama-3.1-70b")])
def test_a_model_of_the_same_sizes_is_known_by_both_names(name: str, same: str) -> None:
    assert answer(f"--model {name} {REST}")["mfu"] == answer(f"--model {same} {REST}")["mfu"]


def test_mixtral_8x22b_has_its_published_39_billion_active_parameters() -> None:
    # A layer: q and o 6144^2 each, k and v 6144 x 1024 each, 2 experts of 3 x 6144 x 16384, a router of 8 x 6144.
    layer = 2 * 6144**2 + 2 * 6144 * 1024 + 2 * 3 * 6144 * 16384 + 8 * 6144
    norms = (2 * 56 + 1) * 6144
    assert answer(f"--model mixtral-8x22b {REST}")["params"] == 56 * layer + 2 * 32000 * 6144 + norms


def test_an_unknown_device_names_what_helps_on_the_command_line() -> None:
    exit_code, stderr = complaint(f"--seq 8 --gpus 8 --arch {LLAMA} --tokens-per-second 9 --device H1000")
    assert exit_code == 1
    assert "--peak-flop-per-s" in stderr
    assert "flopmeter peak --list" in stderr
    assert "YAML" not in stderr


def test_a_peak_from_the_environment_is_named_beside_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_PEAK_FLOP_PER_S", "500e12")
    monkeypatch.setenv("COLUMNS", "400")
    first = run(f"--seq 8 --gpus 8 --arch {LLAMA} --tokens-per-second 9 --device '{H100}'").stdout.splitlines()[0]
    assert f"8 GPUs of 500 TFLOP/s (bf16, {H100}; peak set by FLOPMETER_PEAK_FLOP_PER_S, " in first


def test_wrong_use_exits_with_code_2_and_one_line_on_stderr() -> None:
    exit_code, stderr = complaint(f"--arch layer=32 {REST}")

    assert exit_code == 2
    assert "did you mean 'layers'" in stderr
    assert stderr.count("\n") == 1


def test_a_config_of_an_unknown_family_points_to_arch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "kv_lora_rank": 512}')

    assert "--arch" in refusal(f"--model {shlex.quote(str(tmp_path))} {REST}")


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    assert answer(f"--arch {LLAMA},params=8e9 {REST}")["params"] == 8_000_000_000


def test_mfu_needs_no_torch() -> None:
    arguments = ["mfu", *shlex.split(f"--model llama-3.1-8b --seq 8 --tokens-per-second 8 --gpus 1 --device '{H100}'")]
    code = (
        "import sys; from flopmeter.cli.mfu import command; import typer; app = typer.Typer(); app.command()(command);"
        f"app({arguments[1:]!r}, standalone_mode=False); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def _commands_in_the_guide() -> list[str]:
    text = (ROOT / "docs" / "compare_with_a_paper.md").read_text(encoding="utf-8")
    return re.findall(r"^flopmeter mfu (.+)$", text, re.M)


@pytest.mark.parametrize("arguments", _commands_in_the_guide())
def test_commands_in_the_guide_run(arguments: str) -> None:
    assert run(arguments).exit_code == 0


def test_the_guide_says_what_its_commands_answer() -> None:
    _, palm, recompute = _commands_in_the_guide()
    recomputed = answer(recompute)

    assert round(json.loads(run(palm).stdout)["conventions"]["palm"], 3) == 0.462
    assert round(recomputed["other_conventions"]["gpt"], 3) == 0.560
    assert round(recomputed["hfu_conventions"]["gpt"], 3) == 0.570

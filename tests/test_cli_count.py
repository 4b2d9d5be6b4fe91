"""The command is run as users run it: through the application, on text arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from flopmeter.cli import build_app
from flopmeter.cli.count import _cut, _rows
from flopmeter.errors import ConfigError
from flopmeter.report._modules import Node, _fold
from flopmeter.report._modules import levels as levels_of
from flopmeter.report._modules import tree as tree_of

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="counts transformers models from configs"
)
LLAMA = "llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"
# Weights that a token is multiplied with: q and o, k and v (8 of 32 heads), three MLP matrices, and the lm_head.
MATMUL_PARAMETERS = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096


def run(arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["count", *shlex.split(arguments)], standalone_mode=False)


def printed(arguments: str) -> str:
    result = run(arguments)
    assert result.exit_code == 0, result.exception
    return str(result.stdout)


def answer(arguments: str) -> dict[str, Any]:
    reply = json.loads(printed(f"{arguments} --json"))
    assert isinstance(reply, dict)
    return reply


def refusal(arguments: str) -> str:
    error = run(arguments).exception
    assert type(error).__name__ == "BadParameter", error
    return str(error)


STACK_FLOP = 20400


def stack() -> nn.Module:
    """Six equal layers of 8 x 8 in a list, a seventh that is wider, and one of another name."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 16)])
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            out: torch.Tensor = self.head(x)
            return out @ out.mT

    return Stack()


@needs_transformers
def test_llama_3_8b_is_six_p_t_and_its_causal_pairs() -> None:
    assert MATMUL_PARAMETERS == 7_504_658_432
    by_sizes, by_name = answer(f"{LLAMA} --batch 2 --seq 8192"), answer("llama-3-8b --batch 2 --seq 8192")

    pairs = 2 * 8192 * 8193 // 2
    tokens = 2 * 8192
    expected = 6 * MATMUL_PARAMETERS * tokens + 12 * 32 * 4096 * pairs
    assert by_sizes["model_flop"] == by_name["model_flop"] == expected
    assert by_name["forward_flop"] * 3 == expected
    assert by_name["parameters"] == by_name["trainable"] == 8_030_261_248  # the model card's
    assert (by_name["method"], by_name["coverage"], by_name["convention"]) == ("meta", 1.0, "exact")
    assert by_name["flop_per_token"] == expected / tokens


@needs_transformers
def test_the_options_reach_the_count() -> None:
    tiny = "llama:layers=2,hidden=64,heads=8,kv_heads=2,ffn=96,vocab=1000 --seq 64"
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96) + 1000 * 64
    full, forward, checkpointed = (answer(f"{tiny} {o}") for o in ("--convention full", "--forward", "--checkpointing"))

    assert full["model_flop"] == 6 * weights * 64 + 12 * 2 * 64 * 64**2
    assert (forward["backward_flop"], forward["train"]) == (0, False)
    # Checkpointing runs each layer again, but for its last product.
    layer = 2 * 64 * (2 * 64 * 64 + 2 * 64 * 16 + 2 * 64 * 96) + 4 * 64 * 64 * 65 // 2
    assert checkpointed["recompute_flop"] == 2 * layer
    assert "recomputed" in printed(f"{tiny} --checkpointing")


@needs_transformers
def test_a_length_beyond_the_models_positions_is_refused_with_the_longest_that_fits() -> None:
    error = run("gpt2:layers=1,hidden=16,heads=2,vocab=50,n_positions=24 --seq 32").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "GPT2LMHeadModel has positions for 24 tokens, not for 32: --seq 24 is the longest that fits"


@needs_transformers
def test_what_the_flops_grow_with_is_printed_as_a_formula() -> None:
    tiny = "llama:layers=2,hidden=64,heads=8,kv_heads=2,ffn=96,vocab=1000 --batch 2 --seq 1500"

    # 6 FLOP for each token and weight: projections, feed-forward layers, the head. 12 for each pair, layer and channel.
    weights = 2 * (64 * (64 + 16 + 16 + 64) + 3 * 64 * 96) + 64 * 1000
    assert answer(tiny)["formula"] == f"{6 * weights}*tokens + {12 * 2 * 64}*pairs_causal"
    assert f"grows as {6 * weights}*tokens + " in printed(tiny)


def test_a_factory_is_counted_and_its_equal_layers_are_one_line() -> None:
    table = printed("test_cli_count:stack --batch 2 --seq 3")
    lines = [re.split(r"  +", line.strip()) for line in table.splitlines()]

    # Six rows of 8 x 8: 768 FLOP a product; the first layer's input needs no gradient.
    parts = {
        "├─ layers.0": 2 * 768,
        "├─ layers.1 ... layers.5 (5 x)": 5 * 3 * 768,
        "├─ layers.6": 3 * 2 * 768,
        "├─ head": 3 * 2 * 6 * 16 * 4,
        "└─ (itself)": 3 * 2 * 2 * 3 * 4 * 3,  # out by its own transpose, in a batch of 2: 3 x 4 by 4 x 3
    }
    total = sum(parts.values())
    assert total == STACK_FLOP
    for name, flop in parts.items():
        size = f"{flop / 1e3:.4g} kFLOP" if flop >= 1000 else f"{flop} FLOP"
        assert [name, size, f"{100 * flop / total:.1f} %"] in lines
    assert ["Stack", "20.4 kFLOP", "100.0 %"] in lines
    assert f"{6 * 72 + 144 + 68:,} parameters" in table


def test_op_and_dtype_tables_add_up() -> None:
    by_op, by_dtype = (printed(f"test_cli_count:stack --batch 2 --seq 3 --by {axis}") for axis in ("op", "dtype"))

    assert "aten::addmm" in by_op
    assert re.search(r"float32 +20.4 kFLOP +100.0 %", by_dtype)
    assert re.search(r"total +20.4 kFLOP +100.0 %", by_op)
    assert re.search(r"total +20.4 kFLOP +100.0 %", by_dtype)


def test_the_dtype_of_the_weights_is_that_of_the_products() -> None:
    built, chosen = (answer(f"test_cli_count:stack --batch 2 --seq 3 {o}") for o in ("", "--dtype bf16"))

    assert (built["by_dtype"], chosen["by_dtype"]) == ({"float32": STACK_FLOP}, {"bfloat16": STACK_FLOP})


def test_depth_cuts_the_modules_of_the_json_too() -> None:
    asked = "test_cli_count:stack --batch 2 --seq 3"
    whole, cut = answer(asked)["by_module"], answer(f"{asked} --depth 1")["by_module"]

    assert set(cut) == {*(f"layers.{number}" for number in range(7)), "head", ""}
    assert set(answer(f"{asked} --depth 9")["by_module"]) == set(whole)
    assert sum(cut.values()) == STACK_FLOP


def test_depth_adds_what_is_below_to_the_last_level() -> None:
    parts = {"model.layers.0.mlp.up": 6.0, "model.layers.0.mlp.down": 2.0, "model.layers.0": 1.0, "head": 1.0}

    assert _cut(parts, 1) == {"model": 9.0, "head": 1.0}
    assert _cut(parts, 2) == {"model.layers.0": 9.0, "head": 1.0}


def test_depth_cuts_the_tree() -> None:
    tree = tree_of({"model.layers.0.mlp.up": 6.0, "model.layers.0.mlp.down": 2.0, "model.layers.0": 1.0, "head": 1.0})

    assert tree.flop == 10
    assert [name for name, _ in _rows(tree, 1)] == ["├─ model", "└─ head"]
    assert list(_rows(tree, 3)) == [
        ("├─ model", 9),
        ("│  └─ layers.0", 9),
        ("│     ├─ mlp", 8),
        ("│     └─ (itself)", 1),
        ("└─ head", 1),
    ]
    assert len(list(_rows(tree, 9))) == 7


@pytest.mark.parametrize(
    ("path", "levels"),
    [
        ("", []),
        ("head", ["head"]),
        ("0", ["0"]),
        ("model.layers.0.mlp", ["model", "layers.0", "mlp"]),
        ("stages.1.2.conv1", ["stages.1.2", "conv1"]),
    ],
)
def test_a_number_stays_with_its_list(path: str, levels: list[str]) -> None:
    assert levels_of(path) == levels


def test_only_neighbours_with_the_same_flops_in_the_same_places_are_one_line() -> None:
    def layer(index: int, **parts: float) -> Node:
        return Node(f"layers.{index}", children={name: Node(name, flop) for name, flop in parts.items()})

    layers = [layer(0, a=1, b=2), layer(1, a=1, b=2), layer(2, a=2, b=1), layer(3, a=1, b=2), layer(4, a=1, b=2)]
    folded = _fold(Node("", children={node.name: node for node in layers}))

    assert [(node.name, node.flop) for node in folded.children.values()] == [
        ("layers.0 ... layers.1 (2 x)", 6),
        ("layers.2", 3),
        ("layers.3 ... layers.4 (2 x)", 6),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("x:y --by modul", "--by: unknown 'modul': did you mean 'module'?"),
        ("x:y --by zzz", "--by: unknown 'zzz': it is one of module, op, dtype"),
        ("x:y --convention palm", "--convention: unknown 'palm'"),
        ("x:y --dtype bf17", "--dtype: unknown 'bf17': did you mean 'bf16'?"),
        ("x:y --dtype fp8", "--dtype: unknown 'fp8': it is one of fp32, bf16, fp16, fp64"),
        ("x:y --seq 0", "greater than or equal to 1"),
        ("x:y --depth 0", "greater than or equal to 1"),
    ],
)
def test_wrong_use_is_refused(arguments: str, named: str) -> None:
    assert named in refusal(arguments)


@pytest.mark.parametrize("path", ["nope.json", "no/such/folder", "nope.json:layers=2"])
def test_a_path_to_nothing_is_a_missing_file_and_no_misspelt_model(path: str) -> None:
    error = run(path).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"there is no file '{path.partition(':')[0]}'")


def complaint(arguments: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "flopmeter", "count", *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_a_failure_is_one_line_and_exit_code_1() -> None:
    exit_code, stderr = complaint("no_such_package:build")

    assert exit_code == 1
    assert stderr.startswith("flopmeter: error: 'no_such_package:build' gives no model: ModuleNotFoundError")
    assert stderr.count("\n") == 1


def test_a_folder_without_a_model_is_said_to_be_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it reads the folder")
    exit_code, stderr = complaint(str(tmp_path))

    assert exit_code == 2
    assert stderr.startswith(f"flopmeter: error: {tmp_path} holds no model (no config.json): ")
    assert "Errno" not in stderr


def test_wrong_use_is_one_line_and_exit_code_2() -> None:
    exit_code, stderr = complaint("x:y --by modul")

    assert (exit_code, stderr.count("\n")) == (2, 1)


WITHOUT = {
    ("torch",): "flopmeter count needs torch, which is not installed: run pip install 'flopmeter[torch]'",
    ("transformers",): "flopmeter count llama-3-8b needs transformers, which is not installed: "
    "run pip install 'flopmeter[transformers]'",
    ("torch", "transformers"): "flopmeter count needs torch and transformers, which are not installed: "
    "run pip install 'flopmeter[torch,transformers]'",
}


def without(libraries: tuple[str, ...], folder: Path) -> str:
    """A search path on which these are as absent as on a machine without them, and importing torch is an error."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "def find_spec(name, package=None):\n"
        f"    if name in {libraries}: return None\n"
        "    return object() if name in ('torch', 'transformers') else real(name, package)\n"
        "importlib.util.find_spec = find_spec\n"
        "sys.modules['torch'] = None\n"
    )
    return str(folder)


@pytest.mark.parametrize("libraries", WITHOUT, ids="+".join)
def test_all_that_is_absent_is_named_with_its_cure_before_torch_is_loaded(
    libraries: tuple[str, ...], tmp_path: Path
) -> None:
    answer = complaint("llama-3-8b", PYTHONPATH=without(libraries, tmp_path))

    assert answer == (1, f"flopmeter: error: {WITHOUT[libraries]}\n")


def test_a_function_that_builds_the_model_needs_no_transformers(tmp_path: Path) -> None:
    path = without(("torch", "transformers"), tmp_path)

    assert complaint("package.module:build", PYTHONPATH=path) == (1, f"flopmeter: error: {WITHOUT[('torch',)]}\n")

"""Is a DeepSpeed loop measured like the plain one, whatever ZeRO does to its parameters and its optimizer?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopmeter import load_run
from flopmeter.metrics import certainty

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_loop.py"
NUM_RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed (it builds itself against torch: not in dev)")
    folder = tmp_path_factory.mktemp("deepspeed")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, *launch, str(PROGRAM), str(folder)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert answer.returncode == 0, answer.stderr
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_tokens_and_flop_are_those_of_the_mathematics(folder: Path, stage: int) -> None:
    layers, width, vocabulary, batch, length, num_steps = 2, 32, 64, 4, 16, 12  # as the program has them
    tokens = batch * length
    # A block's products: queries, keys and values 3 d^2, projection d^2, the two of the MLP 4 d^2 each; then the head.
    # Attention: scores and weighted values, of the pairs that the causal mask lets through.
    weights = layers * 12 * width**2 + width * vocabulary
    pairs = batch * length * (length + 1) // 2
    forward = 2 * tokens * weights + 2 * 2 * layers * pairs * width
    of_a_step = NUM_RANKS * 2 * 3 * forward  # two batches a step; backward costs twice the forward pass

    run = load_run(folder / f"zero{stage}")
    assert len(run) == num_steps
    assert run.header.world_size == NUM_RANKS
    assert run.header.model == "GPT2LMHeadModel"
    # Embeddings of tokens and positions, and per block 12 d^2 weights, 9 d biases and two norms; then the last norm.
    num_parameters = (vocabulary + length) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert (run.header.num_parameters, run.header.num_trainable) == (num_parameters, num_parameters)
    steady = run.steady()
    assert [run.column("perf/model_flop")[place] for place in steady] == pytest.approx(
        [of_a_step] * len(steady), rel=1e-3
    )
    assert [run.amount("tokens")[place] for place in steady] == pytest.approx([NUM_RANKS * 2 * tokens] * len(steady))
    assert certainty(run.sum_up()) == "counted"
    assert run.header.off == []

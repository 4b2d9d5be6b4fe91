"""What the device runs follows what it is handed, padding included, however the counted step was padded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers, built from configs")

import cases
import rows
import truth
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.observe import observe
from flopmeter.flops.prediction import Law
from flopmeter.flops.workload import Workload, needs_of, workload_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the models' own libraries

HIDDEN, MLP, VOCAB, LAYERS, HEADS, KV_HEADS, LENGTH, BATCH = 64, 128, 200, 2, 4, 2, 64, 4
NUMBERS = {
    "hidden_size": HIDDEN, "intermediate_size": MLP, "vocab_size": VOCAB, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
}  # fmt: skip
# q and o are hidden x hidden, k and v half as wide, then gate, up and down, and the lm_head; 2 FLOP, three times.
LAYER = 3 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP
ROWS_FLOP = 6 * BATCH * LENGTH * (LAYERS * LAYER + HIDDEN * VOCAB)
PAIR_FLOP = LAYERS * 2 * HIDDEN * 7  # 2 products forward, 4 backward, and one of them once more in the fused backward
ALL_PAIRS, CAUSAL_PAIRS = BATCH * LENGTH**2, BATCH * LENGTH * (LENGTH + 1) // 2
LENGTHS = {"unpadded": [LENGTH] * BATCH, "padded": [16] * BATCH, "mixed": [64, 33, 8, 1]}
EXECUTED = {
    "unpadded": ROWS_FLOP + PAIR_FLOP * CAUSAL_PAIRS,  # without padding, attention is told to be causal
    "padded": ROWS_FLOP + PAIR_FLOP * ALL_PAIRS,  # with a mask tensor nothing is skipped
    "mixed": ROWS_FLOP + PAIR_FLOP * ALL_PAIRS,
}


def counted(model: Any, batch: dict[str, Any], convention: Convention = "exact") -> Law:
    with observe(model) as step:
        model(**batch).loss.backward()
    return Law.of(step.result(convention), workload_of(batch, needs_of(model)))


def run(law: Law, model: Any, batch: dict[str, Any]) -> float:
    return sum(law.at(workload_of(batch, needs_of(model))).hardware.values())


@pytest.mark.parametrize("wanted", LENGTHS)
@pytest.mark.parametrize("observed", LENGTHS)
def test_padding_is_run_whatever_padding_the_counted_step_had(observed: str, wanted: str) -> None:
    model = cases.transformers_case("llama", NUMBERS, dict).model
    law = counted(model, cases.text(LENGTHS[observed], LENGTH, VOCAB))
    assert run(law, model, cases.text(LENGTHS[wanted], LENGTH, VOCAB)) == pytest.approx(EXECUTED[wanted], rel=1e-9)


@pytest.mark.parametrize("convention", ["exact", "full"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non_reentrant"])
def test_attention_written_out_runs_all_pairs_and_reruns_follow(
    checkpointing: str | None, convention: Convention
) -> None:
    build = partial(cases.transformers_case, "llama", vars(rows.LLAMA), dict, attention="eager")
    model = build(checkpointing=checkpointing).model
    law = counted(model, cases.text([40, 11], 64, rows.VOCAB), convention)
    for lengths, padded_to in (([64, 64], 64), ([200, 200], 200), ([96, 17, 50], 96)):
        expected = truth.llama(truth.causal(lengths, padded_to), rows.LLAMA, checkpointing).hardware_flop
        assert run(law, model, cases.text(lengths, padded_to, rows.VOCAB)) == pytest.approx(expected, rel=1e-9)


def test_a_window_is_a_mask_that_skips_nothing() -> None:
    model = cases.transformers_case("mistral", NUMBERS | {"sliding_window": 16}, dict).model
    law = counted(model, cases.text(LENGTHS["padded"], LENGTH, VOCAB))
    expected = ROWS_FLOP + PAIR_FLOP * ALL_PAIRS
    assert run(law, model, cases.text(LENGTHS["unpadded"], LENGTH, VOCAB)) == pytest.approx(expected, rel=1e-9)


def test_recomputation_grows_with_the_batch_and_the_optimizer_does_not() -> None:
    # 8 samples: 80 forward, 160 backward, 80 again in a checkpoint, and 50 of matrix work in the optimizer.
    count = FlopCount(
        forward_flop=80, backward_flop=160, recompute_flop=80, optimizer_flop=50, hardware_flop=370,
        by_dtype={"float32": 240}, hardware_by_dtype={"float32": 370},
        growth={"exact": {"float32": {"samples": 240}}, "hardware": {"float32": {"samples": 320, "once": 50}}},
    )  # fmt: skip
    law = Law.of(count, Workload(samples=8))
    assert law.at(Workload(samples=8)).hardware == {"fp32": 370}
    assert law.at(Workload(samples=32)).hardware == {"fp32": pytest.approx(4 * 320 + 50)}

"""Smart mode's promise: one counted step predicts steps of other sizes. Held against the benchmark's hand formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of transformers, built from configs")
pytest.importorskip("peft", reason="the LoRA model needs peft")

import cases
import rows
import truth
from flopmeter.flops.estimate import plan_of
from flopmeter.flops.flop_count import Convention
from flopmeter.flops.observe import observe
from flopmeter.flops.prediction import Predictor, as_if_unpadded
from flopmeter.flops.workload import Needs, Workload, workload_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the models' own libraries

ESTIMATE_TOLERANCE, SMART_TOLERANCE = 0.03, 0.005
OBSERVED = ([64, 64], 64)
WANTED: dict[str, tuple[list[int], int]] = {
    "another batch size": ([64] * 5, 64),
    "another length": ([200, 200], 200),
    "padded": ([96, 17, 50], 96),
}


@dataclass(frozen=True)
class Family:
    """A model, its batches and its truth, as functions of lengths."""

    build: Callable[..., Any]
    batch: Callable[[list[int], int], dict[str, Any]]
    truth: Callable[[list[int], int], truth.Truth]


def text(lengths: list[int], padded_to: int) -> dict[str, Any]:
    return cases.text(lengths, padded_to, rows.VOCAB)


def causal(formula: Callable[..., Any], numbers: Any, **kwargs: Any) -> Callable[[list[int], int], Any]:
    return lambda lengths, padded_to: formula(truth.causal(lengths, padded_to), numbers, **kwargs)


def decoder(model_type: str, formula: Callable[..., Any], numbers: Any, **kwargs: Any) -> Family:
    build = partial(cases.transformers_case, model_type, vars(numbers), **kwargs)
    return Family(build, text, causal(formula, numbers))


CLASSIFIER = "SequenceClassification"
ROUTING = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
QWEN = {
    "text_config": vars(rows.QWEN_TEXT) | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
    "vision_config": vars(rows.QWEN_VISION),
    "image_token_id": 1,
}


def grids(lengths: list[int]) -> list[tuple[int, int, int]]:
    """One image per sample, of a size that goes with the sample's place and fits into its text."""
    return [
        (1, 4, 4 + 2 * (place % 3)) if length < 60 else (1, 8, 8 + 4 * (place % 2))
        for place, length in enumerate(lengths)
    ]


FAMILIES = {
    "llama": decoder("llama", truth.llama, rows.LLAMA),
    "llama eager": decoder("llama", truth.llama, rows.LLAMA, attention="eager"),
    "llama checkpointed": decoder("llama", truth.llama, rows.LLAMA, checkpointing="non_reentrant"),
    "gpt2": decoder("gpt2", truth.gpt2, rows.GPT2),
    "mixtral": decoder("mixtral", truth.mixtral, rows.MIXTRAL),
    "qwen3_moe": decoder("qwen3_moe", truth.qwen3_moe, rows.QWEN3_MOE),
    "deepseek_v3": Family(
        partial(cases.transformers_case, "deepseek_v3", vars(rows.DEEPSEEK_V3) | ROUTING),
        text,
        causal(truth.deepseek_v3, rows.DEEPSEEK_V3),
    ),
    "qwen2_5_vl": Family(
        partial(cases.transformers_case, "qwen2_5_vl", QWEN, head="ImageTextToText"),
        lambda lengths, padded_to: cases.text_with_images(
            lengths, padded_to, rows.VOCAB, grids(lengths), rows.QWEN_VISION.in_channels * 2 * 14**2
        ),
        lambda lengths, padded_to: truth.qwen2_5_vl(
            truth.causal(lengths, padded_to), grids(lengths), rows.QWEN_TEXT, rows.QWEN_VISION
        ),
    ),
    "bert": Family(
        partial(cases.transformers_case, "bert", vars(rows.BERT) | {"vocab_size": rows.VOCAB}, head=CLASSIFIER),
        lambda lengths, padded_to: cases.labelled_text(lengths, padded_to, rows.VOCAB, rows.BERT.num_labels),
        lambda lengths, padded_to: truth.bert(truth.bidirectional(lengths, padded_to), rows.BERT),
    ),
    "vit": Family(
        partial(cases.transformers_case, "vit", vars(rows.VIT), head="ImageClassification"),
        lambda lengths, padded_to: cases.labelled_images(len(lengths), rows.VIT.image_size, rows.VIT.num_labels),
        lambda lengths, padded_to: truth.vit(len(lengths), rows.VIT),
    ),
    "lora": Family(
        partial(cases.transformers_case, "llama", vars(rows.LLAMA), lora_rank=8),
        text,
        causal(truth.lora_llama, rows.LLAMA, rank=8),
    ),
    "mistral with a window": Family(
        partial(cases.transformers_case, "mistral", vars(rows.LLAMA) | {"sliding_window": 16}),
        text,
        lambda lengths, padded_to: truth.llama(truth.causal(lengths, padded_to, window=16), rows.LLAMA),
    ),
}


def relative_error(flop: float, expected: float) -> float:
    return abs(flop / expected - 1)


def observed_predictor(family: Family, convention: Convention) -> tuple[Predictor, Any]:
    case = family.build(lambda: family.batch(*OBSERVED))
    with observe(case.model) as step:
        case.step()
    predictor = Predictor(plan_of(case.model), convention)
    predictor.learn(step.result(convention), workload_of(family.batch(*OBSERVED), predictor.plan.needs))
    return predictor, case.model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("convention", ["exact", "full"])
def test_a_step_of_another_size_is_predicted_within_half_a_percent(name: str, convention: Convention) -> None:
    family = FAMILIES[name]
    predictor, _ = observed_predictor(family, convention)
    for lengths, padded_to in WANTED.values():
        workload = workload_of(family.batch(lengths, padded_to), predictor.plan.needs)
        expected = getattr(family.truth(lengths, padded_to), convention).model_flop
        predicted = predictor.predict(workload)
        assert relative_error(sum(predicted.model_flop.values()), expected) < SMART_TOLERANCE
        assert predicted.method in ("calibrated", "counted")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("convention", ["exact", "full"])
def test_the_closed_form_alone_is_within_three_percent(name: str, convention: Convention) -> None:
    family = FAMILIES[name]
    model = family.build(lambda: family.batch(*OBSERVED)).model
    plan = plan_of(model)
    for lengths, padded_to in [OBSERVED, *WANTED.values()]:
        workload = workload_of(family.batch(lengths, padded_to), plan.needs)
        expected = getattr(family.truth(lengths, padded_to), convention).model_flop
        assert relative_error(plan.evaluate(workload, convention=convention).model_flop, expected) < ESTIMATE_TOLERANCE


PACKED: dict[str, Callable[[Any], Any]] = {
    "llama": lambda load: truth.llama(load, rows.LLAMA),
    "gpt2": lambda load: truth.gpt2(load, rows.GPT2),
    "mixtral": lambda load: truth.mixtral(load, rows.MIXTRAL),
    "qwen3_moe": lambda load: truth.qwen3_moe(load, rows.QWEN3_MOE),
    "deepseek_v3": lambda load: truth.deepseek_v3(load, rows.DEEPSEEK_V3),
    "lora": lambda load: truth.lora_llama(load, rows.LLAMA, rank=8),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_predicted_too(name: str) -> None:
    predictor, _ = observed_predictor(FAMILIES[name], "exact")
    documents, padded_to = [[30, 50], [80]], 80
    workload = workload_of(cases.packed_text(documents, padded_to, rows.VOCAB), predictor.plan.needs)
    expected = PACKED[name](truth.packed(documents, padded_to)).exact.model_flop
    assert relative_error(sum(predictor.predict(workload).model_flop.values()), expected) < SMART_TOLERANCE
    assert relative_error(predictor.plan.evaluate(workload).model_flop, expected) < ESTIMATE_TOLERANCE


def test_the_published_error_is_that_of_the_prediction_that_was_tested() -> None:
    family = FAMILIES["llama"]
    predictor, model = observed_predictor(family, "exact")
    lengths, padded_to = WANTED["padded"]
    workload = workload_of(family.batch(lengths, padded_to), predictor.plan.needs)
    promised = sum(predictor.predict(workload).model_flop.values())
    with observe(model) as step:
        model(**family.batch(lengths, padded_to)).loss.backward()
    count = step.result()
    error = predictor.learn(count, workload)
    assert error == pytest.approx(promised / count.model_flop - 1)
    assert predictor.predict(workload).method == "counted"


def test_padding_taken_as_work_is_the_batch_without_padding() -> None:
    padded = Workload.of_lengths([96, 17, 50], 96)
    whole = Workload.of_lengths([96, 96, 96], 96)
    assert as_if_unpadded(padded) == whole
    assert as_if_unpadded(whole) is whole


def test_padding_of_a_decoder_taken_as_work_counts_too() -> None:
    def work(lengths: list[int], read: list[int]) -> Workload:
        inputs = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, 4, dtype=torch.long)}
        masks = {"attention_mask": (read, 6), "decoder_attention_mask": (lengths, 4)}
        for name, (own, padded_to) in masks.items():
            inputs[name] = (torch.arange(padded_to) < torch.tensor(own)[:, None]).long()
        return workload_of(inputs, Needs(has_decoder=True))

    assert as_if_unpadded(work([4, 1], [6, 2])) == work([4, 4], [6, 6])
    assert as_if_unpadded(work([4, 1], [6, 6])) == work([4, 4], [6, 6])


def test_without_calibration_the_closed_form_stays_as_it_is() -> None:
    family = FAMILIES["llama"]
    case = family.build(lambda: family.batch(*OBSERVED))
    plan = plan_of(case.model)
    predictor = Predictor(plan, "exact", is_calibrated=False)
    workload = Workload.of_lengths(*OBSERVED)
    with observe(case.model) as step:
        case.step()
    predictor.learn(step.result(), workload)
    assert predictor.predict(workload).method == "estimate"
    assert predictor.error is not None

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
from flopmeter import CountError, count_flops
from flopmeter.flops.estimate import read_leaves
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.observe import observe
from flopmeter.flops.prediction import Law, Predictor
from flopmeter.flops.workload import Workload, needs_of, workload_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the models' own libraries

TOLERANCE = 1e-3
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


def observed(family: Family, convention: Convention) -> tuple[Law, Any]:
    case = family.build(lambda: family.batch(*OBSERVED))
    with observe(case.model) as step:
        case.step()
    count = step.result(convention)
    assert count.workload == workload_of(family.batch(*OBSERVED), needs_of(case.model))
    return Law.of(count, count.workload), case.model


def predicted(law: Law, model: Any, batch: dict[str, Any]) -> float:
    return sum(law.at(workload_of(batch, needs_of(model))).model.values())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("convention", ["exact", "full"])
def test_a_step_of_another_size_follows_from_one_observed_step(name: str, convention: Convention) -> None:
    family = FAMILIES[name]
    law, model = observed(family, convention)
    for lengths, padded_to in [OBSERVED, *WANTED.values()]:
        expected = getattr(family.truth(lengths, padded_to), convention).model_flop
        assert relative_error(predicted(law, model, family.batch(lengths, padded_to)), expected) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_follows_from_a_count_on_shapes(name: str) -> None:
    family = FAMILIES[name]
    model = family.build(lambda: family.batch(*OBSERVED)).model
    count = count_flops(model, family.batch(*OBSERVED))
    assert count.workload is not None
    law = Law.of(count, count.workload)
    for lengths, padded_to in WANTED.values():
        expected = family.truth(lengths, padded_to).exact.model_flop
        assert relative_error(predicted(law, model, family.batch(lengths, padded_to)), expected) < TOLERANCE


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
    law, model = observed(FAMILIES[name], "exact")
    documents, padded_to = [[30, 50], [80]], 80
    expected = PACKED[name](truth.packed(documents, padded_to)).exact.model_flop
    assert relative_error(predicted(law, model, cases.packed_text(documents, padded_to, rows.VOCAB)), expected) < 1e-9


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 90,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SPEECH = {
    "vocab_size": 90, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_source_positions": 40, "max_target_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
}  # fmt: skip


def ids(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(rows, length, dtype=torch.long)}


def speech(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.zeros(rows, 8, 80), "labels": torch.ones(rows, length, dtype=torch.long)}


def pixels(rows: int, side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(rows, 3, side, side)}


OTHERS: dict[str, tuple[str, dict[str, Any], Any, tuple[int, int], list[tuple[int, int]]]] = {
    # Every second layer has a window, which the counted text does not reach.
    "windows beyond the text": (
        "gemma2",
        SMALL | {"sliding_window": 24, "head_dim": 16},
        ids,
        (2, 20),
        [(3, 60)],
    ),
    "windows to either side": ("modernbert", SMALL | {"local_attention": 16}, ids, (2, 40), [(2, 70), (5, 40)]),
    "a decoder that hears": ("whisper", SPEECH, speech, (2, 6), [(2, 25), (5, 6)]),
    "windows of an image": ("swin", SWIN, pixels, (2, 64), [(2, 128), (7, 64)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_kinds_follow_without_a_rule_for_them(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, numbers, batch, first, wanted = OTHERS[name]
    heads = {"whisper": "SpeechSeq2Seq", "swin": "ImageClassification", "modernbert": "MaskedLM"}
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{heads.get(model_type, 'CausalLM')}").from_config(config)
    count = count_flops(model, batch(*first))
    assert count.workload is not None
    law = Law.of(count, count.workload)
    for sizes in wanted:
        assert predicted(law, model, batch(*sizes)) == pytest.approx(
            count_flops(model, batch(*sizes)).model_flop, rel=1e-6
        )


def test_the_published_error_is_that_of_the_prediction_that_was_tested() -> None:
    family = FAMILIES["llama"]
    case = family.build(lambda: family.batch(*OBSERVED))
    predictor, needs = Predictor(read_leaves(case.model)), needs_of(case.model)
    counts = []
    for lengths, padded_to in (OBSERVED, WANTED["padded"]):
        batch = family.batch(lengths, padded_to)
        promised = predictor.predict(workload_of(batch, needs))
        with observe(case.model) as step:
            case.model(**batch).loss.backward()
        counts.append(step.result())
        assert promised is not None
        ratio = sum(promised.model.values()) / counts[-1].model_flop
        error = predictor.learn(counts[-1], workload_of(batch, needs))
        if len(counts) == 1:  # the estimate's: nothing had been counted
            assert (error, predictor.calibration) == (None, pytest.approx(1 / ratio))
    assert error == pytest.approx(ratio - 1)
    found = predictor.predict(workload_of(batch, needs))
    assert found is not None
    assert sum(found.model.values()) == counts[-1].model_flop  # its own count, from now on


def test_padding_taken_as_work_is_the_batch_without_padding() -> None:
    law, model = observed(FAMILIES["mistral with a window"], "exact")
    needs = needs_of(model)
    padded, whole = (workload_of(text(lengths, 96), needs) for lengths in ([96, 17, 50], [96] * 3))
    assert law.at(padded).processed == pytest.approx(law.at(whole).model)
    assert law.at(whole).processed == law.at(whole).model


def test_padding_of_a_decoder_taken_as_work_counts_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    needs = needs_of(model)

    def batch(written: list[int], read: list[int]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, 4, dtype=torch.long)}
        for name, (own, padded_to) in {"attention_mask": (read, 6), "decoder_attention_mask": (written, 4)}.items():
            inputs[name] = (torch.arange(padded_to) < torch.tensor(own)[:, None]).long()
        return inputs

    count = count_flops(model, batch([4, 1], [6, 2]))
    assert count.workload is not None
    law, whole = Law.of(count, count.workload), count_flops(model, batch([4, 4], [6, 6]))
    for padded in (batch([4, 1], [6, 2]), batch([4, 1], [6, 6])):
        assert sum(law.at(workload_of(padded, needs)).processed.values()) == pytest.approx(whole.model_flop)
    assert sum(law.at(workload_of(batch([3, 2], [5, 5]), needs)).model.values()) == pytest.approx(
        count_flops(model, batch([3, 2], [5, 5])).model_flop
    )


def test_a_kind_of_input_that_was_not_counted_is_unknown_and_not_nothing() -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = family.build(lambda: family.batch(*OBSERVED)).model
    needs = needs_of(model)
    count = count_flops(model, text(*OBSERVED))
    pictures = workload_of(family.batch(*OBSERVED), needs)
    alone, estimated = Predictor(None), Predictor(read_leaves(model))
    for predictor in (alone, estimated):
        predictor.learn(count, workload_of(text(*OBSERVED), needs))
    assert alone.predict(pictures) is None
    found = estimated.predict(pictures)
    assert found is not None
    assert relative_error(sum(found.model.values()), family.truth(*OBSERVED).exact.model_flop) < TOLERANCE


def test_without_calibration_the_estimate_stays_as_it_is() -> None:
    family = FAMILIES["llama"]
    case = family.build(lambda: family.batch(*OBSERVED))
    predictor = Predictor(read_leaves(case.model), is_calibrated=False)
    workload = Workload.of_lengths(*OBSERVED)
    before = predictor.predict(workload)
    with observe(case.model) as step:
        case.step()
    predictor.learn(step.result(), workload)
    after = predictor.predict(workload)
    assert before is not None
    assert after is not None
    assert after[:3] == before[:3]
    assert predictor.error is not None


def image_step(rows: int, side: int, flop: float) -> tuple[FlopCount, Workload]:
    """A step over square images of three channels, all of whose FLOPs are said to grow with their values."""
    values = rows * 3 * side * side
    workload = Workload(samples=rows, images=rows, values=values, shape=((("input", rows, 3, side, side),),))
    growth = {name: {"float32": {"values": flop}} for name in ("exact", "full", "hardware")}
    return FlopCount.of({"forward": flop}, growth, "exact", workload=workload), workload


def learnt(*steps: tuple[int, int, float]) -> Predictor:
    predictor = Predictor(None)
    for step in steps:
        predictor.learn(*image_step(*step))
    return predictor


def foretold(predictor: Predictor, rows: int, side: int) -> tuple[float, float | None]:
    found = predictor.predict(image_step(rows, side, 0.0)[1])
    assert found is not None
    return found.model["fp32"], found.error


def test_a_step_is_known_where_its_shape_was_counted_and_untested_where_no_second_count_was_made() -> None:
    predictor = learnt((2, 8, 100.0))
    assert foretold(predictor, 2, 8) == (100.0, 0.0)
    assert foretold(predictor, 4, 8) == (200.0, None)
    assert not predictor.is_known(image_step(4, 8, 0.0)[1].shape)


def test_a_count_proves_the_law_for_what_had_changed_and_for_nothing_else() -> None:
    predictor = learnt((2, 8, 100.0), (4, 8, 200.0), (3, 8, 150.0), (5, 8, 250.0))  # other batches
    assert not predictor.is_known(image_step(8, 8, 0.0)[1].shape)  # three tests may have been passed by luck
    predictor.learn(*image_step(6, 8, 300.0))
    assert foretold(predictor, 8, 8) == (pytest.approx(400.0), 0.0)
    assert predictor.is_known(image_step(8, 8, 0.0)[1].shape)
    assert foretold(predictor, 4, 16)[1] is None  # another size was never tested
    for side in (16, 24, 12):
        predictor.learn(*image_step(6, side, 300.0 * (side / 8) ** 2))
        assert predictor.error == pytest.approx(0.0)
        assert foretold(predictor, 1, 32) == (pytest.approx(800.0), None)  # too few tests of the size yet
    predictor.learn(*image_step(6, 20, 1875.0))
    assert foretold(predictor, 1, 32) == (pytest.approx(800.0), 0.0)


def test_where_the_law_fails_each_shape_that_was_counted_is_known_and_others_say_by_how_much_it_was_off() -> None:
    batches = [(rows, 8, 50.0 * rows) for rows in (2, 3, 4, 5, 6)]
    predictor = learnt(*batches, (4, 16, 1600.0))  # twice as much as four times the values say
    assert foretold(predictor, 4, 16)[1] is not None  # it may differ from step to step, as far as is known
    assert foretold(predictor, 4, 16)[1] != 0.0
    for again in ((4, 16, 1600.0), (4, 8, 200.0), (4, 16, 1600.0)):
        assert foretold(predictor, 4, 16)[1] != 0.0  # equal counts may be luck
        predictor.learn(*image_step(*again))
    assert foretold(predictor, 4, 16) == (1600.0, 0.0)
    assert foretold(predictor, 1, 16) == (pytest.approx(400.0), 0.0)  # the batch alone is proven
    assert foretold(predictor, 1, 8) == (pytest.approx(50.0), 0.0)
    flop, error = foretold(predictor, 4, 14)
    assert (flop, error) == (pytest.approx(1600.0 * 14**2 / 16**2), pytest.approx(0.5))  # from what is most alike
    assert not predictor.is_known(image_step(4, 14, 0.0)[1].shape)


def test_steps_of_one_shape_that_differ_leave_nothing_proven() -> None:
    predictor = learnt((2, 8, 100.0), (4, 8, 200.0), (4, 8, 100.0))
    assert foretold(predictor, 4, 8) == (pytest.approx(150.0), pytest.approx(1.0))
    assert predictor.difference == pytest.approx(100 / 150)


def test_an_optimizers_products_stand_for_other_steps_once_two_counts_have_them() -> None:
    predictor = Predictor(None)
    for expected in (100.0, 130.0):
        count, workload = image_step(2, 8, 100.0)
        count.growth["hardware"]["float32"]["once"] = 30.0  # type: ignore[index]
        predictor.learn(count, workload)
        found = predictor.predict(workload)
        assert found is not None
        assert found.hardware == {"fp32": expected}


def test_a_count_says_what_other_batches_take() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 2))
    count = count_flops(model, (torch.randn(4, 6),)).at((torch.randn(32, 6),))
    first, second = 2 * 32 * 6 * 10, 2 * 32 * 10 * 2
    assert count.forward_flop == first + second
    assert count.backward_flop == first + 2 * second  # no gradient of the input is wanted
    assert count.by_dtype == {"float32": 2 * first + 3 * second}


def test_another_batch_is_read_as_the_one_that_was_counted() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32)  # the sequence comes first, as torch has it by default
    model = torch.nn.Sequential(layer)
    count = count_flops(model, (torch.randn(8, 2, 16),)).at((torch.randn(32, 2, 16),))
    linears = 2 * 32 * 2 * (4 * 16 * 16 + 2 * 16 * 32)
    attention = 2 * 2 * 2 * 32 * 32 * 16
    assert count.forward_flop == linears + attention
    llama = FAMILIES["llama"].build(lambda: text(*OBSERVED)).model
    expected = FAMILIES["llama"].truth([200] * 3, 200).exact.model_flop
    assert relative_error(count_flops(llama, text(*OBSERVED)).at((3, 200)).model_flop, expected) < TOLERANCE


@pytest.mark.parametrize("sizes", [(1, 16), (4, 64), (3, 33), (8, 128), (2, 7)])
@pytest.mark.parametrize("how", ["all of it", "one weight", "checkpointed"])
def test_the_law_gives_what_counting_gives(how: str, sizes: tuple[int, int]) -> None:
    model = FAMILIES["llama"].build(lambda: text(*OBSERVED)).model
    if how == "one weight":  # products with a weight have half the backward pass, those of attention all of it
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("layers.0.self_attn.q_proj.weight"))
    elif how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    foretold, counted = count_flops(model, (2, 64)).at(sizes), count_flops(model, sizes)
    assert (counted.recompute_flop > 0) is (how == "checkpointed")
    for name in ("forward_flop", "backward_flop", "recompute_flop", "hardware_flop", "by_dtype"):
        assert getattr(foretold, name) == pytest.approx(getattr(counted, name), rel=1e-12)


def test_the_law_takes_lengths_for_who_balances_micro_batches() -> None:
    model = FAMILIES["llama"].build(lambda: text(*OBSERVED)).model
    count, lengths = count_flops(model, (2, 64)), [70, 9, 31]
    alone = [count.at((1, length)).model_flop for length in lengths]
    assert count.at(lengths=lengths).model_flop == pytest.approx(sum(alone))
    with pytest.raises(TypeError):
        count.at((1, 8), lengths=lengths)


def test_a_count_without_images_says_nothing_of_them() -> None:
    model = torch.nn.Linear(6, 2)
    count = count_flops(model, (torch.randn(4, 6),))
    with pytest.raises(CountError, match="tokens"):
        count.at((2, 30))

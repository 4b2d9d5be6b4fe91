"""Inputs are built from what a model says about itself; expected shapes come from the configs, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.count import count_flops
from flopmeter.flops.inputs import build_inputs

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {**TEXT, "image_size": 28, "patch_size": 7}
SPEECH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def described(head: str, model_type: str, **numbers: Any) -> nn.Module:
    """A transformers model of the meta device."""
    transformers = pytest.importorskip("transformers", reason="builds a transformers model from its config")
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, head).from_config(config, dtype=torch.bfloat16)
    return model


def shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def test_a_language_model_gets_tokens_and_labels_and_no_cache() -> None:
    inputs = build_inputs(described("AutoModelForCausalLM", "llama", vocab_size=96, **TEXT), 2, 5)

    assert shapes(inputs) == {"input_ids": (2, 5), "labels": (2, 5), "use_cache": False}
    assert inputs["input_ids"].device.type == "cpu"
    assert not inputs["input_ids"].is_floating_point()


def test_tokens_are_none_of_the_special_ones() -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 4]}
    inputs = build_inputs(described("AutoModelForCausalLM", "llama", vocab_size=96, **special, **TEXT), 2, 5)

    assert set(inputs["input_ids"].flatten().tolist()) == {3}


def test_an_adapter_is_called_as_the_model_that_it_adapts() -> None:
    peft = pytest.importorskip("peft", reason="wraps a model in adapters")
    model = described("AutoModelForCausalLM", "llama", vocab_size=96, **TEXT)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    assert shapes(build_inputs(adapted, 2, 5)) == {"input_ids": (2, 5), "labels": (2, 5), "use_cache": False}


def test_a_masked_language_model_gets_labels_for_each_token() -> None:
    model = described("AutoModelForMaskedLM", "bert", vocab_size=96, **TEXT)

    assert shapes(build_inputs(model, 2, 5)) == {"input_ids": (2, 5), "labels": (2, 5)}


def test_a_classifier_gets_one_label_for_each_sample() -> None:
    model = described("AutoModelForSequenceClassification", "bert", vocab_size=96, **TEXT)

    assert shapes(build_inputs(model, 2, 5)) == {"input_ids": (2, 5), "labels": (2,)}


def test_the_decoder_of_a_pair_is_as_long_as_its_encoder() -> None:
    sizes = {"vocab_size": 96, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    both = {"input_ids": (2, 5), "decoder_input_ids": (2, 5)}
    with_head = described("AutoModelForSeq2SeqLM", "t5", **sizes)
    without = described("AutoModel", "t5", **sizes)

    assert shapes(build_inputs(with_head, 2, 5)) == {**both, "labels": (2, 5), "use_cache": False}
    assert shapes(build_inputs(without, 2, 5)) == {**both, "use_cache": False}


def test_an_image_has_the_size_that_the_config_names() -> None:
    model = described("AutoModelForImageClassification", "vit", num_channels=4, **VISION)
    inputs = build_inputs(model, 2, 5)

    assert shapes(inputs) == {"pixel_values": (2, 4, 28, 28), "labels": (2,)}
    assert inputs["pixel_values"].dtype == torch.bfloat16


def test_two_towers_get_text_and_image() -> None:
    parts = {"text_config": {**TEXT, "vocab_size": 96}, "vision_config": VISION}

    assert shapes(build_inputs(described("AutoModel", "clip", **parts), 2, 5)) == {
        "input_ids": (2, 5),
        "pixel_values": (2, 3, 28, 28),
    }


def qwen(**vision: Any) -> nn.Module:
    text = {**TEXT, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 1024}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32, **vision}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    return described("AutoModelForImageTextToText", "qwen2_5_vl", text_config=text, vision_config=tower, **ids)


def test_an_image_of_448_pixels_is_cut_into_patches_and_stands_in_the_text() -> None:
    inputs = build_inputs(qwen(), 2, 300)

    # 448 / 14 = 32 patches on a side, each of 3 channels x 2 frames x 14 x 14 pixels; 2 x 2 of them become a token.
    assert inputs["pixel_values"].shape == (2 * 32 * 32, 3 * 2 * 14 * 14)
    assert inputs["image_grid_thw"].tolist() == [[1, 32, 32]] * 2
    is_image = inputs["input_ids"] == 90
    assert is_image.sum(1).tolist() == [16 * 16] * 2
    assert torch.equal(inputs["mm_token_type_ids"].bool(), is_image)
    assert not is_image[:, 0].any()


def test_a_text_too_short_for_its_image_is_refused() -> None:
    with pytest.raises(CountError, match="a length of 256 is too short: one image takes 256 tokens"):
        build_inputs(qwen(), 1, 256)


def test_the_vision_tower_is_asked_how_many_tokens_an_image_takes() -> None:
    parts = {"text_config": {**TEXT, "model_type": "llama", "vocab_size": 96}, "image_token_index": 90}
    tower = {**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 2}
    model = described("AutoModelForImageTextToText", "llava", vision_config=tower, **parts)
    inputs = build_inputs(model, 2, 40)

    assert inputs["pixel_values"].shape == (2, 3, 28, 28)
    assert (inputs["input_ids"] == 90).sum(1).tolist() == [(28 // 7) ** 2] * 2
    assert count_flops(model, inputs).method == "meta"


def test_whisper_hears_thirty_seconds_and_writes_the_length() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 96}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 3)
    model = described("AutoModelForSpeechSeq2Seq", "whisper", decoder_attention_heads=4, **sizes, **special)

    assert shapes(build_inputs(model, 2, 5)) == {
        "input_features": (2, 80, 3000),
        "decoder_input_ids": (2, 5),
        "labels": (2, 5),
        "use_cache": False,
    }


def test_sound_waves_are_as_long_as_the_positions_they_become() -> None:
    model = described("AutoModelForCTC", "wav2vec2", num_conv_pos_embedding_groups=2, **SPEECH)
    samples = build_inputs(model, 2, 5)["input_values"].shape[1]

    for kernel, stride in zip((10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2), strict=True):
        samples = (samples - kernel) // stride + 1
    assert samples == 5


class Net(nn.Module):
    """Its first layer tells what it takes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


FIRST_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "embedding": (lambda: nn.Embedding(10, 4), (2, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 6)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 3), (2, 3, 6, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
    "linear": (lambda: nn.Linear(5, 4), (2, 6, 5)),
    "norm, then linear": (lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 4)), (2, 6, 5)),
    "linear, then batch norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (2, 5)),
    "flatten, then linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 4)), (2, 5)),
}


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_a_plain_module_takes_what_its_first_layer_takes(name: str) -> None:
    make, shape = FIRST_LAYERS[name]
    model = Net(make())
    inputs = build_inputs(model, 2, 6)

    assert shapes(inputs) == {"x": shape}
    model(**inputs)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_net_gets_steps_in_its_own_order(batch_first: bool) -> None:
    model = nn.LSTM(5, 4, batch_first=batch_first)

    assert shapes(build_inputs(model, 2, 6)) == {"input": (2, 6, 5) if batch_first else (6, 2, 5)}


class Losing(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(super().forward(x).flatten(0, -2), labels.flatten()) * scale


def test_labels_that_a_module_insists_on_go_with_its_input() -> None:
    tokens = Losing(nn.Embedding(10, 4), nn.Linear(4, 10))
    images = Losing(nn.Conv2d(3, 4, 6), nn.Flatten())

    assert shapes(build_inputs(tokens, 2, 6)) == {"x": (2, 6), "labels": (2, 6)}
    assert shapes(build_inputs(images, 2, 6)) == {"x": (2, 3, 6, 6), "labels": (2,)}
    tokens(**build_inputs(tokens, 2, 6))


def test_inputs_have_the_dtype_of_the_parameters() -> None:
    assert build_inputs(Net(nn.Linear(5, 4)).half(), 1, 1)["x"].dtype == torch.float16


class Two(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Two(), "its forward takes left, right; pass a batch as a dict, {'left': ..., 'right': ...}"),
        (Net(nn.ReLU()), "it has no layer whose input is known; pass a batch as a dict, {'x': ...}"),
    ],
)
def test_what_cannot_be_guessed_is_asked_for_by_name(model: nn.Module, reason: str) -> None:
    with pytest.raises(CountError) as refusal:
        build_inputs(model, 2, 6)

    assert str(refusal.value) == f"the inputs of {type(model).__name__} cannot be guessed: {reason}"


def test_a_transformers_model_of_an_unknown_kind_is_asked_for_by_name() -> None:
    model = described("AutoModel", "encodec")

    with pytest.raises(CountError, match=r"EncodecModel cannot be guessed: .*pass a batch as a dict, \{'input_values'"):
        build_inputs(model, 2, 6)


@pytest.mark.parametrize("sizes", [(-1, 4), (4, -1)])
def test_negative_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(CountError, match="must not be negative"):
        build_inputs(Net(nn.Linear(5, 4)), *sizes)


def test_building_draws_no_random_number() -> None:
    models = [Net(nn.Linear(5, 4)), described("AutoModelForCausalLM", "llama", vocab_size=96, **TEXT)]
    before = torch.get_rng_state()
    for model in models:
        build_inputs(model, 2, 6)

    assert torch.equal(torch.get_rng_state(), before)

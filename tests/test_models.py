"""Models by name: published parameter counts tell whether the right one was built, and refusals name the cure."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter.errors import ConfigError, CountError, MissingLibraryError
from flopmeter.flops.models import load_model

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="builds transformers models from configs"
)
LLAMA = "llama:layers=2,hidden=64,heads=8,kv_heads=2,ffn=96,vocab=1000"
# Embedding and lm_head, and in each layer: queries and output, keys and values, three MLP matrices, two norms.
LLAMA_PARAMETERS = 2 * 1000 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64) + 64


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@needs_transformers
def test_a_type_with_short_names_is_built_without_weights() -> None:
    model: Any = load_model(LLAMA)

    assert num_parameters(model) == LLAMA_PARAMETERS
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert model.config._attn_implementation == "sdpa"


# Parameters as their publishers print them: arXiv:2407.21783 table 3 (rounded), DeepSeek-V3's model card (671B without
# the extra prediction layer), Mixtral's (141B), Qwen2.5-VL's (73.4B), GPT-3's paper (175B), Llama 2's (6.74B).
PUBLISHED = {
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "llama-3.1-405b": 405.9e9,
    "mixtral-8x22b": 140.6e9,
    "mixtral-8x7b": 46.7e9,
    "mistral-7b": 7.24e9,
    "deepseek-v3": 671.0e9,
    "qwen2.5-vl-72b": 73.4e9,
    "llama-2-7b": 6.74e9,
    "gpt-3-175b": 174.6e9,
}


@needs_transformers
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_name_gives_the_published_size(name: str) -> None:
    assert num_parameters(load_model(name)) == pytest.approx(PUBLISHED[name], rel=2e-3)


@needs_transformers
def test_a_published_model_can_be_changed() -> None:
    model: Any = load_model("LLaMA-3-70b:layers=2")

    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 8192)


@needs_transformers
def test_a_config_file_and_its_folder_are_the_model_that_they_describe(tmp_path: Path) -> None:
    content = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "dtype": "float32",
               "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
               "intermediate_size": 96, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    by_file, by_folder = load_model(str(tmp_path / "config.json")), load_model(str(tmp_path))
    changed: Any = load_model(f"{tmp_path}:layers=3")

    assert type(by_file).__name__ == type(by_folder).__name__ == "LlamaForSequenceClassification"
    assert {p.dtype for p in by_file.parameters()} == {torch.float32}
    assert changed.config.num_hidden_layers == 3


@needs_transformers
@pytest.mark.parametrize(
    ("spec", "class_name"),
    [
        ("gpt2:layers=1", "GPT2LMHeadModel"),
        ("bert:layers=1", "BertForMaskedLM"),
        ("t5:layers=1", "T5ForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("wav2vec2:layers=1", "Wav2Vec2ForCTC"),
        ("vit:layers=1", "ViTForImageClassification"),
        ("clip", "CLIPModel"),
        ("qwen2_5_vl:layers=1", "Qwen2_5_VLForConditionalGeneration"),
        ("mixtral:layers=1", "MixtralForCausalLM"),
    ],
)
def test_a_type_is_built_as_it_is_trained(spec: str, class_name: str) -> None:
    assert type(load_model(spec)).__name__ == class_name


@needs_transformers
def test_names_are_found_under_the_configs_own_spelling() -> None:
    gpt2: Any = load_model("gpt2:layers=2,hidden=96,heads=4,ffn=200,vocab=500").config
    moe: Any = load_model(
        "deepseek_v3:layers=2,hidden=64,experts=8,active_experts=2,expert_ffn=16,dense_layers=1"
    ).config

    assert (gpt2.n_layer, gpt2.n_embd, gpt2.n_head, gpt2.n_inner, gpt2.vocab_size) == (2, 96, 4, 200, 500)
    assert (moe.n_routed_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (8, 2, 16)
    assert moe.first_k_dense_replace == 1


@needs_transformers
def test_parts_of_a_config_are_reached_by_dots_and_sizes_go_to_the_text() -> None:
    config: Any = load_model(
        "qwen2_5_vl:layers=3,vision_config.depth=2,text_config.vocab_size=160000,vision_config.fullatt_block_indexes=[0,1]"
    ).config

    assert (config.text_config.num_hidden_layers, config.text_config.vocab_size) == (3, 160000)
    assert (config.vision_config.depth, config.vision_config.fullatt_block_indexes) == (2, [0, 1])


@needs_transformers
def test_derived_settings_follow_what_they_derive_from() -> None:
    config: Any = load_model("llama:layers=1,hidden=64,heads=4,kv_heads=4,tied=true").config

    assert (config.head_dim, config.tie_word_embeddings) == (16, True)


@needs_transformers
def test_a_depth_drawn_at_random_is_fixed() -> None:
    config: Any = load_model("wav2vec2:layers=1,layerdrop=0.3").config

    assert config.layerdrop == 0


@needs_transformers
def test_the_dtype_can_be_chosen() -> None:
    assert {p.dtype for p in load_model(LLAMA, dtype=torch.float16).parameters()} == {torch.float16}


@needs_transformers
def test_checkpointing_is_switched_on_where_it_exists() -> None:
    model: Any = load_model(LLAMA, checkpointing=True)

    assert model.is_gradient_checkpointing
    with pytest.raises(CountError, match="Linear offers no activation checkpointing"):
        load_model("test_models:small", checkpointing=True)


@needs_transformers
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lama:layers=1", "did you mean 'llama'?"),
        ("llama-3-70", "did you mean 'llama-3-70b'?"),
        ("zzzzzz", "name a config.json, or package.module:function"),
        ("llama:hiden=64", "a 'llama' model has no setting 'hiden': did you mean 'hidden'?"),
        ("llama:num_hidden_layer=1", "did you mean 'num_hidden_layers'?"),
        ("llama:qqqqqq=1", "short names are layers, hidden"),
        ("qwen2_5_vl:vision_confg.depth=1", "no setting 'vision_confg': did you mean 'vision_config'?"),
        ("llama:layers=1,layers=2", "layers is given twice"),
        ("llama:layers=1,,hidden=2", "'' in 'llama:layers=1,,hidden=2' is not of the form key=value"),
        ("llama:layers=", "'layers=' in 'llama:layers=' is not of the form key=value"),
        ("llama:layers=many", "do not fit together"),
    ],
)
def test_slips_are_refused_with_the_nearest_name(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_model(spec)

    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@needs_transformers
def test_sizes_that_no_model_can_have_are_refused() -> None:
    with pytest.raises((ConfigError, CountError)) as refusal:
        load_model("gpt2:hidden=64,heads=7")

    assert "\n" not in str(refusal.value)


@needs_transformers
@pytest.mark.parametrize("content", ["[1, 2]", "{not json", '{"hidden_size": 3}'])
def test_a_file_that_is_no_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_without_transformers_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.flops.models.find_spec", lambda name: None)

    with pytest.raises(MissingLibraryError, match=r"pip install 'flopmeter\[transformers\]'"):
        load_model("llama")


def small() -> nn.Module:
    """A factory for the tests below."""
    return nn.Linear(3, 4, dtype=torch.float64)


def masked() -> nn.Module:
    model = nn.Linear(3, 4)
    model.register_buffer("mask", torch.tril(torch.ones(5, 5)))
    model.register_buffer("positions", torch.arange(5))
    return model


module = nn.Linear(3, 4)


def number() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("no\nway")


def test_a_factory_is_called_without_allocating_and_its_model_kept_as_built() -> None:
    model = load_model("test_models:small")

    assert [(p.device.type, p.dtype) for p in model.parameters()] == [("meta", torch.float64)] * 2
    assert next(load_model("test_models:small", dtype=torch.float16).parameters()).dtype == torch.float16


def test_a_module_may_be_named_itself() -> None:
    assert load_model("test_models:module") is sys.modules["test_models"].module
    assert not sys.modules["test_models"].module.weight.is_meta


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(torch.ones(3, 3))
    return model


def test_weights_that_begin_as_ones_are_dropped_too_and_tied_ones_stay_tied() -> None:
    model: Any = load_model("test_models:tied")

    assert model[0].weight is model[1].weight
    assert model[0].weight.is_meta


def test_masks_and_positions_of_a_factory_keep_their_values() -> None:
    model = load_model("test_models:masked")

    assert model.mask.sum() == 15
    assert model.positions.tolist() == [0, 1, 2, 3, 4]


def test_the_current_directory_is_importable_for_the_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)

    assert isinstance(load_model("only_here:build"), nn.Linear)
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("test_models:number", "gives a int, not a torch.nn.Module"),
        ("test_models:broken", "gives no model: RuntimeError: no way"),
        ("test_models:absent", "AttributeError"),
        ("no_such_package.models:build", "ModuleNotFoundError"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(CountError) as refusal:
        load_model(spec)

    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)

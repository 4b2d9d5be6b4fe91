"""Appending padding changes no exact count, or the count says that it may: tiny models of transformers.

A model is run twice, on two texts of different lengths and on the same texts with more padding behind. What it sees
beside the text (images, sounds) is the same, and has as much work in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flopmeter.flops.count import loss_of
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.observe import observe

transformers = pytest.importorskip("transformers", reason="the models are those of transformers, built from configs")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the models' own libraries

LENGTHS, SHORT, LONG = (24, 15), 24, 36
IMAGE, SOUND, VOCABULARY = 98, 97, 99
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "projection_dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads"), 4),
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": VOCABULARY, "image_size": 16, "patch_size": 8,
    "max_position_embeddings": 128, "n_positions": 128, "ffn_hidden_size": 48, "hidden_dim": 32, "rotary_dim": 8,
    "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "embedding_size": 32, "decoder_start_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "layer_types": None, "patch_embeds_hidden_size": 4,
    "hidden_dropout_prob": 0.0, "dropout": 0.0,
    "max_seq_len": 128, "type_vocab_size": 2, "out_hidden_size": 32, "mlp_dim": 48,
    "num_encoder_blocks": 2, "output_hidden_size": 32, "word_embed_proj_dim": 32,
    "image_token_id": IMAGE, "image_token_index": IMAGE, "audio_token_id": SOUND, "audio_token_index": SOUND,
    "projection_size": 32, "encoder_hidden_size": 32, "visual_embedding_dim": 32, "visual_feat_dim": 32,
    "max_source_positions": 8, "encoder_dim": 32, "num_mel_bins": 64, "latent_query_num": 4,
    "mm_tokens_per_image": 4, "resampler_n_latents": 4,
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def shrink(config: Any, **own: Any) -> Any:
    """The config with small numbers in place of its own, in its parts too."""
    for name, value in vars(config).copy().items():
        if hasattr(value, "to_dict") and name != "generation_config":
            shrink(value)
        elif isinstance(value, dict) and "mrope_section" in value:
            value["mrope_section"] = [2, 1, 1]
        elif name == "image_grid_pinpoints":
            config.image_grid_pinpoints = [[16, 32]]
        elif name in SIZES and not isinstance(value, (list, tuple, dict)):
            setattr(config, name, SIZES[name])
    for name, value in own.items():
        setattr(config, name, value)
    return config


def texts(padded_to: int, prefix: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (len(LENGTHS), SHORT), generator=generator)
    mask = (torch.arange(padded_to) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.nn.functional.pad(ids, (0, padded_to - SHORT)) * mask
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}


def both_texts(padded_to: int) -> dict[str, torch.Tensor]:
    return texts(padded_to) | texts(padded_to, "decoder_")


Inputs = Callable[[int], dict[str, torch.Tensor]]


def beside(**others: tuple[int, ...]) -> Inputs:
    """A text and tensors of these sizes."""
    return lambda padded_to: texts(padded_to) | {name: torch.ones(size) for name, size in others.items()}


def within(num_tokens: int, token: int = IMAGE, **others: tuple[int, ...]) -> Inputs:
    """A text in which so many places in each sample are filled from another tensor."""

    def inputs(padded_to: int) -> dict[str, torch.Tensor]:
        batch = beside(**others)(padded_to)
        batch["input_ids"][:, 1 : 1 + num_tokens] = token
        return batch

    return inputs


def tiles(padded_to: int) -> dict[str, torch.Tensor]:
    """An image of 16 x 32: the whole and two tiles of four patches each, and a newline for each row of patches."""
    sizes = torch.tensor([[16, 32], [16, 32]])
    return within(14, pixel_values=(2, 3, 3, 16, 16))(padded_to) | {"image_sizes": sizes}


def instructed(padded_to: int) -> dict[str, torch.Tensor]:
    """The instruction is read twice, once by what queries the image."""
    batch = within(4, **PIXELS)(padded_to)
    return batch | {f"qformer_{name}": value.clamp(max=90) for name, value in texts(padded_to).items()}


def grids(padded_to: int) -> dict[str, torch.Tensor]:
    """Two images of 4 x 4 patches, of which each four become one token."""
    batch = within(4, pixel_values=(32, 3 * 2 * 8 * 8))(padded_to)
    kinds = (batch["input_ids"] == IMAGE).int()
    return batch | {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": kinds}


def heard(padded_to: int) -> dict[str, torch.Tensor]:
    """A sound of 16 frames, of which four become one token."""
    batch = within(4, SOUND, input_features=(2, 64, 16))(padded_to)
    name = "feature_attention_mask"
    return batch | {name: torch.ones(2, 16, dtype=torch.long)}


def heard_with_a_mask(padded_to: int) -> dict[str, torch.Tensor]:
    batch = heard(padded_to)
    return batch | {"input_features_mask": batch.pop("feature_attention_mask")}


def placed(padded_to: int) -> dict[str, torch.Tensor]:
    batch = within(4, token=7, **PIXELS)(padded_to)
    places = torch.zeros_like(batch["input_ids"])
    places[:, 1:5] = 1
    return batch | {"image_embeds_position_mask": places}


PIXELS = {"pixel_values": (2, 3, 16, 16)}
TEXT = (
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "RobertaForMaskedLM",
    "DistilBertForMaskedLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GPTJForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "CohereForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "ElectraForMaskedLM",
    "AlbertForMaskedLM",
    "MPNetForMaskedLM",
    "MobileBertForMaskedLM",
    "ModernBertForMaskedLM",
    "XLMRobertaForMaskedLM",
    "CamembertForMaskedLM",
    "ErnieForMaskedLM",
    "NomicBertModel",
    "BioGptForCausalLM",
    "XGLMForCausalLM",
    "CodeGenForCausalLM",
    "SmolLM3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "NemotronForCausalLM",
    "PersimmonForCausalLM",
    "JetMoeForCausalLM",
    "OlmoeForCausalLM",
    "DebertaForMaskedLM",
    "DebertaV2ForMaskedLM",
    "RoFormerForMaskedLM",
    "SqueezeBertForMaskedLM",
    "GPTBigCodeForCausalLM",
    "HeliumForCausalLM",
    "XLMForSequenceClassification",
    "XLNetLMHeadModel",
    "MambaForCausalLM",
    "FunnelForMaskedLM",
    "CpmAntForCausalLM",
    "LayoutLMForMaskedLM",
)
TWO_TEXTS = (
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "MBartForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "BlenderbotForConditionalGeneration",
    "MarianMTModel",
    "UMT5ForConditionalGeneration",
    "ProphetNetForConditionalGeneration",
    "LEDForConditionalGeneration",
    "LongT5ForConditionalGeneration",
    "PegasusXForConditionalGeneration",
)
OTHERS: dict[str, Inputs] = {
    **dict.fromkeys(
        (
            "CLIPModel",
            "SiglipModel",
            "AltCLIPModel",
            "ChineseCLIPModel",
            "CLIPSegModel",
            "GroupViTModel",
            "FlavaModel",
            "MetaClip2Model",
            "OwlViTModel",
            "Owlv2Model",
        ),
        beside(**PIXELS),
    ),
    **dict.fromkeys(("BlipModel", "BlipForConditionalGeneration", "BlipForImageTextRetrieval"), beside(**PIXELS)),
    "ViltModel": beside(**PIXELS),
    "VisualBertModel": beside(visual_embeds=(2, 5, 32)),
    "LxmertModel": beside(visual_feats=(2, 5, 32), visual_pos=(2, 5, 4)),
    "LlavaForConditionalGeneration": within(4, **PIXELS),
    "PaliGemmaForConditionalGeneration": within(4, **PIXELS),
    "Gemma3ForConditionalGeneration": within(4, **PIXELS),
    "LlavaNextForConditionalGeneration": tiles,
    "LlavaNextVideoForConditionalGeneration": tiles,
    "LlavaOnevisionForConditionalGeneration": tiles,
    "InstructBlipForConditionalGeneration": instructed,
    "Blip2ForConditionalGeneration": within(4, **PIXELS),
    "Kosmos2Model": placed,
    "Qwen2VLForConditionalGeneration": grids,
    "Qwen2_5_VLForConditionalGeneration": grids,
    "Qwen3VLForConditionalGeneration": grids,
    "Idefics2ForConditionalGeneration": within(4, pixel_values=(2, 1, 3, 16, 16)),
    "Idefics3ForConditionalGeneration": within(1, pixel_values=(2, 1, 3, 16, 16)),
    "SmolVLMForConditionalGeneration": within(1, pixel_values=(2, 1, 3, 16, 16)),
    "ClapModel": beside(input_features=(2, 1, 64, 64)),
    "ClvpModel": beside(),
    "Qwen2AudioForConditionalGeneration": heard,
    "AudioFlamingo3ForConditionalGeneration": heard_with_a_mask,
    "GraniteSpeechForConditionalGeneration": within(6, SOUND, input_features=(2, 20, 160)),
    "AyaVisionForConditionalGeneration": within(1, **PIXELS),
    "GotOcr2ForConditionalGeneration": within(1, **PIXELS),
    "Florence2ForConditionalGeneration": within(2, **PIXELS),
    "JanusForConditionalGeneration": within(4, **PIXELS),
}


ROWS = dict.fromkeys(TEXT, texts) | dict.fromkeys(TWO_TEXTS, both_texts) | OTHERS
INEXACT = {
    "XLNetLMHeadModel": "its scores of relative positions are two lengths wide: no mask of the pairs fits them",
    "FunnelForMaskedLM": "it pools the text in steps of its own, and the mask with it",
    "CpmAntForCausalLM": "not all of its attention over prompt and text is found to be attention",
    "ProphetNetForConditionalGeneration": "its streams that look ahead are rows of their own, one for each place",
    "LEDForConditionalGeneration": "it pads every text to its window of 512",
}
"""Where the identity does not hold, and why: `left_out` says which share of the FLOPs is concerned."""


def counted(model: Any, batch: dict[str, torch.Tensor]) -> FlopCount:
    with observe(model) as step:
        loss = loss_of(model(**batch))
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
    return step.result()


@pytest.mark.parametrize("name", ROWS)
def test_appending_padding_changes_no_exact_count(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    kind = getattr(transformers, name)
    config = shrink(kind.config_class())
    if name.startswith("DeepseekV3"):
        config.num_key_value_heads = config.num_attention_heads
    if name.startswith(("Qwen2VL", "Qwen2_5_VL")):
        config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    torch.manual_seed(0)
    model = kind(config).eval()
    short, long = counted(model, ROWS[name](SHORT)), counted(model, ROWS[name](LONG))
    assert short.model_flop
    if name in INEXACT:
        assert all(any("%" in sentence for sentence in count.left_out) for count in (short, long))
    else:
        assert long.model_flop == pytest.approx(short.model_flop, rel=1e-3)
    assert long.hardware_flop > short.hardware_flop or name == "ModernBertForMaskedLM"

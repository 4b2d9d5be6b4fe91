"""How many FLOPs does a token cost under the counting rule of this paper, that framework, or exactly?

    >>> llama = MODELS["llama-3.1-8b"]
    >>> round(CONVENTIONS["palm"].model_flop_per_token(llama, seq=8192) / 1e9, 2)
    61.07

Every rule met in print has one shape. A training token passes through weights (6 FLOPs each: 2 forward, 4 backward) and
attends to other tokens (4 FLOPs per head channel and query-key pair forward, 12 with the backward pass):

    6 * weights + 12 * layers * heads * head_dim * pairs / seq

The rules differ in which weights and how many pairs they charge, and that is all a `Convention` holds. They describe
decoders with causal attention; norms, activations, softmax and the optimizer are in none of them. No torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from flopmeter.columns import open_regular
from flopmeter.errors import ConfigError

LARGEST_SIZE = 10**18
"""Of anything that a model or a run is counted by; FLOPs of it are still numbers."""
MAX_CONFIG_BYTES = 16 << 20
Recompute = Literal["none", "full", "selective"]
RECOMPUTE_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The numbers of a decoder that its FLOPs depend on. A size of 0 means: derived, or absent."""

    layers: int
    hidden: int
    heads: int
    """Query heads."""
    ffn: int
    """Inner width of the MLP."""
    vocab: int
    kv_heads: int = 0
    """Key and value heads; 0: as many as query heads."""
    head_dim: int = 0
    """Channels of a head; 0: hidden / heads. Where keys and values differ in width, their mean."""
    gated: bool = True
    """Three MLP matrices (SwiGLU, GeGLU: all Llama-like models) or two (GPT-2, GPT-3, MPT). Not guessed from sizes."""
    tied: bool = False
    """The output projection shares the embedding's weights: the same FLOPs, one parameter matrix less."""
    window: int = 0
    """Tokens that a query sees, itself included, where every layer has a sliding window; 0: all earlier ones."""
    experts: int = 0
    """Routed experts in a layer; 0: a dense model."""
    active_experts: int = 0
    """Routed experts that a token visits."""
    expert_ffn: int = 0
    """Inner width of an expert; 0: ffn."""
    shared_experts: int = 0
    """Experts of the same width that every token visits."""
    dense_layers: int = 0
    """Layers of a mixture of experts that keep the dense MLP."""
    params: int = 0
    """Parameters N to use where a convention asks for them (of a mixture of experts: the active ones); 0: derived."""
    matmul_params: int = 0
    """Weights P that a token is multiplied with, for a shape that the sizes above cannot describe; 0: derived."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, needs_value=field.name in ("layers", "hidden", "heads", "ffn", "vocab"))
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide hidden={self.hidden}: give head_dim as well")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if not (bool(self.experts) == bool(self.active_experts) and self.active_experts <= self.experts):
            raise ConfigError(f"active_experts={self.active_experts} does not fit experts={self.experts}")
        if self.dense_layers > self.layers:
            raise ConfigError(f"dense_layers={self.dense_layers} is more than layers={self.layers}")

    def _check(self, name: str, *, needs_value: bool) -> None:
        value = getattr(self, name)
        if name in ("gated", "tied"):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} must be true or false, not {value!r}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < int(needs_value):
            raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
        elif value > LARGEST_SIZE:
            raise ConfigError(f"{name} is larger than {LARGEST_SIZE:.0e}, which no model's is")

    @property
    def head_channels(self) -> int:
        """d: the given head_dim, else hidden / heads."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Query channels over all layers: L * H * d."""
        return self.layers * self.heads * self.head_channels

    @property
    def head_weights(self) -> int:
        """Weights of the output projection (lm_head), tied or not."""
        return self.vocab * self.hidden

    @property
    def num_matmul_params(self) -> int:
        """P: the weights that one token is multiplied with, lm_head included, embedding look-up excluded."""
        return self.matmul_params or self._layer_weights(self.active_experts) + self.head_weights

    @property
    def num_params(self) -> int:
        """N: P, the embedding unless tied, two norms a layer plus one. Left out: biases, learned positions."""
        return self.params or self.num_matmul_params + self._unmultiplied

    @property
    def num_stored_params(self) -> int:
        """N with every expert: what a checkpoint holds. Equal to N for a dense model without overrides."""
        return self._layer_weights(self.experts) + self.head_weights + self._unmultiplied

    @property
    def _unmultiplied(self) -> int:
        return (0 if self.tied else self.head_weights) + (2 * self.layers + 1) * self.hidden

    def _layer_weights(self, experts: int) -> int:
        query_and_output = 2 * self.hidden * self.heads * self.head_channels
        key_and_value = 2 * self.hidden * (self.kv_heads or self.heads) * self.head_channels
        moe_layers = self.layers - self.dense_layers if self.experts else 0
        matrices = 3 if self.gated else 2
        dense_mlp = matrices * self.hidden * self.ffn
        one_expert = matrices * self.hidden * (self.expert_ffn or self.ffn)
        router = self.hidden * self.experts
        moe_mlp = (experts + self.shared_experts) * one_expert + router
        attention = self.layers * (query_and_output + key_and_value)
        return attention + (self.layers - moe_layers) * dense_mlp + moe_layers * moe_mlp


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """One published way of charging FLOPs, as data."""

    name: str
    formula: str
    """Model FLOPs of a training token; L, H, d, h, s, V are layers, heads, head_dim, hidden, seq, vocab."""
    meaning: str
    used_by: str
    left_out: str
    source: str
    weights: Callable[[Architecture], int]
    """Weights charged for a token."""
    pairs: Callable[[Architecture, int], float]
    """Query-key pairs charged for a sequence."""
    rerun_weights: Callable[[Architecture], int]
    """Weights that a full recomputation is charged for once more, forward."""
    selective_passes: int = 1
    """Forward passes of attention that selective recomputation is charged for."""
    reads_as: Callable[[Architecture], Architecture] = lambda arch: arch
    """The model that the formula sees, where it assumes a shape."""

    def model_flop_per_token(self, arch: Architecture, seq: int) -> float:
        """Forward and backward of one token of a sequence of `seq`, the numerator of MFU."""
        return 6 * self.weights(self.reads_as(arch)) + 3 * self._attention_flop_per_token(arch, seq)

    def hardware_flop_per_token(self, arch: Architecture, seq: int, recompute: Recompute) -> float:
        """The same with what activation recomputation runs again, the numerator of HFU.

        full: one more forward pass of the layers. selective: one more forward pass of the attention core (scores and
        their product with the values), the linears being kept.
        """
        again = {"none": 0, "full": 1, "selective": self.selective_passes}[recompute]
        rerun = self.rerun_weights(self.reads_as(arch)) if recompute == "full" else 0
        return self.model_flop_per_token(arch, seq) + 2 * rerun + again * self._attention_flop_per_token(arch, seq)

    def _attention_flop_per_token(self, arch: Architecture, seq: int) -> float:
        return 4 * self.reads_as(arch).attention_width * self.pairs(arch, seq) / seq


def _visible_pairs(arch: Architecture, seq: int) -> float:
    reach = min(arch.window or seq, seq)
    return reach * (reach + 1) / 2 + (seq - reach) * reach


def _all_pairs(_: Architecture, seq: int) -> float:
    return seq * seq


def _half_the_pairs(_: Architecture, seq: int) -> float:
    return seq * seq / 2


def _no_pairs(_: Architecture, __: int) -> float:
    return 0


def _layers_only(arch: Architecture) -> int:
    return arch.num_matmul_params - arch.head_weights


def _as_gpt(arch: Architecture) -> Architecture:
    return Architecture(
        layers=arch.layers, hidden=arch.hidden, heads=1, ffn=4 * arch.hidden, vocab=arch.vocab, gated=False
    )


_ALL: Final = (
    Convention(
        name="exact",
        formula="6P + 6LHd(s+1)",
        meaning="matmul weights, pairs that the mask lets through",
        used_by="flopmeter",
        left_out="nothing that is a matmul; padding and packing, which a length alone does not tell",
        source="2 FLOPs a multiply-add, s(s+1)/2 pairs a causal sequence, min(position, window) with a window",
        weights=lambda arch: arch.num_matmul_params,
        pairs=_visible_pairs,
        rerun_weights=_layers_only,
    ),
    Convention(
        name="palm",
        formula="6N + 12LHds",
        meaning="all parameters, all pairs",
        used_by="PaLM, nanoGPT, llm-foundry, TRL",
        left_out="charges the embedding look-up and the norms as matmuls, and the masked half of attention",
        source="arXiv:2204.02311 appendix B; HFU is 4/3 of MFU under full recomputation, as llm-foundry has it",
        weights=lambda arch: arch.num_params,
        pairs=_all_pairs,
        rerun_weights=lambda arch: arch.num_params,
    ),
    Convention(
        name="6p_full",
        formula="6P + 12LHds",
        meaning="matmul weights, all pairs",
        used_by="torchtitan, NVIDIA dgxc, LLaMA-Factory",
        left_out="charges the masked half of attention",
        source="torchtitan docs/performance.md; dgxc-benchmarking READMEs",
        weights=lambda arch: arch.num_matmul_params,
        pairs=_all_pairs,
        rerun_weights=_layers_only,
    ),
    Convention(
        name="6p_causal",
        formula="6P + 6LHds",
        meaning="matmul weights, half the pairs",
        used_by="Megatron-LM and Bridge, MaxText since July 2025",
        left_out="half of the diagonal, 1/s of attention; ignores a sliding window",
        source="Megatron-LM megatron/training/training.py",
        weights=lambda arch: arch.num_matmul_params,
        pairs=_half_the_pairs,
        rerun_weights=_layers_only,
    ),
    Convention(
        name="6n",
        formula="6N",
        meaning="all parameters, no attention",
        used_by="quick estimates",
        left_out="attention between tokens; charges the embedding look-up and the norms as matmuls",
        source="arXiv:2001.08361 section 2.1",
        weights=lambda arch: arch.num_params,
        pairs=_no_pairs,
        rerun_weights=lambda arch: arch.num_params,
    ),
    Convention(
        name="verl",
        formula="6(P + Vh) + 6LHds",
        meaning="matmul weights and embedding, half the pairs",
        used_by="verl",
        left_out="charges the embedding look-up as a matmul; half of the diagonal",
        source="verl utils/flops_counter.py",
        weights=lambda arch: arch.num_matmul_params + arch.head_weights,
        pairs=_half_the_pairs,
        rerun_weights=_layers_only,
    ),
    # With full recomputation the hardware FLOPs are 96Lh^2(1 + s/6h + V/16Lh), equation 3 of arXiv:2104.04473. Under
    # selective recomputation the paper's appendix A turns s/6h into s/3h: three forward passes of attention, not one.
    Convention(
        name="gpt",
        formula="72Lh^2(1 + s/6h + V/12Lh)",
        meaning="the model read as a GPT with a 4h MLP, all pairs",
        used_by="arXiv:2205.05198; SC21 and BLOOM print its full-recompute HFU",
        left_out="the model's own MLP width, gate and grouped heads; charges the masked half of attention",
        source="arXiv:2205.05198; its selective-recompute HFU from memory, not read here",
        weights=lambda arch: arch.num_matmul_params,
        pairs=_all_pairs,
        rerun_weights=_layers_only,
        selective_passes=3,
        reads_as=_as_gpt,
    ),
)
CONVENTIONS: Final[Mapping[str, Convention]] = {convention.name: convention for convention in _ALL}
NAMED: Final = ("exact", "palm", "6p_full", "6p_causal", "6n")
"""The conventions that every report prints; the others exist to compare with particular papers."""


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> Architecture:
    return Architecture(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, **more)


_LLAMA_3_8B: Final = _llama(32, 4096, 32, 8, 14336, 128256)
_LLAMA_3_70B: Final = _llama(80, 8192, 64, 8, 28672, 128256)

MODELS: Final[Mapping[str, Architecture]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": _LLAMA_3_70B,
    "llama-3.1-8b": _LLAMA_3_8B,
    "llama-3.1-70b": _LLAMA_3_70B,
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, window=4096),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, experts=8, active_experts=2),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32000, experts=8, active_experts=2),
    "gpt-3-175b": _llama(96, 12288, 96, 96, 49152, 50257, gated=False, tied=True),
}
"""Published configurations that `flopmeter mfu` and `count` know by name; any other is read from its config.json."""


class _Family(NamedTuple):
    """How a transformers model type writes its sizes, and what it means when the file is silent."""

    keys: Mapping[str, str]
    gated: bool = True
    tied: bool = False


_LLAMA_KEYS: Final = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
}
_GPT2_KEYS: Final = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn": "n_inner",
    "vocab": "vocab_size",
}
_MOE_KEYS: Final = {
    **_LLAMA_KEYS,
    "experts": "num_experts",
    "active_experts": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}
_FAMILIES: Final[Mapping[str, _Family]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "phi3"), _Family(_LLAMA_KEYS)),
    "gemma": _Family(_LLAMA_KEYS, tied=True),
    "gpt_neox": _Family(_LLAMA_KEYS, gated=False),
    "gpt2": _Family(_GPT2_KEYS, gated=False, tied=True),
    "mixtral": _Family(_MOE_KEYS),
    "qwen3_moe": _Family(_MOE_KEYS),
}


def read_config(path: Path) -> Architecture:
    """The architecture in a transformers `config.json` (the file, or the folder that holds it)."""
    return architecture_from_config(read_config_file(path))


def read_config_file(path: Path) -> dict[str, Any]:
    """What a transformers `config.json` holds."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigError(f"{path} holds no model (no config.json): name a config.json, its folder, or a model")
    try:
        with open_regular(file) as opened:
            content = opened.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES >> 20} MB")
        config = json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        nested = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        reason = error.strerror if isinstance(error, OSError) else nested
        raise ConfigError(f"{file} cannot be read as a model's config.json: {reason}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__}, not the settings of a model's config.json")
    return config


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that the content of a transformers `config.json` describes, without transformers."""
    model_type = str(config.get("model_type"))
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not one of {', '.join(sorted(_FAMILIES))}: give its sizes with --arch, or "
            "count the model with `flopmeter count`"
        )
    keys, gated, tied = _FAMILIES[model_type]
    config = {"num_experts": config.get("num_local_experts"), **config}  # both spellings are in use
    sizes = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
    if model_type == "gpt2" and isinstance(sizes.get("hidden"), int):
        sizes.setdefault("ffn", 4 * sizes["hidden"])
    missing = [keys[name] for name in ("layers", "hidden", "heads", "ffn", "vocab") if name not in sizes]
    if missing:
        raise ConfigError(f"the config has no {', '.join(missing)}: give the sizes with --arch")
    is_tied = config.get("tie_word_embeddings")
    return Architecture(**sizes, gated=gated, tied=tied if is_tied is None else is_tied, window=_window(config))


def _window(config: Mapping[str, Any]) -> Any:
    """The sliding window of every layer, 0 for none. Layers that differ are refused: no one architecture says them."""
    layer_types = config.get("layer_types")
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else {"sliding_attention"}
    window = 0 if config.get("use_sliding_window") is False else config.get("sliding_window") or 0
    is_mixed = window and (len(kinds) > 1 or config.get("use_sliding_window"))
    if is_mixed or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("the layers of this model are not all alike: count it with `flopmeter count`")
    return 0 if kinds == {"full_attention"} else window

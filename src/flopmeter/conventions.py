"""How many FLOPs does a token cost under the counting rule of this paper, that framework, or exactly?

    >>> llama = MODELS["llama-3.1-8b"]
    >>> round(CONVENTIONS["palm"].model_flop_per_token(llama, seq=8192) / 1e9, 2)
    61.07

Every rule met in print has one shape. A training token passes through weights (6 FLOPs each: 2 forward, 4 backward) and
attends to other tokens (4 FLOPs per head channel and query-key pair forward, 12 with the backward pass):

    6 * weights + 12 * layers * heads * head_dim * pairs / seq

The rules differ in which weights and how many pairs they charge, and that is all a `Convention` holds: they are data,
in conventions.toml beside this file, with the published models. They describe decoders with causal attention; norms,
activations, softmax and the optimizer are in none of them. No torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from flopmeter.columns import open_regular, read_toml
from flopmeter.errors import ConfigError

LARGEST_SIZE = 10**18
"""Of anything that a model or a run is counted by; FLOPs of it are still numbers."""
MAX_CONFIG_BYTES = 16 << 20
Recompute = Literal["none", "full", "selective"]
_NEEDED: Final = ("layers", "hidden", "heads", "ffn", "vocab")
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
            name, value = field.name, getattr(self, field.name)
            if name in ("gated", "tied"):
                if not isinstance(value, bool):
                    raise ConfigError(f"{name} must be true or false, not {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < int(name in _NEEDED):
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
            elif value > LARGEST_SIZE:
                raise ConfigError(f"{name} is larger than {LARGEST_SIZE:.0e}, which no model's is")
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide hidden={self.hidden}: give head_dim as well")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if not (bool(self.experts) == bool(self.active_experts) and self.active_experts <= self.experts):
            raise ConfigError(f"active_experts={self.active_experts} does not fit experts={self.experts}")
        if self.dense_layers > self.layers:
            raise ConfigError(f"dense_layers={self.dense_layers} is more than layers={self.layers}")

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


_WEIGHTS: Final[Mapping[str, Callable[[Architecture], int]]] = {
    "matmul": lambda arch: arch.num_matmul_params,
    "layers": lambda arch: arch.num_matmul_params - arch.head_weights,
    "matmul and embedding": lambda arch: arch.num_matmul_params + arch.head_weights,
    "all": lambda arch: arch.num_params,
}


_PAIRS: Final[Mapping[str, Callable[[Architecture, int], float]]] = {
    "visible": lambda arch, seq: (reach := min(arch.window or seq, seq)) * (reach + 1) / 2 + (seq - reach) * reach,
    "all": lambda _, seq: seq * seq,
    "half": lambda _, seq: seq * seq / 2,
    "none": lambda _, __: 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """One published way of charging FLOPs: a block of conventions.toml, whose head says what the words mean."""

    name: str
    formula: str
    """Model FLOPs of a training token; L, H, d, h, s, V are layers, heads, head_dim, hidden, seq, vocab."""
    meaning: str
    used_by: str
    left_out: str
    source: str
    weights: str
    pairs: str
    rerun: str
    selective: int = 1
    reads_as: str = ""

    def model_flop_per_token(self, arch: Architecture, seq: int) -> float:
        """Forward and backward of one token of a sequence of `seq`, the numerator of MFU."""
        return 6 * _WEIGHTS[self.weights](self._read(arch)) + 3 * self._attention_flop_per_token(arch, seq)

    def hardware_flop_per_token(self, arch: Architecture, seq: int, recompute: Recompute) -> float:
        """The same with what activation recomputation runs again, the numerator of HFU.

        full: one more forward pass of the layers. selective: one more forward pass of the attention core (scores and
        their product with the values), the linears being kept.
        """
        again = {"none": 0, "full": 1, "selective": self.selective}[recompute]
        rerun = _WEIGHTS[self.rerun](self._read(arch)) if recompute == "full" else 0
        return self.model_flop_per_token(arch, seq) + 2 * rerun + again * self._attention_flop_per_token(arch, seq)

    def _attention_flop_per_token(self, arch: Architecture, seq: int) -> float:
        return 4 * self._read(arch).attention_width * _PAIRS[self.pairs](arch, seq) / seq

    def _read(self, arch: Architecture) -> Architecture:
        """The model that the formula sees, where it assumes a shape."""
        if self.reads_as != "gpt":
            return arch
        hidden = arch.hidden
        return Architecture(layers=arch.layers, hidden=hidden, heads=1, ffn=4 * hidden, vocab=arch.vocab, gated=False)


_FILE: Final = read_toml(Path(__file__).with_suffix(".toml"))
CONVENTIONS: Final[Mapping[str, Convention]] = {
    name: Convention(name=name, **block) for name, block in _FILE["convention"].items()
}
NAMED: Final = ("exact", "palm", "6p_full", "6p_causal", "6n")
"""The conventions that every report prints; the others exist to compare with particular papers."""
MODELS: Final[Mapping[str, Architecture]] = {name: Architecture(**sizes) for name, sizes in _FILE["model"].items()}
"""Published configurations that `flopmeter mfu` and `count` know by name; any other is read from its config.json."""


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
    if model_type not in _FILE["family"]:
        raise ConfigError(
            f"model_type {model_type!r} is not one of {', '.join(sorted(_FILE['family']))}: give its sizes with "
            "--arch, or count the model with `flopmeter count`"
        )
    family = _FILE["family"][model_type]
    keys = {name: key for group in family["keys"] for name, key in _FILE["keys"][group].items()}
    config = {"num_experts": config.get("num_local_experts"), **config}  # both spellings are in use
    sizes = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
    if model_type == "gpt2" and isinstance(sizes.get("hidden"), int):
        sizes.setdefault("ffn", 4 * sizes["hidden"])
    missing = [keys[name] for name in _NEEDED if name not in sizes]
    if missing:
        raise ConfigError(f"the config has no {', '.join(missing)}: give the sizes with --arch")
    is_tied = config.get("tie_word_embeddings")
    tied = family.get("tied", False) if is_tied is None else is_tied
    return Architecture(**sizes, gated=family.get("gated", True), tied=tied, window=_window(config))


def _window(config: Mapping[str, Any]) -> Any:
    """The sliding window of every layer, 0 for none. Layers that differ are refused: no one architecture says them."""
    layer_types = config.get("layer_types")
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else {"sliding_attention"}
    window = 0 if config.get("use_sliding_window") is False else config.get("sliding_window") or 0
    is_mixed = window and (len(kinds) > 1 or config.get("use_sliding_window"))
    if is_mixed or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("the layers of this model are not all alike: count it with `flopmeter count`")
    return 0 if kinds == {"full_attention"} else window

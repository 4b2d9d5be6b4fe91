"""Which model does this text name? Built on shapes alone, so that one of 671 billion weights takes no memory.

    load_model("llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256")
    load_model("llama-3-70b")                 # a published model, by name
    load_model("deepseek-v3:layers=8")        # the same, changed
    load_model("path/to/config.json")         # what a transformers checkpoint carries
    load_model("my_package.models:build")     # a function without arguments that returns a module

The first four need transformers; nothing is ever downloaded. Sizes may be given by the short names that `flopmeter mfu`
uses or by the config's own, parts of a config with a dot: `text_config.hidden_size=1024`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from flopmeter.conventions import MODELS, Architecture, read_config_file
from flopmeter.errors import ConfigError, CountError, MissingLibraryError, did_you_mean
from flopmeter.flops.on_shapes import only_shapes

SHORT_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size",),
    "window": ("sliding_window",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "tied": ("tie_word_embeddings",),
}
"""What users type, and what configs call it: the first that the config has."""

MAX_LAYERS = 10_000
"""Layers, blocks or experts of a model: each of them is made, if only on shapes."""
_COUNTED = ("layer", "layers", "block", "blocks", "depth", "depths", "stages", "experts")

NAMED: Final[Mapping[str, str]] = {
    "deepseek-v3": "deepseek_v3",
    "qwen2.5-vl-72b": (
        "qwen2_5_vl:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=29568,vocab=152064,vision_config.hidden_size=1280,"
        "vision_config.intermediate_size=3456,vision_config.out_hidden_size=8192"
    ),
}
"""Published models beside those of `flopmeter.conventions`, which hold decoders of one kind only."""

_HEADS: Final = (
    "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION",
)  # fmt: skip
"""What a model is trained as, when its config does not say: the first of these that exists for it."""

_DROPPED_AT_RANDOM: Final = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def load_model(spec: str, *, dtype: torch.dtype | None = None, checkpointing: bool = False) -> nn.Module:
    """The model that `spec` names, in training mode, its parameters on the meta device.

    Args:
        dtype: Of the parameters; by default what the config says, else bf16. A factory's model is kept as it is built.
        checkpointing: Recompute the activations of each layer in the backward pass, where the model offers it.

    Raises:
        ConfigError: The text names no model, or a setting that its config does not have.
        CountError: The model cannot be built.
    """
    head, settings = _split(spec)
    if settings is None:
        model = _call_factory(spec)
        model = model if dtype is None else model.to(dtype)
    else:
        model = _build(_transformers(), _find_config(head, settings), dtype)
    if checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
            raise CountError(f"{type(model).__name__} offers no activation checkpointing to switch on")
        enable()
    return model.train()


def _split(spec: str) -> tuple[str, dict[str, str] | None]:
    """The name or path, and the settings after the colon; None for these when `package.module:function` is named."""
    head, colon, tail = spec.partition(":")
    if not colon or Path(spec).exists():
        return spec, {}
    if "=" not in tail:
        return spec, None
    settings: dict[str, str] = {}
    for item in re.split(r",(?![^\[]*\])", tail):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"{item.strip()!r} in {spec!r} is not of the form key=value")
        if key in settings:
            raise ConfigError(f"{key} is given twice in {spec!r}")
        settings[key] = value
    return head, settings


def _transformers() -> Any:
    if find_spec("transformers") is None:
        needed_for = "naming a model by its type or its config.json"
        raise MissingLibraryError("transformers", needed_for=needed_for, extra="transformers")
    return import_module("transformers")


def _find_config(head: str, settings: Mapping[str, str]) -> Any:
    """A transformers config: from a file, a published name or a model type, with the settings on top."""
    if head.lower() in NAMED:
        base, more = _split(NAMED[head.lower()])
        return _find_config(base, {**(more or {}), **settings})
    if head.lower() in MODELS:
        base, more = _describe(MODELS[head.lower()])
        return _find_config(base, {**more, **settings})
    if Path(head).exists():
        content = read_config_file(Path(head))
        if not isinstance(content.get("model_type"), str):
            raise ConfigError(f"{head} is no model's config.json: it has no model_type")
        return _change(content, settings)
    return _change({"model_type": head}, settings)


def _describe(arch: Architecture) -> tuple[str, dict[str, str]]:
    """A model type with the architecture's shape."""
    model_type = "mixtral" if arch.experts else "mistral" if arch.window else "llama" if arch.gated else "gpt2"
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "window", "experts", "active_experts")
    unknown_to_gpt2 = ("kv_heads",) if model_type == "gpt2" else ()
    sizes = {name: getattr(arch, name) for name in names if name not in unknown_to_gpt2}
    return model_type, {name: str(size) for name, size in sizes.items() if size}


def _change(content: dict[str, Any], settings: Mapping[str, str]) -> Any:
    """The config with its settings changed before it is made, because it derives others from them."""
    config = _make_config(content)
    content = deepcopy(content)
    for key, text in settings.items():
        *parts, name = _resolve(config, key)
        target, part_config = content, config
        for part in parts:
            part_config = getattr(part_config, part)
            target = target.setdefault(part, {"model_type": part_config.model_type})
        target[name] = _parse(text)
    return _make_config(content) if settings else config


def _make_config(content: Mapping[str, Any]) -> Any:
    known = _transformers().CONFIG_MAPPING
    model_type = str(content["model_type"])
    _refuse_sizes(content)
    if model_type not in known:
        names = [*known, *NAMED, *MODELS]
        hint = did_you_mean(model_type, names, otherwise="name a config.json, or package.module:function")
        raise ConfigError(f"{model_type!r} is neither a file, a published model nor a transformers model type: {hint}")
    try:
        return known[model_type].from_dict({key: value for key, value in content.items() if key != "model_type"})
    except Exception as error:  # noqa: BLE001 - each config class refuses in its own way
        raise ConfigError(f"the sizes of {model_type!r} do not fit together: {_one_line(error)}") from None


def _refuse_sizes(content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        if isinstance(value, dict):
            _refuse_sizes(value)
        numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
        if str(name).endswith(_COUNTED) and max(numbers, default=0) > MAX_LAYERS:
            raise ConfigError(f"{name} is more than {MAX_LAYERS:,}, which no model has: give a smaller number")


def _resolve(config: Any, key: str) -> list[str]:
    """Where the config keeps a setting: its own name, after the parts that it is in."""
    *parts, name = key.split(".")
    part = config
    for index, step in enumerate(parts):
        if not hasattr(getattr(part, step, None), "to_dict"):
            raise _unknown(".".join(parts[: index + 1]), config, part.sub_configs)
        part = getattr(part, step)
    candidates = SHORT_NAMES.get(name, (name,))
    found = next((candidate for candidate in candidates if hasattr(part, candidate)), None)
    if found is not None:
        return [*parts, part.attribute_map.get(found, found)]
    text = config.get_text_config()
    inner = next((own for own in config.sub_configs if getattr(config, own, None) is text), None)
    if inner is not None and not parts:
        return _resolve(config, f"{inner}.{name}")
    raise _unknown(name, config, [*part.to_dict(), *SHORT_NAMES])


def _unknown(name: str, config: Any, known: Any) -> ConfigError:
    hint = did_you_mean(name, known, otherwise=f"short names are {', '.join(SHORT_NAMES)}")
    return ConfigError(f"a {config.model_type!r} model has no setting {name!r}: {hint}")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _build(transformers: Any, config: Any, dtype: torch.dtype | None) -> nn.Module:
    for name in _DROPPED_AT_RANDOM:
        if getattr(config, name, None):
            setattr(config, name, 0.0)  # a depth drawn at random has no one count
    model_class = _model_class(transformers, config)
    try:
        with _without_weights():
            dtype_name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # as transformers calls it since 4.56
            own = dtype or getattr(config, dtype_name, None) or torch.bfloat16
            model: nn.Module = model_class._from_config(config, **{dtype_name: own})
    except Exception as error:  # noqa: BLE001 - sizes that do not fit fail anywhere in a model's own code
        raise CountError(f"{model_class.__name__} cannot be built from its config: {_one_line(error)}") from None
    return _without_values(model)


def _model_class(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type):
            return found
    mappings = import_module("transformers.models.auto.modeling_auto")
    for head in (*(f"FOR_{head}_" for head in _HEADS), ""):
        mapping = getattr(mappings, f"MODEL_{head}MAPPING")
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise CountError(f"transformers has no model for a {config.model_type!r} config: name one with a model in it")


def _call_factory(spec: str) -> nn.Module:
    module_name, _, name = spec.partition(":")
    sys.path.insert(0, here := str(Path.cwd()))
    try:
        with _without_weights():
            found = getattr(import_module(module_name), name)
            model = found if isinstance(found, nn.Module) else found()
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        raise CountError(f"{spec!r} gives no model: {_one_line(error)}") from None
    finally:
        sys.path.remove(here)
    if not isinstance(model, nn.Module):
        raise CountError(f"{spec!r} gives a {type(model).__name__}, not a torch.nn.Module")
    return model if found is model else _without_values(model)


@contextmanager
def _without_weights() -> Iterator[None]:
    """New tensors have no values, except positions and masks, which models look at."""
    with torch.device("meta"), only_shapes():
        yield


def _without_values(model: nn.Module) -> nn.Module:
    """Weights that begin as ones or constants were made with their values; tied ones stay tied."""
    emptied: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.is_meta:
                setattr(module, name, emptied.setdefault(p, nn.Parameter(p.to("meta"), p.requires_grad)))
    return model


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

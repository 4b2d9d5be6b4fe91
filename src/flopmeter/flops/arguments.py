"""Which of the things that a model is called with is its input? Labels, masks, containers told apart."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

Reads = Literal["", "text", "ids", "sequence", "values"]
"""text: token ids, that are attended to or run through a recurrence. ids: looked up, each for itself. sequence: rows of
features that follow each other. values: images, recordings, vectors. Empty where nobody knows."""

Tensors = torch.Tensor | list[torch.Tensor] | PackedSequence
"""A tensor, several of one rank, or sequences of different lengths in one."""

NAMED_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
"""Names under which models of the transformers library take their input."""

_LABELS = ("label", "labels", "target", "targets", "y")
_NO_INPUTS = ("mask", "position_ids", "token_type", "cu_seq", "grid_thw", "length", "timestep", "weight")

PADDING_MASKS = {
    "": ("src_key_padding_mask", "key_padding_mask", "attention_mask"),
    "decoder_": ("tgt_key_padding_mask", "decoder_attention_mask"),
    "encoder_": ("memory_key_padding_mask", "encoder_attention_mask"),
}
"""Names of masks of (samples, length), by whose text they are for: the call's own, a decoder's, or what that reads."""

MAX_POSITIONS = 64


class CallNames:
    """Gives positional arguments the names that the forward of the model has for them.

    Args:
        models: What the loop calls. Of several, a call takes the names of the first that knows its keywords.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        known = [parameter_names(model) for model in models] or [()]
        self._keywords = [frozenset(names) for names in known]
        self._positions = [(*names, *map(str, range(len(names), MAX_POSITIONS))) for names in known]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, the positional ones first."""
        names = self._positions[0] if len(self._positions) == 1 else self._fitting(kwargs)
        named = dict(zip(names, args))  # noqa: B905 - there are names for more arguments than any call has
        return {**named, **kwargs} if kwargs else named

    def in_order(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as they stand in the forward, however the loop orders its keywords."""
        places = {name: place for place, name in enumerate(self._fitting(named))}
        return dict(sorted(named.items(), key=lambda item: places.get(item[0], MAX_POSITIONS)))

    def _fitting(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        for names, keywords in zip(self._positions, self._keywords, strict=True):
            if kwargs.keys() <= keywords:
                return names
        return self._positions[0]


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """What the forward calls its positional arguments; of a wrapper that passes them on, what its model does."""
    while True:
        model = unwrap(model)
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()  # type: ignore[operator]  # adapters (peft)
        try:
            parameters = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):
            return ()
        names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        inner = model._modules.get("module")
        if names or inner is None:
            return names
        model = inner


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's, DDP's and similar wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def flatten(named: Mapping[str, Any]) -> dict[str, Tensors]:
    """The tensors of a call by name, those in containers by their own.

    Dicts, named tuples and plain objects name what they hold. A list of dicts becomes one list for each key; a list of
    tensors stays one where all have one rank and kind. Labels in a container are not looked into.
    """
    found: dict[str, Tensors] = {}
    for name, value in named.items():
        _put(found, str(name), value)
    return found


def _put(found: dict[str, Tensors], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        known = found.get(name)
        if known is None:
            found[name] = value
        elif not isinstance(known, PackedSequence):
            found[name] = [*(known if isinstance(known, list) else [known]), value]
    elif isinstance(value, PackedSequence):
        found[name] = value
    elif not _is_label(name):
        if _is_alike(value):
            found[name] = list(value)
            return
        for own, item in _inside(name, value):
            _put(found, own, item)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, by name. A list of plain numbers is not looked through."""
    if isinstance(value, Mapping):
        yield from ((str(own), item) for own, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        if value and not isinstance(value[0], (int, float, str)):
            yield from ((name if isinstance(item, Mapping) else f"{name}.{i}", item) for i, item in enumerate(value))
    elif not isinstance(value, (nn.Module, type)) and not callable(value):
        own_items = getattr(value, "__dict__", {})
        yield from ((own, item) for own, item in own_items.items() if isinstance(item, (torch.Tensor, Mapping, list)))


def _is_alike(value: Any) -> bool:
    """Whether it is a list of tensors, all of one rank and kind."""
    if type(value) not in (list, tuple) or not value or not all(isinstance(item, torch.Tensor) for item in value):
        return False
    return len({(item.dim(), item.is_floating_point()) for item in value}) == 1


def can_vary(value: Any) -> bool:
    """Whether a value that is no tensor may decide how much work a call is."""
    return value is not None and not isinstance(value, (bool, str))


def main_input(inputs: Mapping[str, Tensors], reads: Reads) -> str | None:
    """The name of what the model works on; None where nothing is recognised.

    The first of two or more dimensions: of floats, or of integers where the model looks tokens up. Neither labels nor
    masks, unless there is nothing else; what has one dimension only where nothing has more.
    """
    own = [name for name in inputs if not _is_label(name) and not any(word in name for word in _NO_INPUTS)]
    wide = [name for name in own if _dim(inputs[name]) >= 2 or isinstance(inputs[name], PackedSequence)]
    wants_floats = reads not in ("text", "ids")
    preferred = [name for name in wide if _is_number(inputs[name]) == wants_floats and not _is_bool(inputs[name])]
    narrow = [name for name in own if _dim(inputs[name]) == 1]
    others = [name for name in inputs if name not in own and _dim(inputs[name]) >= 2]
    return next(iter((*preferred, *wide, *narrow, *others)), None)


def padding_mask(inputs: Mapping[str, Any], whose: str = "") -> torch.Tensor | None:
    """Where a text has tokens, as transformers' masks say it. torch's own layers want True where there is none."""
    for name in PADDING_MASKS[whose]:
        mask = inputs.get(name)
        if isinstance(mask, torch.Tensor):
            return ~mask if mask.dtype == torch.bool and name.endswith("key_padding_mask") else mask
    return None


def second_input(inputs: Mapping[str, Tensors], main: str) -> torch.Tensor | None:
    """What a decoder is given beside the main input: the next tensor of two or more dimensions that is no mask."""
    for name, value in inputs.items():
        if name != main and isinstance(value, torch.Tensor) and value.dim() >= 2 and "mask" not in name:
            return value
    return None


def is_list_of_samples(tensors: list[torch.Tensor], reads: Reads) -> bool:
    """Whether each item is one sample: an image, a sentence; False where each is an input with samples of its own."""
    first = tensors[0]
    if first.dim() <= 1 or len({tensor.shape[0] for tensor in tensors}) > 1:
        return first.dim() > 0
    return first.dim() == 3 and reads in ("", "values") and _is_number(first)


def _is_label(name: str) -> bool:
    return name in _LABELS or name.endswith(("_labels", "_label", "_targets", "_target"))


def _data(value: Tensors) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def _dim(value: Tensors) -> int:
    return _data(value).dim()


def _is_bool(value: Tensors) -> bool:
    return _data(value).dtype == torch.bool


def _is_number(value: Tensors) -> bool:
    """Floats, and complex ones."""
    data = _data(value)
    return data.is_floating_point() or data.is_complex()

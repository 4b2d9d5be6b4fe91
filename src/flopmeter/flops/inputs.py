"""What should a model be called with, when all that is known is a batch size and a length?

    count_flops(model, (8, 2048))      # the same as count_flops(model, build_inputs(model, 8, 2048))

A transformers model says it in its config and in the names that its forward takes; a plain module in its first layer.
Images have the size that the model was made for (448 x 448 where any size fits, one for each sample), and the length
counts text and image tokens together. Where nothing tells, the error names the arguments that are wanted.

All values are plain: zeros, and one ordinary token, so that nothing looks like padding. No random number is drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flopmeter.errors import CountError
from flopmeter.flops.on_shapes import only_shapes, shape_only_state, untouched
from flopmeter.torch_compat import Convolution, reparametrize_module

FREE_IMAGE_SIZE = 448
"""Side in pixels of the image for models that take any size."""

MAX_INPUT_BYTES = 1 << 30
"""Of one input. Weights take no memory here, but inputs have values."""

_LABEL_NAMES = ("labels", "targets", "target", "label", "y")


def build_inputs(model: nn.Module, batch_size: int, length: int) -> dict[str, Any]:
    """Keyword arguments for one call of the model, on the CPU.

    Args:
        length: Tokens of each sample, in encoder and decoder alike; positions for audio models that take sound waves;
            pixels on a side for convolutions, whose config does not name a size.

    Raises:
        CountError: The arguments cannot be guessed.
    """
    if batch_size < 0 or length < 0:
        raise CountError(f"batch size and length must not be negative, not {batch_size} and {length}")
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]  # adapters (peft) pass on what they are called with
    config = getattr(model, "config", None)
    with _Bounded():
        if hasattr(config, "model_type") and hasattr(model, "main_input_name"):
            return _Described(model, config, batch_size, length).inputs()
        return _inputs_by_first_layer(model, batch_size, length)


class _Bounded(TorchFunctionMode):
    """Refuses to fill more memory than inputs may take, before it is filled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.zeros, torch.ones, torch.full):
            try:
                num_bytes = func(*args, **{**(kwargs or {}), "device": "meta"}).nbytes
            except RuntimeError:  # not even a shape can have so many elements
                num_bytes = MAX_INPUT_BYTES + 1
            if num_bytes > MAX_INPUT_BYTES:
                raise CountError(
                    f"an input would take more than {MAX_INPUT_BYTES >> 30} GB: count a smaller batch or a shorter "
                    "sequence; FLOPs grow with the batch size as they are"
                )
        return func(*args, **(kwargs or {}))


class _Described:
    """The inputs of a model that carries a transformers config."""

    def __init__(self, model: nn.Module, config: Any, batch_size: int, length: int) -> None:
        self.model, self.config = model, config
        self.batch_size, self.length = batch_size, length
        self.names = _parameters(model)
        self.dtype = _float_dtype(model)

    def inputs(self) -> dict[str, Any]:
        inputs = self._main_input()
        inputs |= self._labels(inputs)
        if "use_cache" in self.names:
            inputs["use_cache"] = False  # a cache of keys and values is no part of training
        return inputs

    def _main_input(self) -> dict[str, Any]:
        main = str(self.model.main_input_name)
        makers: dict[str, Callable[[], Any]] = {"input_ids": self._text, "pixel_values": self._pixels}
        makers |= {"input_values": self._sound, "input_features": self._spectrogram}
        if main == "pixel_values" and "input_ids" in self.names:
            main = "input_ids"  # captions: the text comes with its image
        if main not in makers or main not in self.names:
            raise _unguessable(self.model, self.names, f"its main input {main!r} is of a kind unknown here")
        made = makers[main]()
        return made if main == "input_ids" else {main: made}

    def _text(self) -> dict[str, Any]:
        ids = torch.full((self.batch_size, self.length), _ordinary_token(self.config))
        if "pixel_values" not in self.names:
            return {"input_ids": ids}
        placeholder = getattr(self.config, "image_token_id", None)
        if "image_grid_thw" in self.names:
            images, num_tokens = self._patches()
        elif placeholder is not None:
            images, num_tokens = self._asked()
        else:
            images, num_tokens = {"pixel_values": self._pixels()}, 0
        if num_tokens and num_tokens + 1 >= self.length:
            raise CountError(f"a length of {self.length} is too short: one image takes {num_tokens} tokens of it")
        text = {"input_ids": ids, **images}
        if placeholder is not None:
            ids[:, 1 : 1 + num_tokens] = placeholder
            is_image = ids.eq(placeholder).long()
            text |= {name: is_image for name in ("mm_token_type_ids", "token_type_ids") if name in self.names}
        return text

    def _labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Labels where they are the text itself; other losses add no matrix work, and their labels cannot be known."""
        kind = type(self.model).__name__
        tokens = torch.full((self.batch_size, self.length), _ordinary_token(self.config))
        if self.config.is_encoder_decoder and "decoder_input_ids" in self.names:
            has_loss = "labels" in self.names and kind.endswith("ForConditionalGeneration")
            return {"decoder_input_ids": tokens} | ({"labels": tokens.clone()} if has_loss else {})
        is_language_model = kind.endswith(("LM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText"))
        if "input_ids" in inputs and "labels" in self.names and is_language_model:
            return {"labels": inputs["input_ids"].clone()}
        if "labels" in self.names and kind.endswith(("SequenceClassification", "ImageClassification")):
            return {"labels": torch.zeros(self.batch_size, dtype=torch.long)}
        return {}

    def _pixels(self) -> torch.Tensor:
        vision = getattr(self.config, "vision_config", self.config)
        size = getattr(vision, "image_size", None) or getattr(self.config, "image_size", None) or FREE_IMAGE_SIZE
        sides = list(size.values()) if isinstance(size, Mapping) else [size] if isinstance(size, int) else list(size)
        # Ones: an image of zeros is taken for padding by some.
        return torch.ones(self.batch_size, _channels(vision), int(sides[0]), int(sides[-1]), dtype=self.dtype)

    def _patches(self) -> tuple[dict[str, torch.Tensor], int]:
        """One image for each sample, cut into the flat patches of Qwen's vision towers; and its tokens."""
        vision = self.config.vision_config
        patch, merge = vision.patch_size, getattr(vision, "spatial_merge_size", 1)
        side = FREE_IMAGE_SIZE // patch // merge * merge
        values = _channels(vision) * getattr(vision, "temporal_patch_size", 1) * patch**2
        images = {
            "pixel_values": torch.zeros(self.batch_size * side**2, values, dtype=self.dtype),
            "image_grid_thw": torch.tensor([[1, side, side]] * self.batch_size).reshape(-1, 3),
        }
        return images, (side // merge) ** 2

    def _asked(self) -> tuple[dict[str, torch.Tensor], int]:
        """One image for each sample, and its tokens as the vision tower makes them, on shapes."""
        pixels, reasons = self._pixels(), []
        for images in (pixels, pixels[:, None]):  # some keep a place for several images
            try:
                return {"pixel_values": images}, _num_image_tokens(self.model, images)
            except Exception as error:  # noqa: BLE001 - a vision tower may raise anything
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
        why = f"its vision tower does not take an image ({'; '.join(reasons)})"
        raise _unguessable(self.model, self.names, why)

    def _sound(self) -> torch.Tensor:
        """Sound waves that become `length` positions, or the spectrogram that is called by the same name."""
        kernels, strides = getattr(self.config, "conv_kernel", None), getattr(self.config, "conv_stride", None)
        if kernels is None or strides is None:
            bins, frames = getattr(self.config, "num_mel_bins", None), getattr(self.config, "max_length", None)
            if bins is None or frames is None:
                raise _unguessable(self.model, self.names, "its config does not say how sound becomes positions")
            return torch.zeros(self.batch_size, frames, bins, dtype=self.dtype)
        samples = self.length
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return torch.zeros(self.batch_size, samples, dtype=self.dtype)

    def _spectrogram(self) -> torch.Tensor:
        """Whisper's 30 seconds: two frames for each position of the encoder."""
        bins, positions = getattr(self.config, "num_mel_bins", None), getattr(self.config, "max_source_positions", None)
        if bins is None or positions is None:
            raise _unguessable(self.model, self.names, "its config does not say how long a spectrogram is")
        return torch.zeros(self.batch_size, bins, 2 * positions, dtype=self.dtype)


def _num_image_tokens(model: nn.Module, images: torch.Tensor) -> int:
    state = shape_only_state(model)
    with torch.no_grad(), untouched(model), only_shapes(), reparametrize_module(model, state, tie_weights=True):
        found = model.get_image_features(pixel_values=images.new_ones(1, *images.shape[1:]))  # type: ignore[operator]
    features = getattr(found, "pooler_output", found)
    parts = [features] if isinstance(features, torch.Tensor) else features
    return sum(feature.numel() // feature.shape[-1] for feature in parts)


def _inputs_by_first_layer(model: nn.Module, batch_size: int, length: int) -> dict[str, Any]:
    """For a module without a config: one tensor that its first layer takes, and labels if it insists."""
    names = _parameters(model)
    wanted = [name for name, parameter in names.items() if parameter.default is parameter.empty]
    labels = [name for name in wanted if name in _LABEL_NAMES]
    others = [name for name in wanted if name not in _LABEL_NAMES] or list(names)[:1]
    if len(others) != 1 or len(labels) > 1:
        raise _unguessable(model, names, f"its forward takes {', '.join(wanted) or 'nothing'}")
    first = _first_input(model, batch_size, length)
    if first is None:
        raise _unguessable(model, names, "it has no layer whose input is known")
    label_shape = first.shape if first.dtype == torch.long else (batch_size,)
    return {others[0]: first} | {name: torch.zeros(label_shape, dtype=torch.long) for name in labels}


def _first_input(model: nn.Module, batch_size: int, length: int) -> torch.Tensor | None:
    dtype = _float_dtype(model)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            return torch.zeros(batch_size, length, dtype=torch.long)
        if isinstance(layer, Convolution):
            sides = (length,) * len(layer.kernel_size)
            return torch.zeros(batch_size, layer.in_channels, *sides, dtype=dtype)
        if isinstance(layer, nn.RNNBase):
            shape = (batch_size, length) if layer.batch_first else (length, batch_size)
            return torch.zeros(*shape, layer.input_size, dtype=dtype)
        if isinstance(layer, nn.Linear):
            # Batch norm and flattening leave no place for a length between samples and features.
            takes_vectors = any(isinstance(own, (nn.BatchNorm1d, nn.Flatten)) for own in model.modules())
            lengths = () if takes_vectors else (length,)
            return torch.zeros(batch_size, *lengths, layer.in_features, dtype=dtype)
    return None


def _ordinary_token(config: Any) -> int:
    """The smallest id that means nothing special."""
    special: set[Any] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value])
    return next(token for token in range(len(special) + 1) if token not in special)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """What the forward takes by name."""
    named = inspect.signature(model.forward).parameters.items()
    return {name: p for name, p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _float_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _channels(vision: Any) -> int:
    names = ("num_channels", "in_channels", "in_chans")
    return int(next((getattr(vision, name) for name in names if hasattr(vision, name)), 3))


def _unguessable(model: nn.Module, names: Mapping[str, Any], why: str) -> CountError:
    known = ", ".join(f"{name!r}: ..." for name in list(names)[:3])
    return CountError(
        f"the inputs of {type(model).__name__} cannot be guessed: {why}; pass a batch as a dict, {{{known}}}"
    )

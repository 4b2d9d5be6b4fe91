"""What was one step given, in numbers? Tokens, attended pairs, image patches: all that a FLOP formula asks of a batch.

    workload_of(batch).tokens                        # reads the batch: for the host
    late = late_workload(batch)                      # reads nothing: for the training loop
    late.resolve({name: float(scalar) for name, scalar in late.unread.items()})

Every number is a sum over sequences or images, so the workloads of micro-batches add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flopmeter.flops.arguments import (
    NAMED_INPUTS,
    Reads,
    flatten,
    is_list_of_samples,
    main_input,
    padding_mask,
    second_input,
    unwrap,
)
from flopmeter.torch_compat import Convolution

_N = TypeVar("_N", int, torch.Tensor)


class PatchWindow(NamedTuple):
    """Windows in which a vision tower attends; those at the right and lower edge are cut."""

    merge: int
    """Patches per side of a merged cell."""
    cells: int
    """Merged cells per side of a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What an estimate asks of a batch beyond its plain sums."""

    window: int = 0
    """Sliding window of the text layers: keys that a token sees, itself included; 0 for none."""
    patch_window: PatchWindow | None = None
    """Windows of the vision tower, where it has any."""
    whole_blocks: tuple[int, ...] = ()
    """Blocks of that tower that attend over whole frames."""
    has_decoder: bool = False
    """Whether labels (or `decoder_input_ids`) run through a decoder of their own."""
    reads: Reads = ""
    """What an input without a name that tells is taken for."""
    is_sequence_first: bool = False
    """Whether the batch is the second dimension of a sequence: torch's default for recurrences and transformers."""


_ATTENDS = re.compile(r"att(n|ention)|qkv|(^|_)w?q($|_)|query", re.IGNORECASE)
_TURNING = frozenset(
    {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "rearrange", "t", "T", "mT"}
)


def needs_of(*models: nn.Module) -> Needs:
    """What the config and the layers of a model say of how a batch is to be read. No part of it is called."""
    root = unwrap(models[0]) if len(models) == 1 else nn.ModuleList(models)
    modules = dict(root.named_modules())
    config: Any = next((found for m in modules.values() if (found := vars(m).get("config")) is not None), None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    vision = getattr(config, "vision_config", config)
    sides = [getattr(vision, name, None) for name in ("window_size", "patch_size", "spatial_merge_size")]
    is_cut = all(isinstance(side, int) for side in sides) and hasattr(vision, "fullatt_block_indexes")
    torchs_own = any(isinstance(m, nn.Transformer) for m in modules.values())
    return Needs(
        window=window if isinstance(window, int) else 0,
        patch_window=PatchWindow(sides[2], sides[0] // sides[1] // sides[2]) if is_cut else None,  # type: ignore[operator, arg-type]
        whole_blocks=tuple(vision.fullatt_block_indexes) if is_cut else (),
        has_decoder=bool(getattr(config, "is_encoder_decoder", False)) or torchs_own,
        reads=_reads(modules),
        is_sequence_first=_is_sequence_first(root),
    )


def _reads(modules: Mapping[str, nn.Module]) -> Reads:
    """What a model takes when no name tells. One that begins with a convolution over no look-up takes values."""
    tables = {m.embedding_dim for m in modules.values() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    first = next((m for m in modules.values() if isinstance(m, (nn.Linear, Convolution, nn.RNNBase))), None)
    if isinstance(first, Convolution) and not tables & {first.in_channels, first.kernel_size[-1]}:
        return "values"
    is_ordered = any(
        isinstance(m, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
        or _ATTENDS.search(name.rpartition(".")[2])
        or _ATTENDS.search(type(m).__name__)
        for name, m in modules.items()
    )
    if tables or any("embed" in type(m).__name__.lower() and "weight" in m._parameters for m in modules.values()):
        return "text" if is_ordered else "ids"
    return "sequence" if is_ordered else "values"


def _is_sequence_first(root: nn.Module) -> bool:
    """Whether a sequence comes before the batch: torch's own recurrent and transformer layers say so.

    Models whose code turns dimensions around, or has convolutions before them, are taken as batch first.
    """
    said: list[bool] = []
    for module in root.modules():
        code = getattr(getattr(type(module), "forward", None), "__code__", None)  # a scripted module has none
        is_torchs = type(module).__module__.startswith("torch.")
        if isinstance(module, Convolution) or (code and not is_torchs and not _TURNING.isdisjoint(code.co_names)):
            return False
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            module = module.self_attn
        elif not isinstance(module, nn.RNNBase) and module is not root:
            continue
        if isinstance(own := getattr(module, "batch_first", None), bool):
            said.append(own)
    return bool(said) and not any(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sums over all sequences and images of a step."""

    samples: int = 0
    """Rows of the batch."""
    tokens: int = 0
    """Text tokens that are not padding."""
    tokens_processed: int = 0
    """Text tokens with padding."""
    pairs_causal: int = 0
    """Pairs of a token and one that it sees, itself included, within each sequence or packed document: n(n+1)/2."""
    pairs_processed: int = 0
    """All pairs within each row of the batch, padding and other documents included."""
    window: int = 0
    """The sliding window that `pairs_window` was counted for; 0 when it was not."""
    pairs_window: int = 0
    """Of the causal pairs, those within the window."""
    decoder_tokens: int = 0
    """As `tokens`, of an encoder-decoder's decoder."""
    decoder_tokens_processed: int = 0
    """As `tokens_processed`, of the decoder."""
    decoder_pairs_causal: int = 0
    """As `pairs_causal`, of the decoder."""
    decoder_pairs_processed: int = 0
    """As `pairs_processed`, of the decoder."""
    cross_pairs: int = 0
    """Pairs of a decoder token and an encoder token of the same sample, neither of them padding."""
    cross_pairs_processed: int = 0
    """The same with padding."""
    images: int = 0
    """Images, clips or recordings of one common size."""
    values: int = 0
    """Numbers in them (pixels times channels): a patch embedding or convolution knows how many make one row."""
    values_squared: int = 0
    """Sum over images of their values, squared: pairs grow with it."""
    values_padding: int = 0
    """Numbers on top that stand for padding, where the rows of a sequence are given with a mask."""
    values_squared_padding: int = 0
    """By how much these make the sum of squares larger."""
    patches: int = 0
    """Vision patches of images that come cut into patches (`image_grid_thw`)."""
    patch_pairs: int = 0
    """Pairs of patches within each frame."""
    patch_window: PatchWindow | None = None
    """The windows that `patch_pairs_window` was counted for."""
    patch_pairs_window: int = 0
    """Pairs of patches within each window."""

    @property
    def pairs_full(self) -> int:
        """Pairs of two tokens of one sequence or document, in either direction: n^2."""
        return 2 * self.pairs_causal - self.tokens

    @property
    def pairs_causal_processed(self) -> int:
        """Causal pairs of the rows as if each was full of one text."""
        return (self.pairs_processed + self.tokens_processed) // 2

    @property
    def pairs_window_processed(self) -> int:
        """Of these, the pairs within the window, where all rows are equally long."""
        rows = self.samples or 1
        return rows * pairs(self.tokens_processed // rows, causal=True, window=self.window) if self.window else 0

    @property
    def pairs_run(self) -> int:
        """What fused causal attention runs: all pairs where padding, documents or a window make a mask of it.

        transformers gives it a mask tensor then, which skips nothing, and else only says that it is causal.
        """
        is_cut = self.window > 0 and self.pairs_window < self.pairs_causal
        causal = self.pairs_causal_processed
        return self.pairs_processed if is_cut or self.pairs_causal != causal else causal

    @property
    def decoder_pairs_full(self) -> int:
        """As `pairs_full`, of the decoder."""
        return 2 * self.decoder_pairs_causal - self.decoder_tokens

    @property
    def decoder_pairs_causal_processed(self) -> int:
        """As `pairs_causal_processed`, of the decoder."""
        return (self.decoder_pairs_processed + self.decoder_tokens_processed) // 2

    @property
    def decoder_pairs_run(self) -> int:
        """As `pairs_run`, of the decoder."""
        causal = self.decoder_pairs_causal_processed
        return causal if self.decoder_pairs_causal == causal else self.decoder_pairs_processed

    @property
    def values_processed(self) -> int:
        """Values with padding."""
        return self.values + self.values_padding

    @property
    def values_squared_processed(self) -> int:
        """Their squares with padding."""
        return self.values_squared + self.values_squared_padding

    @property
    def once(self) -> int:
        """For work that is the same in every step, as an optimizer's."""
        return 1

    def __add__(self, other: Workload) -> Workload:
        """The workload of two micro-batches. Window pairs are kept where both were counted for the same window."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in _WINDOWS}
        for name, pairs in _WINDOWS.items():
            if getattr(self, name) == getattr(other, name):
                sums[name] = getattr(self, name)
            else:
                sums[pairs] = 0
        return Workload(**sums)

    @staticmethod
    def of_lengths(
        lengths: Sequence[int], padded_to: int | None = None, rows: int | None = None, needs: Needs | None = None
    ) -> Workload:
        """Sequences (or packed documents) of these lengths in `rows` rows of `padded_to` tokens."""
        needs = needs or Needs()
        rows = len(lengths) if rows is None else rows
        padded_to = max(lengths, default=0) if padded_to is None else padded_to
        text = {
            "tokens": sum(lengths),
            "tokens_processed": rows * padded_to,
            "pairs_causal": sum(pairs(n, causal=True) for n in lengths),
            "pairs_processed": rows * padded_to**2,
        }
        found: dict[str, Any] = {"samples": rows, "window": needs.window, "patch_window": needs.patch_window, **text}
        if needs.window:
            found["pairs_window"] = sum(pairs(n, causal=True, window=needs.window) for n in lengths)
        if needs.has_decoder:
            found |= {f"decoder_{name}": number for name, number in text.items()}
            found |= {"cross_pairs": sum(n * n for n in lengths), "cross_pairs_processed": text["pairs_processed"]}
        return Workload(**found)


PROCESSED = {
    "tokens": "tokens_processed",
    "pairs_causal": "pairs_causal_processed",
    "pairs_full": "pairs_processed",
    "pairs_window": "pairs_window_processed",
    "decoder_tokens": "decoder_tokens_processed",
    "decoder_pairs_causal": "decoder_pairs_causal_processed",
    "decoder_pairs_full": "decoder_pairs_processed",
    "cross_pairs": "cross_pairs_processed",
    "values": "values_processed",
    "values_squared": "values_squared_processed",
}
"""What a field would be if padding were work. Fields that are not here know no padding."""
_WINDOWS = {"window": "pairs_window", "patch_window": "patch_pairs_window"}
_TEXT = ("tokens", "tokens_processed", "pairs_causal", "pairs_processed")


def pairs(length: _N, causal: bool, window: int = 0) -> _N:
    """Pairs of a query and a key that it sees, in a sequence of `length` tokens.

    Args:
        window: Keys that a query sees to its left, itself included, and as many to its right when not causal; 0: all.
    """
    reach = length
    if window:
        reach = length.clamp(max=window) if isinstance(length, torch.Tensor) else min(length, window)
    seen = reach * (reach + 1) // 2 + (length - reach) * reach
    return seen if causal else 2 * seen - length


@dataclass(frozen=True, kw_only=True, slots=True)
class LateWorkload:
    """A workload, some numbers of which are still on the device."""

    known: Mapping[str, Any]
    """Fields of `Workload` that shapes alone tell."""
    unread: Mapping[str, torch.Tensor]
    """The others, as scalars on the device: nobody has waited for them."""
    is_real: torch.Tensor | None = None
    """Boolean (samples, length), False on padding; None where no mask tells."""
    decoder_is_real: torch.Tensor | None = None
    """The same of a decoder's own text."""

    def resolve(self, numbers: Mapping[str, float]) -> Workload:
        """The workload, once every name in `unread` has its number."""
        read: dict[str, Any] = {name: round(numbers[name]) for name in self.unread}
        return Workload(**self.known, **read)


def workload_of(batch: Any, needs: Needs | None = None) -> Workload:
    """Read what a batch holds. Waits for the device where masks or image sizes are there."""
    late = late_workload(batch, needs)
    return late.resolve({name: float(value) for name, value in late.unread.items()})


def late_workload(batch: Any, needs: Needs | None = None) -> LateWorkload:
    """What a batch holds, by shapes, and by sums that stay on the device: nothing is read, nothing waits.

    Args:
        batch: Keyword arguments of the model, a sequence of positional ones, or one tensor. Recognised are token ids
            or embeddings, 2-D attention masks and key padding masks, `cu_seqlens`, `position_ids` that start anew with
            each packed document, dense images or recordings, and `image_grid_thw` / `video_grid_thw`; of other names,
            the first that looks like an input, in containers too.
    """
    needs = needs or Needs()
    found: dict[str, Any] = {"window": needs.window, "patch_window": needs.patch_window}
    inputs, several = _named(batch, needs)
    is_real = decoder_is_real = None
    if several is not None:
        found |= _packed(several) if isinstance(several, PackedSequence) else _listed(several, needs)
        found |= _grids(inputs, needs.patch_window)
    else:
        found |= _dense(inputs, needs) | _grids(inputs, needs.patch_window)
        text, is_real = _text(inputs, "", needs)
        found |= text
        lengths = None if is_real is None else is_real.sum(1)
        if lengths is not None and "inputs_embeds" in inputs and not any(name in inputs for name in _DENSE):
            found |= _unpadded(found, lengths)
        if needs.has_decoder:
            decoder, decoder_is_real = _text(inputs, "decoder_", needs)
            found |= {f"decoder_{name}": value for name, value in decoder.items() if name in _TEXT}
            found |= _cross(text, lengths, decoder, None if decoder_is_real is None else decoder_is_real.sum(1))
    unread = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    known = {name: value for name, value in found.items() if name not in unread}
    return LateWorkload(known=known, unread=unread, is_real=is_real, decoder_is_real=decoder_is_real)


_DENSE = ("pixel_values", "input_features", "input_values")
_OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


def _named(batch: Any, needs: Needs) -> tuple[dict[str, torch.Tensor], list[torch.Tensor] | PackedSequence | None]:
    """The tensors of a batch, the main input first and under a name that tells; and that input where it is several."""
    if not isinstance(batch, Mapping):
        items = batch if type(batch) in (list, tuple) else (batch,)
        batch = {str(position): item for position, item in enumerate(items)}
    inputs = flatten(batch)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if any(name in tensors for name in NAMED_INPUTS):
        return tensors, None
    main = main_input(inputs, needs.reads)
    if main is None:
        return {}, None
    value = inputs[main]
    if isinstance(value, PackedSequence) or (isinstance(value, list) and is_list_of_samples(value, needs.reads)):
        return tensors, value
    if needs.has_decoder and not any(name in tensors for name in _DECODER):
        second = second_input(inputs, main)
        tensors |= {"labels": second} if second is not None else {}
    if isinstance(value, list):
        value = value[0] if len(value) == 1 or _kind(value[0], needs) == "input_ids" else _side_by_side(value)
    if value.dim() == 1 and (needs.reads == "ids" or value.is_floating_point()):
        value = value[:, None]  # one number a sample, no sequence of them
    return {_kind(value, needs): value, **tensors}, None


def _side_by_side(inputs: list[torch.Tensor]) -> torch.Tensor:
    """As large as all inputs of the same samples together; it holds nothing."""
    rows = inputs[0].shape[0]
    return torch.empty(rows, sum(tensor.numel() for tensor in inputs) // max(rows, 1), device="meta")


def _kind(tensor: torch.Tensor, needs: Needs) -> str:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return "input_ids" if tensor.dim() <= 3 else "pixel_values"
    return "inputs_embeds" if tensor.dim() == 3 and needs.reads != "values" else "pixel_values"


def _packed(sequences: PackedSequence) -> dict[str, Any]:
    """Sequences without padding. How many there are is told by their first step; their pairs are not."""
    rows = sequences.data.shape[0]
    return {
        "samples": sequences.batch_sizes[0],
        "tokens": rows,
        "tokens_processed": rows,
        "values": sequences.data.numel(),
    }


def _listed(samples: list[torch.Tensor], needs: Needs) -> dict[str, Any]:
    """Samples that come one by one, each of its own size."""
    found: dict[str, Any] = {"samples": len(samples)}
    if samples[0].dim() < 3 and needs.reads != "values":
        text = Workload.of_lengths([sample.shape[0] for sample in samples], needs=needs)
        found |= {name: getattr(text, name) for name in (*_TEXT, "pairs_window")}
    sizes = [sample.numel() for sample in samples]
    return {**found, "images": len(samples), "values": sum(sizes), "values_squared": sum(n * n for n in sizes)}


def _text(inputs: Mapping[str, torch.Tensor], prefix: str, needs: Needs) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Fields of the text part, and where it has tokens if a mask tells it."""
    window = needs.window if not prefix else 0
    ids = inputs.get(f"{prefix}input_ids", inputs.get(f"{prefix}inputs_embeds"))
    if ids is None and prefix:
        ids = inputs.get("labels")
    if ids is None or ids.dim() == 0:
        return {"samples": next((t.shape[0] for t in inputs.values() if t.dim()), 0)}, None
    rows, length = (1, ids.shape[0]) if ids.dim() == 1 else tuple(ids.shape[:2])
    if needs.is_sequence_first and ids.dim() > 1:
        rows, length = length, rows
    mask, positions = padding_mask(inputs, prefix), inputs.get(f"{prefix}position_ids")
    if mask is not None and tuple(mask.shape) == (length, rows):
        rows, length = length, rows  # a mask has its samples first, whatever the text does
    found: dict[str, Any] = {"samples": rows, "tokens_processed": rows * length, "pairs_processed": rows * length**2}
    offsets = next((inputs[name] for name in _OFFSETS if name in inputs), None) if not prefix else None
    if offsets is not None:
        return {**found, **_from_lengths(offsets.diff().long(), window)}, None
    if mask is not None and tuple(mask.shape) == (rows, length):
        is_real = real_tokens(mask)
        return {**found, **_from_lengths(is_real.sum(1), window)}, is_real
    if positions is not None and positions.dim() == 2 and positions.shape[1] == length:
        return {**found, **_from_positions(positions.expand(rows, length), window)}, None
    return {
        **found,
        "tokens": rows * length,
        "pairs_causal": rows * pairs(length, causal=True),
        "pairs_window": rows * pairs(length, causal=True, window=window) if window else 0,
    }, None


def real_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask of (rows, length) has a token, on its device: not 0, since packed documents may be numbered in it.

    Floats without a positive one are to be added to scores: there 0 stands for a token.
    """
    if not mask.is_floating_point():
        return mask.bool()
    return torch.where((mask > 0).any(), mask != 0, mask == 0)


def _from_lengths(lengths: torch.Tensor, window: int) -> dict[str, Any]:
    return {
        "tokens": lengths.sum(),
        "pairs_causal": pairs(lengths, causal=True).sum(),
        "pairs_window": pairs(lengths, causal=True, window=window).sum() if window else 0,
    }


def _from_positions(positions: torch.Tensor, window: int) -> dict[str, Any]:
    """A token at position p of its document sees p + 1 keys: no document needs to be found, the sum is enough."""
    seen = positions.long() - positions[:, :1] + 1
    return {
        "tokens": positions.numel(),
        "pairs_causal": seen.sum(),
        "pairs_window": seen.clamp(max=window).sum() if window else 0,
    }


def _cross(
    text: Mapping[str, Any], lengths: torch.Tensor | None, decoder: Mapping[str, Any], answers: torch.Tensor | None
) -> dict[str, Any]:
    if not text.get("tokens_processed") or not decoder.get("tokens_processed"):
        return {}
    samples = decoder["samples"]
    encoder_length, decoder_length = text["tokens_processed"] // samples, decoder["tokens_processed"] // samples
    processed = samples * encoder_length * decoder_length
    found: dict[str, Any] = {"cross_pairs_processed": processed, "cross_pairs": processed}
    if lengths is not None and answers is not None:
        found["cross_pairs"] = (lengths * answers).sum()
    elif lengths is not None or answers is not None:
        found["cross_pairs"] = text["tokens"] * decoder["tokens"] // samples
    return found


def _dense(inputs: Mapping[str, torch.Tensor], needs: Needs) -> dict[str, int]:
    """Images of one size. Five dimensions are several images a sample when the channels come third."""
    dense = next((inputs[name] for name in (*_DENSE, "inputs_embeds") if name in inputs), None)
    if dense is None or dense.dim() < 2 or dense.numel() == 0 or any(True for _ in _grid_tensors(inputs)):
        return {}
    if needs.is_sequence_first and dense.dim() == 3:
        images = dense.shape[1]
    else:
        images = dense.shape[0] * (dense.shape[1] if dense.dim() == 5 and dense.shape[2] <= 4 else 1)
    return {"images": images, "values": dense.numel(), "values_squared": dense.numel() ** 2 // images}


def _unpadded(dense: Mapping[str, Any], lengths: torch.Tensor) -> dict[str, Any]:
    """Rows of features, as many of each sample as its length says: what of their values is padding."""
    width = dense["values"] // max(dense["tokens_processed"], 1)
    values, squared = lengths.sum() * width, (lengths * width).square().sum()
    return {
        "values": values,
        "values_squared": squared,
        "values_padding": dense["values"] - values,
        "values_squared_padding": dense["values_squared"] - squared,
    }


def _grid_tensors(inputs: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from (value for name, value in inputs.items() if name in ("image_grid_thw", "video_grid_thw"))


def _grids(inputs: Mapping[str, torch.Tensor], window: PatchWindow | None) -> dict[str, Any]:
    """Patches and their pairs from rows of (frames, patch rows, patch columns)."""
    found: dict[str, Any] = {}
    for grids in _grid_tensors(inputs):
        frames, rows, columns = grids.long().unbind(1)
        sums = {"patches": frames * rows * columns, "patch_pairs": frames * (rows * columns) ** 2}
        if window:
            sums["patch_pairs_window"] = frames * _squares(rows, window) * _squares(columns, window)
        found |= {name: found.get(name, 0) + value.sum() for name, value in sums.items()}
    return found


def _squares(side: torch.Tensor, window: PatchWindow) -> torch.Tensor:
    """Sum of the squared window sides along one side of an image."""
    cells = side // window.merge
    whole, rest = cells // window.cells, cells % window.cells
    return window.merge**2 * (whole * window.cells**2 + rest**2)

"""What was one step given, in numbers? Tokens, attended pairs, image patches: all that FLOPs grow with.

    workload_of(batch).tokens                        # reads the batch: for the host
    late = late_workload(batch)                      # reads nothing: for the training loop
    late.resolve()                                   # reads what is left: once the device has caught up

This file alone reads what a model is called with: an observed step, every other step (`WorkloadReader`, which looks
most calls up by their shapes) and a count on shapes see the same numbers. Every number is a sum over sequences or
images, so the workloads of micro-batches add up.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from msgspec import Struct
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flopmeter.torch_compat import Convolution, DisableTorchFunction, has_function_mode

_N = TypeVar("_N", int, torch.Tensor)

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
MAX_SHAPES = 512
FEW = 256
"""Numbers that Python adds up in about the time that it takes to hand them to numpy."""


Shape = tuple[tuple[tuple[Any, ...], ...], ...]
"""Of each call its tensors: their names and sizes. What only repeats the first one's (masks, labels) is left out."""


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
    if isinstance(local := getattr(text, "local_attention", None), int):
        window = local // 2 + 1  # half of it to either side, and the token itself
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
        turns = _TURNING.intersection(code.co_names) - dict(module.named_children()).keys() if code else ()
        if isinstance(module, Convolution) or (turns and not is_torchs):
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
    shape: Shape = field(default=(), compare=False)
    """What was given, call by call: what `prediction` asks beyond the sums. Two workloads may differ in it alone."""

    pairs_full = property(lambda self: 2 * self.pairs_causal - self.tokens)
    """Pairs of two tokens of one sequence or document, in either direction: n^2."""
    pairs_causal_processed = property(lambda self: (self.pairs_processed + self.tokens_processed) // 2)
    """Causal pairs of the rows as if each was full of one text."""
    pairs_window_full = property(lambda self: 2 * self.pairs_window - self.tokens if self.window else 0)
    """Pairs within the window to either side."""
    pairs_window_full_processed = property(lambda self: 2 * self.pairs_window_processed - self.tokens_processed)
    """The same of the rows as if each was full of one text."""
    decoder_pairs_full = property(lambda self: 2 * self.decoder_pairs_causal - self.decoder_tokens)
    """As `pairs_full`, of the decoder."""
    decoder_pairs_causal_processed = property(
        lambda self: (self.decoder_pairs_processed + self.decoder_tokens_processed) // 2
    )
    """As `pairs_causal_processed`, of the decoder."""
    values_processed = property(lambda self: self.values + self.values_padding)
    """Values with padding."""
    values_squared_processed = property(lambda self: self.values_squared + self.values_squared_padding)
    """Their squares with padding."""
    once = property(lambda self: 1)
    """For work that is the same in every step, as an optimizer's."""

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
    def decoder_pairs_run(self) -> int:
        """As `pairs_run`, of the decoder."""
        causal = self.decoder_pairs_causal_processed
        return causal if self.decoder_pairs_causal == causal else self.decoder_pairs_processed

    def __add__(self, other: Workload) -> Workload:
        """The workload of two micro-batches. Window pairs are kept where both were counted for the same window."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in _WINDOWS}
        for name, pairs in _WINDOWS.items():
            if getattr(self, name) == getattr(other, name):
                sums[name] = getattr(self, name)
            else:
                sums[pairs] = 0
        sums["shape"] = tuple(sorted(self.shape + other.shape))
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
        found["shape"] = ((("input", rows, padded_to),),)
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
    "pairs_window_full": "pairs_window_full_processed",
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
    text: torch.Tensor | None = None
    """The ids or embeddings that `is_real` is about; kept by an observed step alone."""
    decoder_text: torch.Tensor | None = None
    """The same of a decoder: ids, embeddings or labels."""

    def resolve(self) -> Workload:
        """The workload. Reads the device."""
        read: dict[str, Any] = {name: round(float(value)) for name, value in self.unread.items()}
        return Workload(**self.known, **read)


def workload_of(batch: Any, needs: Needs | None = None) -> Workload:
    """Read what a batch holds. Waits for the device where masks or image sizes are there."""
    return late_workload(batch, needs).resolve()


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
    found["shape"] = (_shape(inputs, several),)
    is_real = decoder_is_real = None
    ids = decoder_ids = None
    if several is not None:
        found |= _packed(several) if isinstance(several, PackedSequence) else _listed(several, needs)
        found |= _grids(inputs, needs.patch_window)
    else:
        found |= _dense(inputs, needs) | _grids(inputs, needs.patch_window)
        text, is_real = _text(inputs, "", needs)
        ids = _ids(inputs, "")
        found |= text
        lengths = None if is_real is None else is_real.sum(1)
        if lengths is not None and "inputs_embeds" in inputs and not any(name in inputs for name in _DENSE):
            found |= _unpadded(found, lengths)
        if needs.has_decoder:
            decoder, decoder_is_real = _text(inputs, "decoder_", needs)
            decoder_ids = _ids(inputs, "decoder_")
            found |= {f"decoder_{name}": value for name, value in decoder.items() if name in _TEXT}
            found |= _cross(text, lengths, decoder, None if decoder_is_real is None else decoder_is_real.sum(1))
    unread = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    known = {name: value for name, value in found.items() if name not in unread}
    return LateWorkload(
        known=known, unread=unread, is_real=is_real, decoder_is_real=decoder_is_real, text=ids, decoder_text=decoder_ids
    )


_DENSE = ("pixel_values", "input_features", "input_values")
_GRIDS = ("image_grid_thw", "video_grid_thw")
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
        first = value[0]
        width = sum(tensor.numel() for tensor in value) // max(len(first), 1)
        # As large as all inputs of the same samples together; it holds nothing.
        is_one = len(value) == 1 or _kind(first, needs) == "input_ids"
        value = first if is_one else torch.empty(len(first), width, device="meta")
    if value.dim() == 1 and (needs.reads == "ids" or value.is_floating_point()):
        value = value[:, None]  # one number a sample, no sequence of them
    return {_kind(value, needs): value, **tensors}, None


def _shape(inputs: Mapping[str, torch.Tensor], several: Sequence[torch.Tensor] | PackedSequence | None) -> Any:
    if several is not None:
        parts = (several.data, several.batch_sizes) if isinstance(several, PackedSequence) else several
        own = {f"input {place}": tensor for place, tensor in enumerate(parts)}
        return tuple((name, *own[name].shape) for name in sorted(own))
    main = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    main = next(iter(inputs.values()), None) if main is None else main
    if main is None:
        return ()
    repeated = ((), main.shape[:1], main.shape[:2])
    others = [(name, *t.shape) for name, t in inputs.items() if t is not main and tuple(t.shape) not in repeated]
    return (("input", *main.shape), *sorted(others))


def _kind(tensor: torch.Tensor, needs: Needs) -> str:
    if not _is_number(tensor):
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
    ids = _ids(inputs, prefix)
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
    is_real = real_tokens(mask) if offsets is None and mask is not None and mask.shape == (rows, length) else None
    lengths = offsets.diff().long() if offsets is not None else is_real.sum(1) if is_real is not None else None
    tokens: Any = rows * length
    causal: Any
    cut: Any
    if lengths is not None:
        tokens, causal = lengths.sum(), pairs(lengths, causal=True).sum()
        cut = pairs(lengths, causal=True, window=window).sum() if window else 0
    elif positions is not None and positions.dim() == 2 and positions.shape[1] == length:
        # A token at position p of its document sees p + 1 keys: no document needs to be found, the sum is enough.
        seen = (positions.long() - positions[:, :1] + 1).expand(rows, length)
        causal, cut = seen.sum(), seen.clamp(max=window).sum() if window else 0
    else:
        causal, cut = (rows * pairs(length, causal=True, window=own) for own in (0, window))
    return {**found, "tokens": tokens, "pairs_causal": causal, "pairs_window": cut if window else 0}, is_real


def _ids(inputs: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor | None:
    """The tensor that holds a text's tokens."""
    own = inputs.get(f"{prefix}input_ids", inputs.get(f"{prefix}inputs_embeds"))
    return inputs.get("labels") if own is None and prefix else own


def real_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask of (rows, length) has a token, on its device: not 0, since packed documents may be numbered in it.

    Floats without a positive one are to be added to scores: there 0 stands for a token.
    """
    if not mask.is_floating_point():
        return mask.bool()
    return torch.where((mask > 0).any(), mask != 0, mask == 0)


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
    if dense is None or dense.dim() < 2 or dense.numel() == 0 or any(name in inputs for name in _GRIDS):
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


def _grids(inputs: Mapping[str, torch.Tensor], window: PatchWindow | None) -> dict[str, Any]:
    """Patches and their pairs from rows of (frames, patch rows, patch columns)."""
    found: dict[str, Any] = {}
    for grids in (inputs[name] for name in _GRIDS if name in inputs):
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
    if isinstance(value, torch.Tensor) and value.is_nested:
        # As packed: how many rows there are together is known without waiting for the device, how long each is, is not.
        rows = value.numel() // value.size(-1) if value.layout == torch.strided else len(value.values())
        found[name] = PackedSequence(torch.empty(rows, device="meta"), torch.tensor([value.size(0)]))
    elif isinstance(value, torch.Tensor):
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
    first = {name: value if isinstance(value, torch.Tensor) else value[0] for name, value in inputs.items()}
    own = [name for name in inputs if not _is_label(name) and not any(word in name for word in _NO_INPUTS)]
    wide = [name for name in own if first[name].dim() >= 2 or isinstance(inputs[name], PackedSequence)]
    wants_floats = reads not in ("text", "ids")
    preferred = [n for n in wide if _is_number(first[n]) == wants_floats and first[n].dtype != torch.bool]
    narrow = [name for name in own if first[name].dim() == 1]
    others = [name for name in inputs if name not in own and first[name].dim() >= 2]
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
    others = (value for name, value in inputs.items() if name != main and "mask" not in name)
    return next((value for value in others if isinstance(value, torch.Tensor) and value.dim() >= 2), None)


def is_list_of_samples(tensors: list[torch.Tensor], reads: Reads) -> bool:
    """Whether each item is one sample: an image, a sentence; False where each is an input with samples of its own."""
    first = tensors[0]
    if first.dim() <= 1 or len({tensor.shape[0] for tensor in tensors}) > 1:
        return first.dim() > 0
    return first.dim() == 3 and reads in ("", "values") and _is_number(first)


def _is_label(name: str) -> bool:
    return name in _LABELS or name.endswith(("_labels", "_label", "_targets", "_target"))


def _is_number(tensor: torch.Tensor) -> bool:
    """Floats, and complex ones."""
    return tensor.is_floating_point() or tensor.is_complex()


class Lengths(Struct, frozen=True, gc=False):
    """A padded batch of text: how long each sample is, on its way to the host. Made on every step."""

    tensor: torch.Tensor
    """The lengths; on a CPU the mask itself, to be summed in the background, where its memory is torch's alone."""
    padded_to: int
    needs: Needs
    known: dict[tuple[int, ...], Workload]
    """Workloads by what they were padded to and the lengths."""
    version: int
    """Version of the tensor when it was seen: one that was written over since says nothing of this step."""

    def resolve(self) -> Workload | None:
        """Read it; None when the mask is no longer the one that was seen."""
        lengths = _sums(self.tensor)
        if self.tensor._version != self.version:
            return None
        key = (self.padded_to, *lengths)
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= MAX_SHAPES:
                self.known.clear()
            found = self.known[key] = Workload.of_lengths(lengths, self.padded_to, needs=self.needs)
        return found


def _sums(tensor: torch.Tensor) -> list[int]:
    """Of each row of a mask what is not zero (packed documents may be numbered in it), or the numbers themselves.

    By Python where they are few, else by numpy: an operator of torch, and the way to numpy too, let go of the
    interpreter for a moment, and a training thread that waits for it wakes up for nothing each time.
    """
    if tensor.dim() == 2 and tensor.is_floating_point():
        return real_tokens(tensor).sum(1).tolist()
    if tensor.dim() == 2 and tensor.numel() <= FEW:
        return [len(row) - row.count(0) for row in tensor.tolist()]
    try:
        numbers = tensor.numpy()
    except (RuntimeError, TypeError):  # there is no numpy
        return (real_tokens(tensor).sum(1) if tensor.dim() == 2 else tensor).tolist()
    return ((numbers != 0).sum(1) if numbers.ndim == 2 else numbers).tolist()  # type: ignore[no-any-return]


Seen = Workload | Lengths | LateWorkload | None
"""What is known of one call's batch; None where nothing of it is recognised."""

_NEW, _NESTED = Workload(samples=-1), Workload(samples=-2)
"""Stand for shapes that were not seen yet, and for calls with containers, which are looked into each time."""
_VALUES_MATTER = (
    *PADDING_MASKS[""], *PADDING_MASKS["decoder_"], "position_ids", "decoder_position_ids", *_GRIDS,
    *_OFFSETS,
)  # fmt: skip


class Copies(Protocol):
    """Brings tensors to the host, late."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor: ...


class WorkloadReader:
    """Reads what a model is called with, and collects the workloads of a step's micro-batches.

    A batch of which shapes tell everything is looked up by its shapes; one with a mask takes a few device operations,
    whose results are read after the step. A call in which nothing is recognised as input has an unknown workload, and
    so has its step, since its size may vary unseen; one that is given nothing at all is always the same work.

    Args:
        copies: Brings numbers to the host; None where they are.
        models: What the loop calls: positional arguments get the names that their forward has for them. Of several
            models, those of the first that takes the keywords.
    """

    def __init__(self, needs: Needs, copies: Copies | None = None, models: Sequence[nn.Module] = ()) -> None:
        self.needs = needs
        self._to_host: Callable[[torch.Tensor], torch.Tensor] = copies.put if copies is not None else lambda own: own
        known = [parameter_names(model) for model in models] or [()]
        self._keywords = [frozenset(names) for names in known]
        self._positions = [(*names, *map(str, range(len(names), MAX_POSITIONS))) for names in known]
        self._by_names: dict[tuple[str, ...], tuple[tuple[str, ...], bool, dict[tuple[Any, ...], Workload | None]]] = {}
        """By the names of a call: those whose values matter, whether lengths are all that there is to know, and what
        the shapes of the arguments tell where no values matter."""
        self._by_first: dict[tuple[torch.Size, torch.dtype], Workload] = {}
        self._by_lengths: dict[tuple[int, ...], Workload] = {}
        self.batches: list[Seen] = []
        """What was seen since the last `take`: one list for good."""

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

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A micro-batch goes into the model."""
        first = args[0] if len(args) == 1 and not kwargs else None
        if (
            type(first) is torch.Tensor and not has_function_mode() and not first.is_nested
        ):  # most calls have one tensor: its shape tells
            known = self._by_first.get((first.shape, first.dtype), _NEW)
            if known is not _NEW:
                self.batches.append(known)
                return
        elif not args and not has_function_mode() and (by_name := self._by_names.get(tuple(kwargs))) and by_name[1]:
            ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
            if type(mask) is torch.Tensor and type(ids) is torch.Tensor and mask.shape == ids.shape:
                self.batches.append(self._lengths(mask, mask.shape[1]))
                return
        with DisableTorchFunction():
            seen = self._read(self.bind(args, kwargs) if args else kwargs)
            self.batches.append(seen)
            if isinstance(first, torch.Tensor) and isinstance(seen, Workload) and len(self._by_first) < MAX_SHAPES:
                self._by_first[first.shape, first.dtype] = seen

    def _read(self, named: Mapping[str, Any]) -> Seen:
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in named.values()):
            return self._late(named)
        names = tuple(named)
        telling, is_text, by_shape = self._by_names.get(names) or self._learn(names)
        if is_text:
            ids, mask = named["input_ids"], named["attention_mask"]
            if isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape:
                return self._lengths(mask, mask.shape[1])
        if telling and any(named[name] is not None for name in telling):
            return self._late(named)
        # Not a tensor's dtype, which the name goes with; what is no tensor tells by its class whether to look inside.
        key = tuple([value.shape if isinstance(value, torch.Tensor) else value.__class__ for value in named.values()])
        known = by_shape.get(key, _NEW)
        if known is _NEW:
            known = self._learn_shapes(named)
            if len(by_shape) < MAX_SHAPES:
                by_shape[key] = known
        if known is not _NESTED:
            return known
        inside = flatten(named)  # arguments in containers, whose shapes no key tells
        if inside and all(isinstance(value, torch.Tensor) for value in inside.values()):
            return self._read(inside)
        return self._late(inside) if inside else None

    def _learn(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], bool, dict[tuple[Any, ...], Workload | None]]:
        if len(self._by_names) >= MAX_SHAPES:
            self._by_names.clear()
        telling = tuple(name for name in _VALUES_MATTER if name in names)
        is_text = "input_ids" in names and not self.needs.has_decoder and not any(name in names for name in _DENSE)
        return self._by_names.setdefault(names, (telling, is_text and telling == ("attention_mask",), {}))

    def _learn_shapes(self, named: Mapping[str, Any]) -> Workload | None:
        others = [value for value in named.values() if not isinstance(value, torch.Tensor)]
        if len(flatten(named)) != len(named) - len(others) or any(map(_may_hold, others)):
            return _NESTED
        found = late_workload(self.in_order(named), self.needs).resolve()
        is_known = found.samples or not (len(others) < len(named) or any(map(can_vary, others)))
        return found if is_known else None

    def _late(self, named: Mapping[str, Any]) -> Seen:
        late = late_workload(named, self.needs)
        if not late.unread and not late.known.get("samples"):
            return None
        unread = {name: self._to_host(value) for name, value in late.unread.items()}
        return LateWorkload(known=late.known, unread=unread)

    def see_mask(self, mask: torch.Tensor) -> None:
        """The mask of a batch that the model was given without it."""
        self.batches[:] = self.with_mask(self.batches, mask)

    def with_mask(self, seen: Sequence[Seen], mask: torch.Tensor) -> Sequence[Seen]:
        """What was seen of a step whose mask is told apart; with several micro-batches it is nobody's."""
        with DisableTorchFunction():
            return (self._lengths(mask, mask.shape[1]),) if mask.dim() == 2 and len(seen) <= 1 else seen

    def _lengths(self, mask: torch.Tensor, padded_to: int) -> Lengths:
        # Memory shared with numpy cannot be resized. What is written there later changes no version: it is summed now.
        is_ours = mask.is_cpu and mask.untyped_storage().resizable()
        tensor = mask if is_ours else self._to_host(real_tokens(mask).sum(1))
        return Lengths(tensor, padded_to, self.needs, self._by_lengths, tensor._version)

    @property
    def last_shape(self) -> Shape | None:
        """What the latest micro-batch looks like; None where nothing of it is recognised."""
        seen = self.batches[-1] if self.batches else None
        if isinstance(seen, LateWorkload):
            return seen.known.get("shape")
        if isinstance(seen, Lengths):
            return ((("input", len(seen.tensor), seen.padded_to),),)
        return None if seen is None else seen.shape

    def drop(self, begin: int, end: int | None = None) -> None:
        """Forget micro-batches, by their places: the pass over them has failed."""
        del self.batches[begin:end]

    def take(self) -> tuple[Seen, ...]:
        """What was seen since the last call."""
        seen = tuple(self.batches)
        self.batches.clear()
        return seen


def resolve(seen: Sequence[Seen]) -> Workload | None:
    """The step's workload; None when it is not known. Reads the device: call it when that has caught up."""
    total: Workload | None = None
    for item in seen:
        known: Workload | None
        if item is None or isinstance(item, Workload):
            known = item
        else:
            with DisableTorchFunction():
                known = item.resolve()
        if known is None:
            return None
        total = known if total is None else total + known
    return total


def _may_hold(value: Any) -> bool:
    """Whether there may be tensors in it, in this call or in one that looks the same."""
    return isinstance(value, (Mapping, list, tuple)) or (hasattr(value, "__dict__") and not callable(value))

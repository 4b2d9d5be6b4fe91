"""What was the step given? Sizes at once, contents of masks and grids late: nothing is read on the training thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from flopmeter.flops.workload import LateWorkload, Needs, Workload, late_workload
from flopmeter.timing.late import HostCopies

_VALUES_MATTER = (
    "attention_mask", "position_ids", "image_grid_thw", "video_grid_thw", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q",
    "decoder_attention_mask", "decoder_position_ids",
)  # fmt: skip
_BESIDE_TEXT = ("pixel_values", "input_features", "input_values")
MAX_SHAPES = 512
FEW = 256
"""Numbers that Python adds up in about the time that it takes to hand them to numpy."""


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
    """Of each row, or the numbers themselves.

    By Python where they are few, else by numpy: an operator of torch, and the way to numpy too, let go of the
    interpreter for a moment, and a training thread that waits for it wakes up for nothing each time.
    """
    if tensor.dim() == 2 and tensor.numel() <= FEW:
        return [sum(row) for row in tensor.tolist()]
    try:
        numbers = tensor.numpy()
    except (RuntimeError, TypeError):  # there is no numpy, or it does not know the dtype
        return (_row_sums(tensor) if tensor.dim() == 2 else tensor).tolist()
    exact = "f8" if numbers.dtype.kind == "f" else None
    return (numbers.sum(1, dtype=exact) if numbers.ndim == 2 else numbers).tolist()  # type: ignore[no-any-return]


def _row_sums(mask: torch.Tensor) -> torch.Tensor:
    """On its device. In half precision a sum beyond a few hundred would be rounded."""
    return mask.sum(1, dtype=torch.float32 if mask.is_floating_point() else None)


Seen = Workload | Lengths | LateWorkload


class _Telling(NamedTuple):
    """What the names of a call say of it; looked at once for each set of names."""

    names: tuple[str, ...]
    """Those whose values matter."""
    is_text_with_mask: bool
    """Whether lengths are all that there is to know."""

    @classmethod
    def of(cls, names: tuple[str, ...], needs: Needs) -> _Telling:
        telling = tuple(name for name in _VALUES_MATTER if name in names)
        is_text = "input_ids" in names and not needs.has_decoder and not any(name in names for name in _BESIDE_TEXT)
        return cls(telling, is_text and telling == ("attention_mask",))


class WorkloadReader:
    """Collects the workloads of a step's micro-batches.

    A batch of which shapes tell everything is looked up by its shapes; one with a mask takes a few device operations,
    whose results are read after the step.

    Args:
        copies: Brings them to the host.
    """

    def __init__(self, needs: Needs, copies: HostCopies | None = None) -> None:
        self._needs = needs
        self._to_host = (copies or HostCopies()).put
        self._telling: dict[tuple[str, ...], _Telling] = {}
        self._by_shape: dict[tuple[Any, ...], Workload] = {}
        self._by_lengths: dict[tuple[int, ...], Workload] = {}
        self._seen: list[Seen] = []

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A micro-batch goes into the model."""
        telling = self._telling.get(tuple(kwargs)) or self._learn(tuple(kwargs))
        if telling.is_text_with_mask:
            ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
            if isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor):
                shape = mask.shape
                if shape == ids.shape:
                    self._seen.append(self._lengths(mask, shape[1]))
                    return
        if telling.names and any(kwargs[name] is not None for name in telling.names):
            self._seen.append(self._late(kwargs))
        else:
            self._seen.append(self._of_shapes(args, kwargs))

    def _learn(self, names: tuple[str, ...]) -> _Telling:
        telling = self._telling[names] = _Telling.of(names, self._needs)
        return telling

    def _of_shapes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Workload:
        key = tuple([value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])
        known = self._by_shape.get(key)
        if known is None:
            known = late_workload(kwargs or args, self._needs).resolve({})
            if len(self._by_shape) < MAX_SHAPES:
                self._by_shape[key] = known
        return known

    def _late(self, kwargs: Mapping[str, Any]) -> Seen:
        late = late_workload(kwargs, self._needs)
        return replace(late, unread={name: self._to_host(value) for name, value in late.unread.items()})

    def see_mask(self, mask: torch.Tensor) -> None:
        """The mask of a batch that the model was given without it."""
        self._seen = list(self.with_mask(self._seen, mask))

    def with_mask(self, seen: Sequence[Seen], mask: torch.Tensor) -> Sequence[Seen]:
        """What was seen of a step whose mask is told apart; with several micro-batches it is nobody's."""
        return (self._lengths(mask, mask.shape[1]),) if mask.dim() == 2 and len(seen) <= 1 else seen

    def _lengths(self, mask: torch.Tensor, padded_to: int) -> Lengths:
        # Memory shared with numpy cannot be resized. What is written there later changes no version: it is summed now.
        is_ours = mask.is_cpu and mask.untyped_storage().resizable()
        tensor = mask if is_ours else self._to_host(_row_sums(mask))
        return Lengths(tensor, padded_to, self._needs, self._by_lengths, tensor._version)

    def take(self) -> tuple[Seen, ...]:
        """What was seen since the last call."""
        seen = tuple(self._seen)
        self._seen.clear()
        return seen


def resolve(seen: Sequence[Seen]) -> Workload | None:
    """The step's workload; None when it is not known. Reads the device: call it when that has caught up."""
    total: Workload | None = None
    for item in seen:
        known: Workload | None
        if isinstance(item, Workload):
            known = item
        elif isinstance(item, Lengths):
            known = item.resolve()
        else:
            known = item.resolve({name: float(value) for name, value in item.unread.items()})
        if known is None:
            return None
        total = known if total is None else total + known
    return total

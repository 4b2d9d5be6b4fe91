"""What was the step given? Sizes at once, contents of masks and grids late: nothing is read on the training thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import nn

from flopmeter.flops.arguments import PADDING_MASKS, CallNames, can_vary, flatten
from flopmeter.flops.workload import LateWorkload, Needs, Workload, late_workload, real_tokens
from flopmeter.timing.late import HostCopies
from flopmeter.torch_compat import DisableTorchFunction, has_function_mode

_VALUES_MATTER = (
    *PADDING_MASKS[""], *PADDING_MASKS["decoder_"], "position_ids", "decoder_position_ids", "image_grid_thw",
    "video_grid_thw", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q",
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
        with DisableTorchFunction():
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
        return _row_sums(tensor).tolist()
    if tensor.dim() == 2 and tensor.numel() <= FEW:
        return [len(row) - row.count(0) for row in tensor.tolist()]
    try:
        numbers = tensor.numpy()
    except (RuntimeError, TypeError):  # there is no numpy
        return (_row_sums(tensor) if tensor.dim() == 2 else tensor).tolist()
    return ((numbers != 0).sum(1) if numbers.ndim == 2 else numbers).tolist()  # type: ignore[no-any-return]


def _row_sums(mask: torch.Tensor) -> torch.Tensor:
    """On its device."""
    return real_tokens(mask).sum(1)


Seen = Workload | Lengths | LateWorkload | None
"""What is known of one call's batch; None where nothing of it is recognised."""

_NEW = Workload(samples=-1)
_NESTED = Workload(samples=-2)
"""Stand for shapes that were not seen yet, and for calls with containers, which are looked into each time."""


class _Telling(NamedTuple):
    """What the names of a call say of it; looked at once for each set of names."""

    names: tuple[str, ...]
    """Those whose values matter."""
    is_text_with_mask: bool
    """Whether lengths are all that there is to know."""
    by_shape: dict[tuple[Any, ...], Workload | None]
    """What the shapes of the arguments tell, where no values matter."""

    @classmethod
    def of(cls, names: tuple[str, ...], needs: Needs) -> _Telling:
        telling = tuple(name for name in _VALUES_MATTER if name in names)
        is_text = "input_ids" in names and not needs.has_decoder and not any(name in names for name in _BESIDE_TEXT)
        return cls(telling, is_text and telling == ("attention_mask",), {})


class WorkloadReader:
    """Collects the workloads of a step's micro-batches.

    A batch of which shapes tell everything is looked up by its shapes; one with a mask takes a few device operations,
    whose results are read after the step. A call in which nothing is recognised as input has an unknown workload, and
    so has its step, since its size may vary unseen; one that is given nothing at all is always the same work.

    Args:
        copies: Brings them to the host.
        models: What the loop calls: positional arguments get the names that their forward has for them. Of several
            models, those of the first that takes the keywords.
    """

    def __init__(self, needs: Needs, copies: HostCopies | None = None, models: Sequence[nn.Module] = ()) -> None:
        self._needs = needs
        self._to_host = (copies or HostCopies()).put
        self._names = CallNames(models)
        self._telling: dict[tuple[str, ...], _Telling] = {}
        self._by_first: dict[tuple[torch.Size, torch.dtype], Workload] = {}
        self._by_lengths: dict[tuple[int, ...], Workload] = {}
        self._seen: list[Seen] = []

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A micro-batch goes into the model."""
        if len(args) == 1 and not kwargs and type(first := args[0]) is torch.Tensor and not has_function_mode():
            known = self._by_first.get((first.shape, first.dtype), _NEW)
            if known is not _NEW:
                self._seen.append(known)
                return
        with DisableTorchFunction():
            self._seen.append(self._read(self._names.bind(args, kwargs) if args else kwargs))
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                self._note_first(args[0], self._seen[-1])

    def _note_first(self, first: torch.Tensor, seen: Seen) -> None:
        """A call with one tensor, which most are: its shape tells, once it was seen."""
        if isinstance(seen, Workload) and len(self._by_first) < MAX_SHAPES:
            self._by_first[first.shape, first.dtype] = seen

    def _read(self, named: Mapping[str, Any]) -> Seen:
        names = tuple(named)
        telling = self._telling.get(names) or self._learn(names)
        if telling.is_text_with_mask:
            ids, mask = named["input_ids"], named["attention_mask"]
            if isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor):
                shape = mask.shape
                if shape == ids.shape:
                    return self._lengths(mask, shape[1])
        if telling.names and any(named[name] is not None for name in telling.names):
            return self._late(named)
        # Not a tensor's dtype, which the name goes with; what is no tensor tells by its class whether to look inside.
        key = tuple([value.shape if isinstance(value, torch.Tensor) else value.__class__ for value in named.values()])
        known = telling.by_shape.get(key, _NEW)
        if known is _NEW:
            known = self._learn_shapes(named)
            if len(telling.by_shape) < MAX_SHAPES:
                telling.by_shape[key] = known
        return self._look_inside(named) if known is _NESTED else known

    def _learn(self, names: tuple[str, ...]) -> _Telling:
        if len(self._telling) >= MAX_SHAPES:
            self._telling.clear()
        telling = self._telling[names] = _Telling.of(names, self._needs)
        return telling

    def _learn_shapes(self, named: Mapping[str, Any]) -> Workload | None:
        others = [value for value in named.values() if not isinstance(value, torch.Tensor)]
        if len(flatten(named)) != len(named) - len(others) or any(map(_may_hold, others)):
            return _NESTED
        found = late_workload(self._names.in_order(named), self._needs).resolve({})
        is_known = found.samples or not (len(others) < len(named) or any(map(can_vary, others)))
        return found if is_known else None

    def _look_inside(self, named: Mapping[str, Any]) -> Seen:
        """Arguments in containers, whose shapes no key tells."""
        inside = flatten(named)
        if inside and all(isinstance(value, torch.Tensor) for value in inside.values()):
            return self._read(inside)
        return self._late(inside) if inside else None

    def _late(self, named: Mapping[str, Any]) -> Seen:
        late = late_workload(named, self._needs)
        if not late.unread and not late.known.get("samples"):
            return None
        return replace(late, unread={name: self._to_host(value) for name, value in late.unread.items()})

    def see_mask(self, mask: torch.Tensor) -> None:
        """The mask of a batch that the model was given without it."""
        self._seen = list(self.with_mask(self._seen, mask))

    def with_mask(self, seen: Sequence[Seen], mask: torch.Tensor) -> Sequence[Seen]:
        """What was seen of a step whose mask is told apart; with several micro-batches it is nobody's."""
        with DisableTorchFunction():
            return (self._lengths(mask, mask.shape[1]),) if mask.dim() == 2 and len(seen) <= 1 else seen

    def _lengths(self, mask: torch.Tensor, padded_to: int) -> Lengths:
        # Memory shared with numpy cannot be resized. What is written there later changes no version: it is summed now.
        is_ours = mask.is_cpu and mask.untyped_storage().resizable()
        tensor = mask if is_ours else self._to_host(_row_sums(mask))
        return Lengths(tensor, padded_to, self._needs, self._by_lengths, tensor._version)

    @property
    def num_seen(self) -> int:
        """Micro-batches since the last `take`."""
        return len(self._seen)

    def drop(self, begin: int, end: int | None = None) -> None:
        """Forget micro-batches, by their places: the pass over them has failed."""
        del self._seen[begin:end]

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
        if item is None or isinstance(item, Workload):
            known = item
        elif isinstance(item, Lengths):
            known = item.resolve()
        else:
            with DisableTorchFunction():
                known = item.resolve({name: float(value) for name, value in item.unread.items()})
        if known is None:
            return None
        total = known if total is None else total + known
    return total


def _may_hold(value: Any) -> bool:
    """Whether there may be tensors in it, in this call or in one that looks the same."""
    return isinstance(value, (Mapping, list, tuple)) or (hasattr(value, "__dict__") and not callable(value))

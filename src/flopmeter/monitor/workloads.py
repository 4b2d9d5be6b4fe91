"""What was the step given? Sizes at once, contents of masks and grids late: nothing is read on the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flopmeter.flops.workload import LateWorkload, Needs, Workload, late_workload

_VALUES_MATTER = (
    "attention_mask", "position_ids", "image_grid_thw", "video_grid_thw", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q",
    "decoder_attention_mask", "decoder_position_ids",
)  # fmt: skip
MAX_SHAPES = 512


class Lengths(NamedTuple):
    """A padded batch of text: how long each sample is, on its way to the host."""

    tensor: torch.Tensor
    """The lengths; on a CPU the mask itself, to be summed in the background."""
    padded_to: int
    needs: Needs

    def resolve(self) -> Workload:
        """Read it."""
        lengths = self.tensor.sum(1) if self.tensor.dim() == 2 else self.tensor
        return Workload.of_lengths(lengths.tolist(), self.padded_to, needs=self.needs)


Seen = Workload | Lengths | LateWorkload


class WorkloadReader:
    """Collects the workloads of a step's micro-batches.

    A batch of which shapes tell everything is looked up by its shapes; one with a mask takes a few device operations,
    whose results are read after the step.
    """

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._by_shape: dict[tuple[Any, ...], Workload] = {}
        self._seen: list[Seen] = []

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A micro-batch goes into the model."""
        telling = [name for name in _VALUES_MATTER if kwargs.get(name) is not None]
        if telling:
            self._seen.append(self._late(telling, kwargs))
            return
        key = tuple([value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])
        known = self._by_shape.get(key)
        if known is None:
            known = late_workload(kwargs or args, self._needs).resolve({})
            if len(self._by_shape) < MAX_SHAPES:
                self._by_shape[key] = known
        self._seen.append(known)

    def _late(self, telling: list[str], kwargs: Mapping[str, Any]) -> Seen:
        mask = kwargs.get("attention_mask")
        ids = kwargs.get("input_ids")
        is_plain = telling == ["attention_mask"] and not self._needs.has_decoder
        if is_plain and isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape:
            return self._lengths(mask)
        late = late_workload(kwargs, self._needs)
        return replace(late, unread={name: to_host(value) for name, value in late.unread.items()})

    def see_mask(self, mask: torch.Tensor) -> None:
        """The mask of a batch that the model was given without it; with several micro-batches it is nobody's."""
        if mask.dim() == 2 and len(self._seen) <= 1:
            self._seen = [self._lengths(mask)]

    def _lengths(self, mask: torch.Tensor) -> Lengths:
        tensor = mask if mask.device.type == "cpu" else to_host(mask.sum(1))
        return Lengths(tensor, mask.shape[1], self._needs)

    def take(self) -> list[Seen]:
        """What was seen since the last call."""
        seen, self._seen = self._seen, []
        return seen


def resolve(seen: list[Seen]) -> Workload:
    """The step's workload. Reads what is on the device: call it when the device has caught up."""
    total: Workload | None = None
    for item in seen:
        if isinstance(item, LateWorkload):
            item = item.resolve({name: float(value) for name, value in item.unread.items()})
        elif isinstance(item, Lengths):
            item = item.resolve()
        total = item if total is None else total + item
    return total if total is not None else Workload()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the host, without waiting for it."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

"""What did an observed step show besides its FLOPs: tiny operators, waits for the device, old ways of doing things?

Left out: `tolist()` and `numpy()` on CPU tensors, which read memory without passing the dispatcher; and what runs
inside a compiled region.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from flopmeter.devices import uses_tf32
from flopmeter.torch_compat import num_recompiles

if TYPE_CHECKING:
    from flopmeter.flops.flop_count import FlopCount
    from flopmeter.flops.observation import Observation
    from flopmeter.flops.tally import Call

MAX_PLACES = 10
MAX_ODD = 10
MAX_MODULES = 10
MAX_LOOKS = 200
"""Walking up the stack costs microseconds: a loop over tokens is known after so many calls."""
MIN_ODD_SIZE = 128
"""Ten classes are no multiple of 8 either, and cost nothing."""

_READS = frozenset({"aten::_local_scalar_dense"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_SIZE_DEPENDS_ON_VALUES = frozenset({"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"})
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1}
"""Products of two matrices, and where the first of them stands among the arguments."""
MAX_PRODUCTS = 24
WRAPPERS = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")
"""What shares a model out among ranks, as torch names it."""
_MAY_WAIT = _READS | _COPIES | _SIZE_DEPENDS_ON_VALUES
_PACKAGE = f"{Path(__file__).parent}/"
_DEMO = _PACKAGE + "demo/"
_TORCH = f"{Path(torch.__file__).parent}/"
_WATCHERS = frozenset({"step_facts.py", "observation.py"})
"""Files of ours that are on the stack whenever an operator is seen."""


class StepFacts:
    """Counts while a step is observed: one dictionary look-up per operator, more only where the host waits.

    Args:
        device_type: Where the model trains. On a CPU nothing waits for a device, but each value that is read one by
            one still costs its call, and the same code would wait on a GPU.
    """

    def __init__(self, device_type: str) -> None:
        self.num_ops = 0
        self.num_optimizer_ops = 0
        self.optimizer: Literal["fused", "foreach", "for-loop"] | None = None
        self.host_syncs: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.products: Counter[tuple[str, int, int, int]] = Counter()
        """Calls by dtype, rows, columns and inner length."""
        self._device_type = device_type
        self._num_looks = 0

    def see(self, op: str, args: tuple[Any, ...], out: Any, is_in_optimizer: bool) -> None:
        """An operator ran."""
        self.num_ops += 1
        if is_in_optimizer:
            self.num_optimizer_ops += 1
            if op.startswith("aten::_fused_"):
                self.optimizer = "fused"
            elif op.startswith("aten::_foreach_") and self.optimizer != "fused":
                self.optimizer = "foreach"
            elif self.optimizer is None:
                self.optimizer = "for-loop"
        if op in _PRODUCTS:
            left, right = args[_PRODUCTS[op] :][:2]
            self.products[str(left.dtype).removeprefix("torch."), left.shape[0], right.shape[1], left.shape[1]] += 1
        if op in _MAY_WAIT and self._waits(op, args, out, is_in_optimizer):
            self._num_looks += 1
            if self._num_looks <= MAX_LOOKS:
                place = _user_place(sys._getframe(1))
                if place is None:
                    return
                if place in self.places or len(self.places) < MAX_PLACES:
                    self.places[place] += 1
            self.host_syncs[op] += 1

    def _waits(self, op: str, args: tuple[Any, ...], out: Any, is_in_optimizer: bool) -> bool:
        source = next((value for value in reversed(args) if isinstance(value, torch.Tensor)), None)
        if source is None or source.device.type != self._device_type:
            return False  # a value that lies on the host already
        if self._device_type == "cpu":
            return op in _READS and not is_in_optimizer  # torch's optimizers read their own step count
        return op not in _COPIES or (isinstance(out, torch.Tensor) and out.device.type == "cpu")


def facts_of(observation: Observation, count: FlopCount) -> dict[str, Any]:
    """The fields of the event `facts`, as far as one observed step shows them."""
    seen = observation.facts
    assert seen is not None
    kinds = [kind for root in observation.roots for kind in type(root).__mro__]
    # By dtype and sizes (rows, columns, inner length), with their calls; most work first.
    products = sorted(seen.products.items(), key=lambda item: -item[1] * item[0][1] * item[0][2] * item[0][3])
    fields: dict[str, Any] = {
        "num_ops": seen.num_ops,
        "num_optimizer_ops": seen.num_optimizer_ops,
        "num_parameter_tensors": sum(p.requires_grad for root in observation.roots for p in root.parameters()),
        "host_syncs": dict(seen.host_syncs),
        "host_sync_places": [place for place, _ in seen.places.most_common()],
        "odd_sizes": odd_sizes(observation.roots),
        "matmul_dtypes": dict(count.by_dtype),
        "products": [[*key, calls] for key, calls in products[:MAX_PRODUCTS]],
        "tf32": uses_tf32() if observation.device_type == "cuda" else None,
        "optimizer": seen.optimizer,
        "wrapper": next((kind.__name__ for kind in kinds if kind.__name__ in WRAPPERS), None),
        "is_compiled": observation.has_compiled,
        "num_recompiles": num_recompiles() if observation.has_compiled else None,
    }
    return fields | eager_attention(observation.calls)


def eager_attention(calls: Iterable[Call]) -> dict[str, Any]:
    """Attention that was spelled out as product, softmax, product; nothing when all of it went through SDPA."""
    found = {
        id(call.pairs): call
        for call in calls
        if call.phase == "forward" and not call.is_attention and call.pairs is not None and call.pairs.is_spelled_out
    }
    if not found:
        return {}
    modules = dict.fromkeys(call.frame.path for call in found.values())
    length = max(call.pairs.num_keys for call in found.values() if call.pairs is not None)
    return {"eager_attention": {"calls": len(found), "length": length, "modules": list(modules)[:MAX_MODULES]}}


def odd_sizes(roots: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Large weight matrices with a side that is no multiple of 8, which tensor cores want."""
    linears = ((path, m) for root in roots for path, m in root.named_modules() if isinstance(m, nn.Linear))
    found = [
        {"module": path, "dimension": name, "size": size}
        for path, linear in linears
        for name, size in (("in_features", linear.in_features), ("out_features", linear.out_features))
        if size % 8 and size >= MIN_ODD_SIZE
    ]
    return found[:MAX_ODD]


def _user_place(frame: FrameType | None) -> str | None:
    """File and line of the training code that is at work; None when we are."""
    while frame is not None:
        path = frame.f_code.co_filename
        is_ours = path.startswith(_PACKAGE) and not path.startswith(_DEMO)
        if not is_ours and not path.startswith((_TORCH, "<")):
            return f"{Path(path).name}:{frame.f_lineno}"
        if is_ours and Path(path).name not in _WATCHERS:
            return None
        frame = frame.f_back
    return None

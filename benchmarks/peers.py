"""What do other FLOP counters say of the same step? One adapter each, used as its own documentation shows.

A tool that sees only the forward pass is given the usual rule, three times the forward, as its training count. Tools
that count a multiply-add as one are doubled: the rows compare what they see, not how they name it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from cases import Case

Counter = Callable[[Case], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another FLOP counter."""

    name: str
    """What `--peers` takes."""
    forward: Counter
    """FLOPs of a forward pass; raises where the tool cannot tell."""
    training: Counter | None = None
    """FLOPs of a training step; None for a tool that sees one direction: three times the forward stands in."""


class Positional(nn.Module):
    """The case's model, called with positional tensors and returning one tensor, for tools that know no other way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.names = case.model, tuple(case.batch)

    def forward(self, *values: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.names, values, strict=True)))
        tensor: Tensor = output if isinstance(output, Tensor) else output.loss
        return tensor


def torch_counter(run: Callable[[], Any]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def torch_profiler(run: Callable[[], Any]) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        run()
    return sum(event.flops or 0 for event in profiler.events() or ())


def fvcore(case: Case) -> float:
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(Positional(case), tuple(case.batch.values()))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return 2 * float(analysis.total())


def calflops(case: Case) -> float:
    from calflops import calculate_flops

    flops, _, _ = calculate_flops(case.model, kwargs=case.batch, print_results=False, output_as_string=False)
    return float(flops)


def ptflops(case: Case) -> float:
    from ptflops import get_model_complexity_info

    macs, _ = get_model_complexity_info(
        case.model, (1,), input_constructor=lambda _: case.batch, as_strings=False, print_per_layer_stat=False
    )
    return 2 * float(macs)


def thop(case: Case) -> float:
    from thop import profile

    macs, _ = profile(Positional(case), inputs=tuple(case.batch.values()), verbose=False)
    return 2 * float(macs)


def torchinfo(case: Case) -> float:
    from torchinfo import summary

    return 2 * float(summary(case.model, input_data=case.batch, verbose=0).total_mult_adds)


def deepspeed(case: Case) -> float:
    from deepspeed.profiling.flops_profiler import get_model_profile

    flops, _, _ = get_model_profile(case.model, kwargs=case.batch, print_profile=False, as_string=False)
    return float(flops)


def trainer(case: Case) -> float:
    """A third of the Trainer's `floating_point_ops`: 6 x elements of the main input x parameters less embeddings."""
    from transformers import Trainer

    flops = Trainer.floating_point_ops(SimpleNamespace(model=case.model), case.batch)  # type: ignore[arg-type]
    if not flops:
        raise ValueError("only knows transformers models")
    return float(flops) / 3


def six_n(case: Case) -> float:
    """The forward share, 2 x parameters x tokens, of the rule of thumb."""
    if "input_ids" not in case.batch:
        raise ValueError("only defined for tokens")
    num_parameters = sum(parameter.numel() for parameter in case.model.parameters())
    return 2.0 * num_parameters * case.batch["input_ids"].numel()


def watching(name: str, count: Callable[[Callable[[], Any]], float]) -> Peer:
    """A counter of whatever runs inside it."""
    return Peer(name=name, forward=lambda case: count(case.forward), training=lambda case: count(case.step))


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        watching("FlopCounterMode", torch_counter),
        watching("profiler", torch_profiler),
        Peer(name="fvcore", forward=fvcore),
        Peer(name="calflops", forward=calflops),
        Peer(name="ptflops", forward=ptflops),
        Peer(name="thop", forward=thop),
        Peer(name="torchinfo", forward=torchinfo),
        Peer(name="deepspeed", forward=deepspeed),
        Peer(name="hf_6nd", forward=trainer),
        Peer(name="6n", forward=six_n),
    )
}


def installed_versions() -> dict[str, Any]:
    """Versions of what the table depends on, None where something is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    def find(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    names = ("torch", "transformers", "peft", "fvcore", "calflops", "ptflops", "thop", "torchinfo", "deepspeed")
    return {name: find(name) for name in names}

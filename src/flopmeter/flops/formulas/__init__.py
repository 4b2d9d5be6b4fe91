"""How many FLOPs does one operator need, given only the shapes it was called with?

Each file holds one operator family. A formula is a small pure function that takes the operator's own arguments, with
every tensor replaced by its `Spec`, and returns the FLOPs as an int, or as `Work` where conventions or kernels differ:

    from flopmeter import formula

    @formula("mylib::scaled_mm")
    def scaled_mm(a, b, scale):
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]

Formulas use plain arithmetic only, so that they also work on symbolic sizes and on the shapes in a profiler trace.
A formula that cannot tell (a lost shape, an unknown sequence length) raises ValueError, IndexError or TypeError: the
call is then uncounted. A trace shows operators inside operators (`aten::linear` around `aten::addmm`): count the
outermost one whose formula answers, and nothing below it. Matmul-like work only: element-wise operators and reductions
have no formula and count as 0. No torch is imported here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, TypeVar


class Spec(NamedTuple):
    """What a formula may know of a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    """As torch prints it, without the `torch.`: "bfloat16", "complex64"."""
    values: tuple[int, ...] | None = None
    """The tensor's integers, only for arguments that the formula asked for by `values=`."""
    nnz: int | None = None
    """How many values a sparse tensor stores (`values().numel()`); None for a dense one."""


class Work(NamedTuple):
    """FLOPs of one call where it matters who counts; an operator with no such split returns a plain int."""

    full: int
    """Every query-key pair counted, whether or not the mask lets it through (PaLM's way)."""
    exact: int
    """Only the pairs that the mask lets through."""
    hardware: int
    """What the kernel executes: recomputation inside a fused backward included, skipped blocks excluded."""


PRODUCTS = frozenset({"matmul", "grouped", "quantized", "sparse"})
"""Families whose operators surround each other: of such a nest the innermost is closest to what ran."""
MATRIX_WORD = re.compile(r"\w*mm|matmul|conv(olution)?\d?d?|attention|(bi|tri)?linear|lstm|gru|rnn|einsum")
"""A word in the name of an operator that probably does matrix work, whether or not it has a formula."""
_SOLVER = re.compile(
    r"aten::_?(linalg_(?!cross|diagonal|norm|vector_norm|check_errors)\w+|cholesky\w*|geqrf|lobpcg|lu_(solve|unpack)"
    r"|matrix_exp|orgqr|ormqr|svd|triangular_solve)"
)
RECORDED_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
}
"""Types as a profiler records them, in torch's words; one that is not here is "c10::" and torch's own word."""

FormulaFunction = Callable[..., "int | Work"]
_F = TypeVar("_F", bound=FormulaFunction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """One registered formula."""

    op: str
    """Qualified operator name without its overload: "aten::mm"."""
    function: FormulaFunction
    family: str
    """Name of the file that holds it ("attention", "matmul"), or "user"."""
    values: tuple[str, ...] = ()
    """Arguments whose integers the formula needs (sequence offsets, for instance)."""
    composite: bool = False
    """True when the dispatcher splits the operator before a mode sees it: only traces and inference mode show it."""
    parameters: tuple[str, ...] = ()
    """The function's parameters; with one named `out` it is given the result's Spec (or a tuple of them), with one
    named `wanted` which of the forward operator's inputs want a gradient, where its autograd node tells."""

    @property
    def wants_out(self) -> bool:
        """Whether the function asks for the result's shape."""
        return "out" in self.parameters

    @property
    def wants_wanted(self) -> bool:
        """Whether the function asks which gradients somebody wants."""
        return "wanted" in self.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Work:
        result = self.function(*args, **kwargs)
        return result if isinstance(result, Work) else Work(result, result, result)


_registry: dict[str, Formula] = {}


def formula(*ops: str, values: Sequence[str] = (), composite: bool = False) -> Callable[[_F], _F]:
    """Register the decorated function as the FLOP formula of the named operators ("namespace::name").

    Args:
        values: Names of integer tensor arguments whose contents the formula needs. They are copied while the step is
            observed and read after it, so they cost no synchronisation. A tuple stands for every integer tensor in it.
        composite: See `Formula.composite`.
    """

    def register(function: _F) -> _F:
        module = function.__module__
        family = module.rpartition(".")[2] if module.startswith(__name__ + ".") else "user"
        parameters = tuple(inspect.signature(function).parameters)
        for op in ops:
            if op.count("::") != 1:
                raise ValueError(f"an operator is named 'namespace::name', not {op!r}")
            # A user's formula stays, even when it came before our own families were loaded.
            if family != "user" and op in _registry:
                continue
            _registry[op] = Formula(
                op=op,
                function=function,
                family=family,
                values=tuple(values),
                composite=composite,
                parameters=parameters,
            )
        return function

    return register


@cache
def _load_families() -> None:
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")


def find(op: str) -> Formula | None:
    """The formula of an operator ("aten::mm"), or None when nobody has registered one."""
    _load_families()
    return _registry.get(op)


@cache
def is_solver(op: str) -> bool:
    """Whether an operator of torch's inverts, solves or decomposes matrices: n^3 FLOPs, how many depends on the kernel.

    There are no formulas for them, so they are named as uncounted. `linalg_vector_norm`, which clips gradients, and
    other point-wise work of that family is none of them.
    """
    return _SOLVER.fullmatch(op) is not None


@cache
def num_positional(function: FormulaFunction) -> int | None:
    """Arguments that a formula takes by position; None when it takes any number of them."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)


def all_formulas() -> dict[str, Formula]:
    """Every registered formula by operator name."""
    _load_families()
    return dict(_registry)

"""How many FLOPs does one operator need, given only the shapes it was called with?

Each file holds one operator family. A formula is a small pure function that takes the operator's own arguments, with
every tensor replaced by its `Spec`, and returns the FLOPs as an int, or as `Work` where conventions or kernels differ:

    from flopmeter import formula

    @formula("mylib::scaled_mm")
    def scaled_mm(a, b, scale):
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]

Where operators differ only in the order of their arguments, each order is one line, a row: the operators that have it,
and a name for each argument in the order of their schema. The function then gets them by these names, and takes those
it needs:

    @formula("aten::mm aten::bmm left right", "aten::addmm added left right")
    def product(left, right, **_):
        return matmul_flop(left, right)

Formulas use plain arithmetic only, so that they also work on the shapes in a profiler trace. One that cannot tell (a
lost shape, an unknown sequence length) raises ValueError, IndexError or TypeError: the call is then uncounted. A trace
shows operators inside operators (`aten::linear` around `aten::addmm`): count the outermost one whose formula answers,
and nothing below it. Matmul-like work only: element-wise operators and reductions have no formula and count as 0. No
torch is imported here.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
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


_MATRIX_WORD = re.compile(
    r"\w*mm|matmul|conv(olution)?\d?d?|attention|(bi|tri)?linear|lstm|gru|rnn|einsum|i?stft|i?[rh]?fft[2n]?"
)
"""A word in the name of an operator that probably does matrix work, whether or not it has a formula."""
_POINTWISE = re.compile(
    r"_thnn_\w*cell\w*|fft_i?r?fft(shift|freq)|\w*rnn_flatten_weight|mkldnn_reorder_\w+|__upsample\w+"
)
"""Operators whose names hold such a word, and which do none."""
_SOLVER = re.compile(
    r"aten::_?(linalg_(?!cross|diagonal|norm|vector_norm|_powsum|vander|check_errors)\w+|cholesky\w*|geqrf|lobpcg|lu_(solve|unpack)"
    r"|matrix_exp|orgqr|ormqr|svd|triangular_solve)"
)
_TORCHS_OWN = frozenset(
    {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor", "fsdp", "higher_order", "mkldnn"}
)
"""Namespaces whose operators are known: one of them without a formula has matrix work only if its name says so."""
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
    """Name of the file that holds it ("attention", "matmul"), "user", or "library" for one registered with torch."""
    values: tuple[str, ...] = ()
    """Arguments whose integers the formula needs (sequence offsets, for instance)."""
    composite: bool = False
    """True when the dispatcher splits the operator before a mode sees it: only traces and inference mode show it."""
    parameters: tuple[str, ...] = ()
    """Names of the arguments in their order: the row's, or the function's own."""
    is_row: bool = False
    """Whether the function gets its arguments by the names of a row."""
    num_positional: int | None = None
    """Arguments that the function takes by position; None for any number of them."""
    takes_wanted: bool = False
    """Whether the function has a parameter `wanted`: which of the forward operator's inputs want a gradient, where its
    autograd node tells."""

    def __call__(self, *args: Any, **options: Any) -> Work:
        if self.is_row:
            result = self.function(**dict(zip(self.parameters, args, strict=False)), **options)
        else:
            result = self.function(*args, **options)
        return result if isinstance(result, Work) else Work(result, result, result)

    def of_record(self, arguments: Sequence[Any]) -> Work:
        """FLOPs of a recorded call: keyword-only arguments come last, and are dropped where they have no place."""
        return self(*arguments[: self.num_positional])


_registry: dict[str, Formula] = {}


def formula(*ops: str, values: Sequence[str] = (), composite: bool = False) -> Callable[[_F], _F]:
    """Register the decorated function as the FLOP formula of the named operators ("namespace::name").

    Args:
        ops: Operators; one or more, followed by the names of their arguments, are a row (see above).
        values: Names of integer tensor arguments whose contents the formula needs. They are copied while the step is
            observed and read after it, so they cost no synchronisation. A tuple stands for every integer tensor in it.
        composite: See `Formula.composite`.
    """

    def register(function: _F) -> _F:
        module = getattr(function, "func", function).__module__
        family = module.rpartition(".")[2] if module.startswith(__name__ + ".") else "user"
        own = inspect.signature(function).parameters
        kinds = [parameter.kind for parameter in own.values()]
        num_positional = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        for row in ops:
            names = [word for word in row.split() if "::" not in word]
            for op in [word for word in row.split() if "::" in word] or [row]:
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
                    parameters=tuple(names or own),
                    is_row=bool(names),
                    takes_wanted="wanted" in own,
                    num_positional=None if names or inspect.Parameter.VAR_POSITIONAL in kinds else num_positional,
                )
        return function

    return register


@cache
def _load_families() -> None:
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")


def find(op: str) -> Formula | None:
    """The formula of an operator ("aten::mm"): ours or a user's, else what its library has registered with torch."""
    _load_families()
    return _registry.get(op) or _of_library(op)


def _of_library(op: str) -> Formula | None:
    """What `torch.utils.flop_counter.register_flop_formula` was given for an operator that is not torch's own."""
    namespace, _, name = op.partition("::")
    counter = sys.modules.get("torch.utils.flop_counter")
    if namespace in _TORCHS_OWN or counter is None:
        return None
    function = counter.flop_registry.get(getattr(getattr(sys.modules["torch"].ops, namespace), name, None))
    if function is None:
        return None
    of_shapes = getattr(function, "__wrapped__", None)  # torch puts a function around those that take shapes

    def count(*args: Any, **options: Any) -> int:
        if of_shapes is None:
            return int(function(*args, **options, out_val=None))
        return int(
            of_shapes(*map(_shape, args), **{key: _shape(value) for key, value in options.items()}, out_shape=None)
        )

    return Formula(op=op, function=count, family="library")


def _shape(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.shape
    return [_shape(item) for item in value] if isinstance(value, (list, tuple)) else value


@cache
def is_matrix_work(op: str) -> bool:
    """Whether an operator's time is matrix work: it has a formula, or the name of an operator that would have one.

    Solvers and decompositions have no formula (n^3 FLOPs, how many depends on the kernel), so they go by name.
    `linalg_vector_norm`, which clips gradients, and other point-wise work of that family is none of them.
    """
    name = op.rpartition("::")[2]
    is_named_so = any(map(_MATRIX_WORD.fullmatch, name.split("_"))) and not _POINTWISE.fullmatch(name)
    return is_named_so or _SOLVER.fullmatch(op) is not None or find(op) is not None


@cache
def may_hide_flop(op: str) -> bool:
    """Whether an operator without a formula is to be named as uncounted: matrix work, or nobody knows what it does."""
    namespace = op.partition("::")[0]
    if namespace == "aten":
        return is_matrix_work(op)
    return namespace not in _TORCHS_OWN and re.fullmatch(r"\w+::\w+", op) is not None


def is_closer(inner: Formula, outer: Formula) -> bool:
    """Whether an operator inside another is the same work, told closer to what ran: a product inside a product.

    What a family is lowered to is not closer: the products inside an attention know nothing of its mask.
    """
    is_same_family = inner.family == outer.family
    return inner.op == outer.op or (is_same_family and (outer.composite or inner.family == "matmul"))


def all_formulas() -> dict[str, Formula]:
    """Every registered formula by operator name."""
    _load_families()
    return dict(_registry)


def multiply_add_flop(dtype: str) -> int:
    """2, so that an m x k by k x n product takes 2mkn (Golub and Van Loan, Matrix Computations, section 1.1).

    A complex multiply-add is 4 real multiplications and 4 real additions: 8 FLOP.
    """
    return 8 if dtype.startswith("complex") else 2


def entries(tensor: Spec) -> int:
    """Values that a tensor stores; only a tensor whose shape a trace has lost is refused."""
    if not tensor.shape:
        raise ValueError("the shape of an operand is unknown")
    return prod(tensor.shape) if tensor.nnz is None else tensor.nnz


def tensors(values: Any) -> list[Spec]:
    """The members of a tensor list; older traces lose them and show a list as one tensor without shape."""
    if isinstance(values, Spec) or not all(isinstance(value, Spec) for value in values):
        raise ValueError("the shapes in a list of tensors are unknown")
    return list(values)


def linear_flop(tokens: Spec, *weights: Spec) -> int:
    """Every weight meets every token once; the last dimension of `tokens` is the features'."""
    *rows, _ = tokens.shape
    return multiply_add_flop(tokens.dtype) * prod(rows) * sum(entries(weight) for weight in weights)


def attention_work(full: int, exact: int, dim: int, dim_v: int, is_backward: bool) -> Work:
    """FLOPs over so many pairs of all heads. A fused backward computes all gradients, wanted or not."""
    if is_backward:
        return Work(4 * full * (dim + dim_v), 4 * exact * (dim + dim_v), exact * (6 * dim + 4 * dim_v))
    return Work(2 * full * (dim + dim_v), 2 * exact * (dim + dim_v), 2 * exact * (dim + dim_v))

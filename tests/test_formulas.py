"""Every FLOP formula: a stated call costs what brute force counts, and arguments are where the schema has them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from flopmeter.flops.formulas import Spec, Work, all_formulas, find, formula
from formulas_attention_cases import attention_cases
from formulas_calls import FOREIGN, Case
from formulas_cases import other_cases

CASES = [*attention_cases(), *other_cases()]
KNOWN_TO_TORCH = sorted(set(all_formulas()) - set(FOREIGN))
LOST = Spec(())
"""What a reader makes of a tensor whose shape the trace does not tell."""


def ask(op: str, *args: Any, **options: Any) -> Work:
    found = find(op)
    assert found is not None
    return found(*args, **options)


# The stated calls


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.op)
def test_a_stated_call_costs_what_counting_one_by_one_gives(call: Case) -> None:
    assert ask(call.op, *call.args, **call.options) == call.expected
    assert ask(call.op, *call.args[: call.num_given], **call.options) == call.expected


def test_every_formula_has_a_stated_call() -> None:
    assert {call.op for call in CASES} == set(all_formulas())


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.op)
def test_a_call_whose_shapes_are_lost_is_refused_as_callers_expect(call: Case) -> None:
    def lose(value: Any) -> Any:
        is_tensors = isinstance(value, list) and all(isinstance(item, Spec) for item in value)
        return LOST if isinstance(value, Spec) or is_tensors else value

    with pytest.raises((ValueError, IndexError, TypeError)):
        ask(call.op, *map(lose, call.args), **{name: lose(value) for name, value in call.options.items()})
    for index, value in enumerate(call.args):
        try:
            ask(call.op, *call.args[:index], lose(value), *call.args[index + 1 :], **call.options)
        except (ValueError, IndexError, TypeError):
            continue


# The contract with the dispatcher


@pytest.mark.parametrize("op", KNOWN_TO_TORCH)
def test_parameters_are_the_schema_s_in_every_overload(op: str) -> None:
    parameters = list(inspect.signature(all_formulas()[op].function).parameters.values())
    ordered = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    for schema in torch._C._jit_get_schemas_for_operator(op):
        names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        options = {argument.name: None for argument in schema.arguments if argument.kwarg_only}
        inspect.signature(all_formulas()[op].function).bind(*names, **options)
        assert keywords - {"wanted"} <= set(options)  # that one is the autograd node's, see Formula.parameters
        for mine, theirs in zip(ordered, names, strict=False):
            # `out` alone would ask for the result (Formula.wants_out), hence `_out`.
            assert mine.lstrip("_") == theirs.lstrip("_") or (mine == "input" and theirs == "data")


@pytest.mark.parametrize("op", KNOWN_TO_TORCH)
def test_values_are_asked_of_arguments_that_exist(op: str) -> None:
    schemas = torch._C._jit_get_schemas_for_operator(op)
    names = {argument.name for schema in schemas for argument in schema.arguments}
    assert set(all_formulas()[op].values) <= names


@pytest.mark.parametrize("op", [op for op in KNOWN_TO_TORCH if op.startswith("aten::")])
def test_composite_means_that_torch_splits_the_operator_before_a_mode_sees_it(op: str) -> None:
    schemas = [s for s in torch._C._jit_get_schemas_for_operator(op) if "out" not in s.overload_name]
    full_names = [f"{op}.{s.overload_name}" if s.overload_name else op for s in schemas]
    splits = [torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd") for name in full_names]
    assert all_formulas()[op].composite == all(splits)


def test_no_formula_needs_the_result() -> None:
    assert not [op for op, found in all_formulas().items() if found.wants_out]


def test_a_users_formula_wins_even_if_it_came_first_and_nothing_imports_torch() -> None:
    program = (
        "import sys\n"
        "from flopmeter.flops.formulas import all_formulas, find, formula\n"
        "formula('aten::mm')(lambda *args: 7)\n"
        "all_formulas()\n"
        "assert find('aten::mm')().exact == 7 and find('aten::mm').family == 'user'\n"
        "assert find('aten::bmm').family == 'matmul'\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_operator_name_without_namespace_is_refused() -> None:
    with pytest.raises(ValueError, match="namespace::name"):
        formula("mm")(lambda: 0)


# Symbolic sizes


def _symbolic(*shape: int) -> tuple[ShapeEnv, tuple[torch.SymInt, ...]]:
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    fake = FakeTensorMode(shape_env=env).from_tensor(torch.empty(*shape), symbolic_context=context)
    return env, tuple(fake.shape)


@pytest.mark.parametrize("field", Work._fields)
@pytest.mark.parametrize("op", ["aten::mm", "aten::convolution", "aten::scaled_dot_product_attention"])
def test_symbolic_sizes_give_an_expression_and_no_guard(op: str, field: str) -> None:
    def call(a: Any, b: Any) -> Any:
        args = {
            "aten::mm": (Spec((a, b)), Spec((b, 5))),
            "aten::convolution": (
                Spec((a, 4, b, 9)),
                Spec((6, 4, 3, 3)),
                None,
                [2, 2],
                [1, 1],
                [1, 1],
                False,
                [0, 0],
                1,
            ),
            "aten::scaled_dot_product_attention": (*[Spec((a, 4, b, 8))] * 3, None, 0.0, True),
        }[op]
        return getattr(ask(op, *args), field)

    env, (a, b) = _symbolic(6, 10)
    expression = call(a, b).node.expr
    for numbers in ((2, 7), (3, 12), (5, 33)):
        assert expression.subs(dict(zip((a.node.expr, b.node.expr), numbers, strict=True))) == call(*numbers)
    assert not env.guards

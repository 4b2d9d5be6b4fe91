"""Every FLOP formula: a stated call costs what brute force counts, and arguments are where the schema has them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

import flopmeter
from flopmeter.flops.formulas import Spec, Work, all_formulas, find, formula, is_matrix_work, may_hide_flop
from flopmeter.flops.formulas.attention import visible_pairs
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


@pytest.mark.parametrize("is_bottom_right", [False, True])
@pytest.mark.parametrize("right", [None, -1, 0, 1, 2])
@pytest.mark.parametrize("left", [None, -1, 0, 1, 2])
def test_a_band_lets_through_what_looking_at_every_pair_finds(
    left: int | None, right: int | None, is_bottom_right: bool
) -> None:
    for num_queries, num_keys in ((1, 1), (3, 5), (5, 3), (4, 4)):
        shift = num_keys - num_queries if is_bottom_right else 0
        seen = [
            key
            for query, key in product(range(num_queries), range(num_keys))
            if (left in (None, -1) or key >= query + shift - left)
            and (right in (None, -1) or key <= query + shift + right)
        ]
        assert visible_pairs(num_queries, num_keys, left, right, is_bottom_right) == len(seen)


# Recurrent layers of which not every gradient is wanted: 5 steps of 3 sequences of 7 features, 2 units of 4 gates

TOKENS = Spec((5, 3, 7))
ONE_WAY = [Spec((8, 7)), Spec((8, 2)), Spec((8,)), Spec((8, 2)), Spec((8, 2)), Spec((8,))]
"""Two layers: the weights of input and state of each, and a bias."""
BOTH_WAYS = [Spec((8, 7)), Spec((8, 2)), Spec((8, 7)), Spec((8, 2))]
"""One layer."""
PROJECTED = [Spec((8, 7)), Spec((8, 1)), Spec((1, 2)), Spec((8, 1)), Spec((8, 1)), Spec((1, 2))]
"""Two layers whose states are projected to one number."""


@pytest.mark.parametrize(
    ("weights", "is_both_ways", "once", "to_input", "to_state"),
    [
        (ONE_WAY, False, 2 * 15 * (56 + 16 + 16 + 16), 2 * 15 * 56, 2 * 3 * (16 + 16)),
        (BOTH_WAYS, True, 2 * 15 * 2 * (56 + 16), 2 * 15 * (56 + 56), 2 * 3 * (16 + 16)),
        (PROJECTED, False, 2 * 15 * (56 + 8 + 2 + 8 + 8 + 2), 2 * 15 * 56, 2 * 3 * (8 + 8)),
    ],
    ids=["one way", "both ways", "projected"],
)
@pytest.mark.parametrize("wants_weights", [False, True])
@pytest.mark.parametrize("wants_state", [False, True])
@pytest.mark.parametrize("wants_input", [False, True])
def test_a_recurrent_backward_needs_what_somebody_wants(
    weights: list[Spec],
    is_both_ways: bool,
    once: int,
    to_input: int,
    to_state: int,
    wants_input: bool,
    wants_state: bool,
    wants_weights: bool,
) -> None:
    state = Spec((2, 3, weights[1].shape[1]))
    executed = once * (2 if wants_weights else 1)
    needed = executed - (0 if wants_input else to_input) - (0 if wants_state else to_state)
    for op, sizes in (("aten::_cudnn_rnn_backward", [2, 4, 0, 2]), ("aten::miopen_rnn_backward", [2, 4, 2])):
        # cx, output, three gradients; mode and sizes; batch_first, dropout, train; batch_sizes, dropout_state, reserve
        rest = [*[None] * 5, *sizes, True, 0.0, True, is_both_ways, [], None, Spec((1,))]
        mask = [wants_input, wants_state, wants_state, wants_weights]
        assert ask(op, TOKENS, weights, 4, Spec((1,)), state, *rest, mask) == Work(needed, needed, executed)


@pytest.mark.parametrize(
    ("unwanted", "saved"),
    [
        ([], 0),
        ([0], 2 * 15 * 56),
        ([1], 2 * 15 * 56),
        ([2], 2 * 15 * 16),
        ([3, 4, 6], 0),
        ([5], 2 * 3 * 16),
        ([0, 1, 2, 3, 4, 5, 6], 2 * 2 * 15 * 56 + 2 * 15 * 16 + 2 * 3 * 16),
    ],
    ids=["nothing", "input", "weights of the input", "weights of the state", "biases and cell", "state", "all"],
)
def test_a_layer_on_a_cpu_computes_all_gradients_and_needs_those_that_are_wanted(
    unwanted: list[int], saved: int
) -> None:
    every = 2 * 2 * 15 * (56 + 16)
    arguments = [TOKENS, Spec((8, 7)), Spec((8, 2)), Spec((8,)), Spec((8,)), Spec((3, 2)), *[None] * 7]
    wanted = [place not in unwanted for place in range(7)]
    expected = Work(every - saved, every - saved, every)
    assert ask("aten::mkldnn_rnn_layer_backward", *arguments, wanted=wanted) == expected
    if not unwanted:
        assert ask("aten::mkldnn_rnn_layer_backward", *arguments) == expected


# Calls that make no sense, or do not tell enough


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    image, weight = Spec((2, 4, 7, 6)), Spec((6, 4, 3, 2))
    with pytest.raises(ValueError, match="zip"):
        ask("aten::conv2d", image, weight, None, [1, 1, 1])
    with pytest.raises(ValueError, match="zip"):
        ask("aten::_foreach_mm", [Spec((3, 4))], [Spec((4, 5)), Spec((4, 5))])
    with pytest.raises(ValueError, match="list of tensors"):
        ask("aten::_foreach_mm", [Spec((3, 4)), None], [Spec((4, 5)), Spec((4, 5))])


PACKED = (Spec((6, 4, 8)), Spec((9, 2, 8)), Spec((9, 2, 6)))
"""Queries, keys and values: 6 over 9, in sequences that the offsets tell."""
WHOLE = 2 * 18 * 4 * (8 + 6)
"""Three sequences of 2 queries over 3 keys, 4 heads, two products."""


@pytest.mark.parametrize(
    ("ends_q", "ends_k", "max_q", "max_k"),
    [
        (Spec((4,)), Spec((4,)), 2, 3),
        (Spec((4,), values=(0, 2, 4, 6)), Spec((4,)), 2, 3),
        (Spec((4,)), Spec((4,), values=(0, 3, 6, 9)), 2, 3),
        (Spec((4,), values=(0, 2, 4, 6)), Spec((4,), values=(0, 3, 6, 9)), None, None),
    ],
)
def test_packed_sequences_of_one_length_need_no_offsets(
    ends_q: Spec, ends_k: Spec, max_q: int | None, max_k: int | None
) -> None:
    work = ask("aten::_flash_attention_forward", *PACKED, ends_q, ends_k, max_q, max_k, 0.0, False)
    assert work == Work(WHOLE, WHOLE, WHOLE)


@pytest.mark.parametrize(
    ("ends_q", "ends_k", "max_q", "max_k", "reason"),
    [
        (Spec((4,)), None, 2, 3, "offsets of both"),
        (Spec((4,)), Spec((4,)), None, 3, "longest lengths"),
        (Spec((4,)), Spec((4,)), 2, None, "longest lengths"),
        (Spec((4,)), Spec((4,)), 3, 3, "not all equal"),
        (Spec((4,)), Spec((4,)), 2, 4, "not all equal"),
        (Spec((4,), values=(0, 2, 4, 6)), Spec((3,), values=(0, 3, 9)), 2, 6, "zip"),
    ],
)
def test_packed_sequences_of_unknown_lengths_are_refused(
    ends_q: Spec, ends_k: Spec | None, max_q: int | None, max_k: int | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ask("aten::_flash_attention_forward", *PACKED, ends_q, ends_k, max_q, max_k, 0.0, False)


@pytest.mark.parametrize(("ends_q", "ends_k"), [(None, Spec((4,))), (Spec((4,)), None)])
def test_offsets_of_one_side_alone_are_refused_by_hopper(ends_q: Spec | None, ends_k: Spec | None) -> None:
    with pytest.raises(ValueError, match="offsets of both"):
        ask("flash_attn_3::fwd", *PACKED, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)


# The contract with the dispatcher


def test_one_formula_asks_which_gradients_somebody_wants() -> None:
    assert {op for op, found in all_formulas().items() if found.takes_wanted} == {"aten::mkldnn_rnn_layer_backward"}


def test_a_recorded_call_drops_what_the_function_has_no_place_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.flops.formulas._registry", {})
    formula("test::three")(lambda a, b, /, c, *, d=0: a + b + c + d)
    formula("test::any")(lambda *numbers: sum(numbers))
    formula("test::row first - third")(lambda first, third, **_: first + third)
    results = [all_formulas()[f"test::{op}"].of_record([1, 2, 3, 4]).exact for op in ("three", "any", "row")]
    assert results == [6, 10, 4]


MATRIX_WORK = """
    aten::linalg_inv_ex aten::_linalg_svd aten::cholesky_solve aten::fft_rfft aten::stft
    aten::_slow_conv2d_backward aten::_triton_scaled_dot_attention aten::_weight_int4pack_mm aten::conv_tbc
    aten::_lstm_mps aten::_cslt_sparse_mm aten::_sparse_semi_structured_linear aten::sparse_sampled_addmm
    mylib::anything
"""
POINT_WISE = """
    aten::linalg_vector_norm aten::linalg_cross aten::lgamma aten::digamma aten::polygamma aten::mvlgamma aten::igamma_
    aten::_standard_gamma aten::special_gammaln aten::cummax aten::_cummin_helper aten::cummaxmin_backward
    aten::hamming_window aten::_convert_indices_from_coo_to_csr aten::_convert_weight_to_int4pack
    aten::_thnn_fused_lstm_cell aten::_thnn_fused_gru_cell_backward aten::_thnn_differentiable_lstm_cell_backward
    aten::fft_fftshift aten::fft_rfftfreq aten::upsample_bilinear2d aten::_cudnn_rnn_flatten_weight
    c10d::allreduce_ prims::convert_element_type higher_order::cond
"""


@pytest.mark.parametrize("op", [*MATRIX_WORK.split(), *POINT_WISE.split()])
def test_matrix_work_without_a_formula_is_known_by_name(op: str) -> None:
    assert find(op) is None
    assert may_hide_flop(op) is (op in MATRIX_WORK.split())


def test_operators_with_a_formula_are_matrix_work_and_others_go_by_name() -> None:
    products = "addmm mkldnn_convolution _scaled_dot_product_flash_attention_for_cpu_backward mkldnn_rnn_layer"
    others = "gelu _softmax native_layer_norm _thnn_fused_gru_cell cummax"
    assert all(is_matrix_work(f"aten::{name}") for name in products.split())
    assert not any(is_matrix_work(f"aten::{name}") for name in others.split())
    assert not is_matrix_work("autograd::engine::evaluate_function: ConvolutionBackward0")


class Pointwise(torch.nn.Linear):
    """A product, and point-wise functions whose names sound like matrix work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).abs() + 1
        highest, lowest = y.cummax(0).values, y.cummin(0).values
        return y.lgamma() + y.digamma() + torch.polygamma(1, y) + torch.mvlgamma(y + 2, 2) + highest + lowest


def test_a_point_wise_function_is_not_reported_as_uncounted() -> None:
    count = flopmeter.count_flops(Pointwise(4, 4), torch.ones(3, 4))
    assert count.uncounted == {}
    assert count.forward_flop == 2 * 3 * 4 * 4


@pytest.mark.parametrize("op", KNOWN_TO_TORCH)
def test_arguments_stand_where_every_overload_has_them(op: str) -> None:
    found = all_formulas()[op]
    own = inspect.signature(found.function)
    for schema in torch._C._jit_get_schemas_for_operator(op):
        names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        if found.is_row:
            places = {name: place for place, name in enumerate(found.parameters) if name in names}
            assert places == {name: names.index(name) for name in places}
        else:
            own.bind(*names, **{argument.name: None for argument in schema.arguments if argument.kwarg_only})


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


def test_operators_with_one_order_of_arguments_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.flops.formulas._registry", {})
    formula("mylib::one mylib::two added left right")(lambda left, right, **_: left * right)
    assert [find(f"mylib::{name}")(1, 3, 4).full for name in ("one", "two")] == [12, 12]


def test_an_operator_name_without_namespace_is_refused() -> None:
    with pytest.raises(ValueError, match="namespace::name"):
        formula("mm")(lambda: 0)

"""Real operators of random shapes, forward and through autograd, cost what counting multiply-adds one by one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from flopmeter.flops.formulas import Spec, Work, find
from formulas_bruteforce import (
    backward_work,
    band,
    causal,
    convolution_taps,
    everything,
    forward_work,
    observe,
    observe_training,
    radix2_fft,
    to_spec,
    transposed_taps,
    tuples,
    visible_pairs,
)

small = st.integers(1, 4)
few_examples = settings(max_examples=20, derandomize=True, database=None)


def random(*shape: int, grad: bool = True, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad, **options)


def ask(op: str, *args: Any, **options: Any) -> Work:
    found = find(op)
    assert found is not None
    return found(*args, **options)


@few_examples
@given(m=st.integers(0, 4), k=small, n=small, batch=st.lists(small, max_size=2))
def test_matmul_and_its_two_gradients_are_three_products(m: int, k: int, n: int, batch: list[int]) -> None:
    forward, backward = observe_training(lambda: random(*batch, m, k) @ random(*batch, k, n))
    product = 2 * tuples(*batch, m, k, n)
    assert (forward.total(), backward.total()) == (product, 2 * product)


@few_examples
@given(m=small, k=small, n=small, batch=small)
def test_fused_additions_count_the_product_only(m: int, k: int, n: int, batch: int) -> None:
    left, right, one, two = random(batch, m, k), random(batch, k, n), random(m, k), random(k, n)
    product = 2 * tuples(m, k, n)
    assert observe(lambda: torch.addmm(random(m, n), one, two)).total() == product
    assert observe(lambda: torch.baddbmm(random(batch, m, n), left, right)).total() == batch * product
    assert observe(lambda: torch.addbmm(random(m, n), left, right)).total() == batch * product
    assert observe(lambda: torch.addmv(random(m), one, random(k))).total() == 2 * tuples(m, k)
    assert observe(lambda: torch.addr(random(m, k), random(m), random(k))).total() == 2 * tuples(m, k)
    assert observe(lambda: torch.dot(random(k), random(k))).total() == 2 * k
    assert observe(lambda: torch.mm(one.detach(), two.detach(), out=torch.empty(m, n))).total() == product
    assert observe(lambda: torch._foreach_mm([one], [two])).total() == product


@few_examples
@given(b=small, q=small, k=small, d=st.integers(2, 4))  # einsum contracts a dimension of 1 by an element-wise product
def test_linear_and_einsum_are_counted_by_what_they_are_lowered_to(b: int, q: int, k: int, d: int) -> None:
    layer = torch.nn.Linear(d, k)
    forward, backward = observe_training(lambda: layer(random(b, q, d)))
    assert (forward.total(), backward.total()) == (2 * tuples(b, q, d, k), 4 * tuples(b, q, d, k))
    forward, backward = observe_training(lambda: torch.einsum("bqd,bkd->bqk", random(b, q, d), random(b, k, d)))
    assert (forward.total(), backward.total()) == (2 * tuples(b, q, k, d), 4 * tuples(b, q, k, d))


@st.composite
def broadcast_operands(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Shapes that `matmul` accepts: vectors, matrices, batches that differ in rank or have a 1."""
    inner = draw(small)
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    batches = [[draw(st.sampled_from([size, 1])) for size in batch[draw(st.integers(0, len(batch))) :]] for _ in "ab"]
    left = draw(st.sampled_from([[inner], [*batches[0], draw(small), inner]]))
    right = draw(st.sampled_from([[inner], [*batches[1], inner, draw(small)]]))
    return left, right


@settings(few_examples, max_examples=60)
@given(shapes=broadcast_operands())
def test_matmul_counts_its_broadcast_batch(shapes: tuple[list[int], list[int]]) -> None:
    left, right = (random(*shape, grad=False) for shape in shapes)
    result = left @ right
    inner = shapes[0][-1]
    work = ask("aten::matmul", Spec(tuple(left.shape)), Spec(tuple(right.shape)))
    assert work.exact == 2 * inner * tuples(*result.shape)


TOKENS, SEQUENCE = torch.randn(3, 4), torch.randn(5, 2, 4)
COMPOSITES = {
    "aten::linear": lambda: F.linear(TOKENS, torch.ones(5, 4), torch.ones(5)),
    "aten::matmul": lambda: SEQUENCE @ torch.ones(4, 3),
    "aten::conv2d": lambda: F.conv2d(torch.ones(2, 3, 6, 7), torch.ones(4, 3, 2, 3), stride=2, padding=1),
    "aten::conv_transpose2d": lambda: F.conv_transpose2d(torch.ones(2, 4, 6, 7), torch.ones(4, 3, 2, 3), stride=2),
    "aten::scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*[torch.ones(2, 3, 6, 8)] * 3),
    "aten::lstm": lambda: torch.nn.LSTM(4, 6, 2, bidirectional=True)(SEQUENCE),
    "aten::gru": lambda: torch.nn.GRU(4, 6)(SEQUENCE),
    "aten::rnn_tanh": lambda: torch.nn.RNN(4, 6)(SEQUENCE),
    "aten::lstm_cell": lambda: torch.nn.LSTMCell(4, 6)(TOKENS),
    "aten::gru_cell": lambda: torch.nn.GRUCell(4, 6)(TOKENS),
}


@pytest.mark.parametrize("op", COMPOSITES)
def test_a_composite_operator_costs_what_it_is_split_into(op: str) -> None:
    with torch.inference_mode():
        whole = observe(COMPOSITES[op])
    parts = observe(COMPOSITES[op])
    assert whole.ops() == {op}
    assert op not in parts.ops()
    assert whole.total() == parts.total()


def test_a_frozen_weight_costs_no_gradient() -> None:
    forward, backward = observe_training(lambda: random(3, 4) @ random(4, 5, grad=False))
    assert backward.total() == forward.total() == 2 * tuples(3, 4, 5)


def test_a_complex_product_is_four_real_products() -> None:
    forward, backward = observe_training(lambda: random(3, 4, dtype=torch.cfloat) @ random(4, 5, dtype=torch.cfloat))
    # (a + bi)(c + di) added to a sum: products ac, bd, ad, bc; sums ac - bd, ad + bc, and one for each part of the sum.
    assert forward.total() == (4 + 4) * tuples(3, 4, 5)
    assert backward.total() == 2 * forward.total()


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.integers(1, 3))
    axis = st.lists(st.integers(1, 2), min_size=rank, max_size=rank)
    return {
        "groups": draw(st.integers(1, 3)),
        "batch": draw(st.integers(0, 2)),
        "channels": (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        "sizes": draw(st.lists(st.integers(3, 5), min_size=rank, max_size=rank)),
        "kernel": draw(axis),
        "stride": draw(axis),
        "padding": draw(st.lists(st.integers(0, 1), min_size=rank, max_size=rank)),
        "dilation": draw(axis),
        "wanted": draw(st.sampled_from([(True, True), (True, False), (False, True)])),
    }


@few_examples
@given(shape=convolutions())
def test_convolution_costs_its_taps_forward_and_for_each_gradient_asked(shape: dict[str, Any]) -> None:
    groups, (channels_in, channels_out), sizes = shape["groups"], shape["channels"], shape["sizes"]
    weight_shape = (groups * channels_out, channels_in, *shape["kernel"])
    axes = {name: shape[name] for name in ("stride", "padding", "dilation")}
    image = random(shape["batch"], groups * channels_in, *sizes, grad=shape["wanted"][0])
    weight = random(*weight_shape, grad=shape["wanted"][1])
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(sizes) - 1]
    forward, backward = observe_training(lambda: convolve(image, weight, groups=groups, **axes))
    taps = 2 * convolution_taps(shape["batch"], sizes, weight_shape, groups, **axes)
    assert (forward.total(), backward.total()) == (taps, taps * sum(shape["wanted"]))


@few_examples
@given(shape=convolutions())
def test_transposed_convolution_costs_its_taps_forward_and_for_each_gradient_asked(shape: dict[str, Any]) -> None:
    groups, (channels_in, channels_out), sizes = shape["groups"], shape["channels"], shape["sizes"]
    weight_shape = (groups * channels_in, channels_out, *shape["kernel"])
    image = random(shape["batch"], groups * channels_in, *sizes, grad=shape["wanted"][0])
    weight = random(*weight_shape, grad=shape["wanted"][1])
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(sizes) - 1]
    axes = {name: shape[name] for name in ("stride", "dilation")}
    forward, backward = observe_training(lambda: convolve(image, weight, groups=groups, **axes))
    taps = 2 * transposed_taps(shape["batch"], sizes, weight_shape)
    assert (forward.total(), backward.total()) == (taps, taps * sum(shape["wanted"]))


def test_a_convolution_padded_to_the_same_size_costs_one_window_for_each_input_position() -> None:
    forward, _ = observe_training(lambda: F.conv2d(random(2, 3, 5, 6), random(4, 3, 3, 3), padding="same"))
    assert forward.total() == 2 * tuples(2, 5, 6, 4, 3, 3, 3)


@few_examples
@given(b=small, h=small, sq=small, sk=small, d=small, is_causal=st.booleans())
def test_fused_and_unfused_attention_agree_on_the_full_count(
    b: int, h: int, sq: int, sk: int, d: int, is_causal: bool
) -> None:
    def attend() -> torch.Tensor:
        shapes = (b, h, sq, d), (b, h, sk, d), (b, h, sk, d)
        return F.scaled_dot_product_attention(*(random(*shape) for shape in shapes), is_causal=is_causal)

    exact = visible_pairs(sq, sk, causal) if is_causal else sq * sk
    forward, backward = observe_training(attend)
    assert forward.calls == [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", forward_work(b * h, sq * sk, exact, d, d))
    ]
    assert backward.calls == [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", backward_work(b * h, sq * sk, exact, d, d))
    ]
    with sdpa_kernel(SDPBackend.MATH):
        unfused_forward, unfused_backward = observe_training(attend)
    assert unfused_forward.total("hardware") == forward.total("full")
    assert unfused_backward.total("hardware") == backward.total("full")


@given(sq=st.integers(0, 6), sk=st.integers(0, 6), left=st.integers(-1, 7), right=st.integers(-1, 7), on=st.booleans())
@settings(max_examples=200, derandomize=True, database=None)
def test_a_sliding_window_counts_the_pairs_inside_it(sq: int, sk: int, left: int, right: int, on: bool) -> None:
    query, key = Spec((2, sq, 3, 5)), Spec((2, sk, 1, 5))
    work = ask("flash_attn::_flash_attn_forward", query, key, key, 0.0, 1.0, on, left, right)
    exact = visible_pairs(sq, sk, band(sq, sk, left, 0 if on else right))
    assert work == forward_work(6, sq * sk, exact, 5, 5)


@few_examples
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), on=st.booleans())
def test_packed_sequences_do_not_see_each_other(lengths: list[int], on: bool) -> None:
    ends = tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
    offsets, tokens = Spec((len(ends),), "int32", values=ends), Spec((ends[-1], 3, 5))
    args = (tokens, tokens, tokens, offsets, offsets, max(lengths), max(lengths), 0.0, 1.0, on)
    full = sum(visible_pairs(length, length, everything) for length in lengths)
    exact = sum(visible_pairs(length, length, causal if on else everything) for length in lengths)
    assert ask("flash_attn::_flash_attn_varlen_forward", *args) == forward_work(3, full, exact, 5, 5)


def test_packed_lengths_that_nobody_knows_are_refused_not_guessed() -> None:
    tokens, offsets = Spec((7, 3, 5)), Spec((3,), "int32")
    with pytest.raises(ValueError, match="unknown"):
        ask("flash_attn::_flash_attn_varlen_forward", tokens, tokens, tokens, offsets, offsets, 5, 5, 0.0, 1.0, True)


@few_examples
@given(b=small, groups=small, kv_heads=small, s=small, d=small)
def test_grouped_query_attention_counts_query_heads(b: int, groups: int, kv_heads: int, s: int, d: int) -> None:
    query, key, value = random(b, groups * kv_heads, s, d), random(b, kv_heads, s, d), random(b, kv_heads, s, d)
    attend = observe(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    assert attend.total("full") == 2 * 2 * tuples(b, groups * kv_heads, s, s, d)


@few_examples
@given(steps=small, batch=small, features=small, units=small, layers=st.integers(1, 2), both_ways=st.booleans())
def test_a_fused_lstm_costs_each_weight_for_each_token(
    steps: int, batch: int, features: int, units: int, layers: int, both_ways: bool
) -> None:
    lstm = torch.nn.LSTM(features, units, layers, bidirectional=both_ways)
    forward, backward = observe_training(lambda: lstm(random(steps, batch, features))[0])
    ways = 2 if both_ways else 1
    widths = [features] + [ways * units] * (layers - 1)
    expected = sum(2 * ways * tuples(steps, batch, 4 * units, width + units) for width in widths)
    assert forward.ops() == {"aten::mkldnn_rnn_layer"}
    assert backward.ops() == {"aten::mkldnn_rnn_layer_backward"}
    assert (forward.total(), backward.total()) == (expected, 2 * expected)


@few_examples
@given(steps=small, batch=small, features=small, units=small, kind=st.sampled_from([("GRU", 3), ("RNN", 1)]))
def test_gru_and_rnn_are_counted_once_by_their_linears(
    steps: int, batch: int, features: int, units: int, kind: tuple[str, int]
) -> None:
    name, gates = kind
    layer = getattr(torch.nn, name)(features, units)
    forward, backward = observe_training(lambda: layer(random(steps, batch, features), random(1, batch, units))[0])
    expected = 2 * tuples(steps, batch, gates * units, features + units)
    assert (forward.total(), backward.total()) == (expected, 2 * expected)


def test_a_packed_lstm_counts_only_the_tokens_that_are_there() -> None:
    lstm = torch.nn.LSTM(5, 7)
    packed = torch.nn.utils.rnn.pack_padded_sequence(random(4, 3, 5), [4, 2, 1])
    forward, _ = observe_training(lambda: lstm(packed)[0].data)
    assert forward.total() == 2 * tuples(4 + 2 + 1, 4 * 7, 5 + 7)


@few_examples
@given(levels=st.integers(0, 5), batch=small)
def test_a_complex_transform_costs_the_butterflies_of_radix_2(levels: int, batch: int) -> None:
    signal = torch.randn(batch, 2**levels, dtype=torch.cdouble)
    spectrum, flop = radix2_fft(signal[0].tolist())
    torch.testing.assert_close(torch.fft.fft(signal[0]), torch.tensor(spectrum, dtype=torch.cdouble))
    assert observe(lambda: torch.fft.fft(signal)).total() == batch * flop
    assert 2 * observe(lambda: torch.fft.rfft(signal.real)).total() == batch * flop
    assert (
        2 * observe(lambda: torch.fft.irfft(torch.fft.rfft(signal.real), n=2**levels)).calls[-1][1].exact
        == batch * flop
    )


@few_examples
@given(groups=st.lists(st.integers(0, 3), min_size=1, max_size=4), k=small, n=small, spare=st.integers(0, 2))
def test_grouped_products_count_the_rows_of_each_group(groups: list[int], k: int, n: int, spare: int) -> None:
    k, n = 8 * k, 8 * n  # the kernel wants rows of 16 bytes
    ends = torch.tensor(groups).cumsum(0).to(torch.int32)
    left, right = random(sum(groups) + spare, k, dtype=torch.bfloat16), random(len(groups), k, n, dtype=torch.bfloat16)
    forward, backward = observe_training(lambda: torch._grouped_mm(left, right, offs=ends))
    expected = sum(2 * tuples(rows, k, n) for rows in groups)
    assert (forward.total(), backward.total()) == (expected, 2 * expected)


def test_low_precision_products_cost_what_full_precision_does() -> None:
    left, right = torch.ones(17, 32, dtype=torch.int8), torch.ones(16, 32, dtype=torch.int8)
    product = 2 * tuples(17, 32, 16)
    assert observe(lambda: torch._int_mm(left, right.T)).total() == product
    eighth, one = torch.ones(17, 32).to(torch.float8_e4m3fn), torch.ones(())
    other = torch.ones(16, 32).to(torch.float8_e4m3fn).T
    scaled = observe(lambda: torch._scaled_mm(eighth, other, one, one, out_dtype=torch.float32))
    assert scaled.total() == product


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_sparse_products_count_stored_values_only() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    coo, csr, columns = dense.to_sparse(), dense.to_sparse_csr(), torch.randn(3, 5)
    expected = 2 * 2 * 5
    for run in (
        lambda: torch.sparse.mm(coo, columns),
        lambda: coo @ columns,
        lambda: csr @ columns,
        lambda: torch.sparse.addmm(torch.randn(2, 5), coo, columns),
    ):
        assert observe(run).total() == expected
    assert observe(lambda: csr @ torch.randn(3)).total() == 2 * 2


def test_the_fused_encoder_layer_costs_what_the_unfused_one_does() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, batch_first=True).eval()
    tokens = torch.randn(2, 5, 8)
    with torch.no_grad():
        fused = observe(lambda: layer(tokens))
    unfused = observe(lambda: layer(tokens))
    assert fused.ops() == {"aten::_transformer_encoder_layer_fwd"}
    assert "aten::_transformer_encoder_layer_fwd" not in unfused.ops()
    assert fused.total() == unfused.total("full")


def test_what_inductor_calls_on_a_cpu_costs_the_plain_operator() -> None:
    image, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(6, 2, 3, 3), torch.randn(6)
    ops = torch.ops.mkldnn
    pointwise = observe(
        lambda: ops._convolution_pointwise(image, weight, bias, [1, 1], [1, 1], [1, 1], 2, "relu", [], "")
    )
    assert pointwise.total() == 2 * convolution_taps(2, [6, 6], weight.shape, 2, padding=[1, 1])
    tokens, matrix = torch.randn(3, 4), torch.randn(5, 4)
    assert observe(lambda: ops._linear_pointwise(tokens, matrix, None, "none", [], "")).total() == 2 * tuples(3, 4, 5)
    binary = observe(lambda: ops._linear_pointwise(tokens, torch.randn(3, 5), matrix, None, "add"))
    assert binary.total() == 2 * tuples(3, 4, 5)


def test_flex_attention_counts_the_blocks_of_a_real_mask() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    query = Spec((2, 3, 256, 8))
    work = ask("higher_order::flex_attention", query, query, query, None, to_spec(mask.as_tuple(), with_values=True))
    blocks = visible_pairs(4, 4, causal)
    assert work == forward_work(6, 256 * 256, blocks * 64 * 64, 8, 8)

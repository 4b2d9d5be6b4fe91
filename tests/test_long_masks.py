"""A mask too large to be filled lets as many pairs through as the same mask with its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flopmeter.errors import CountError
from flopmeter.flops import long_masks
from flopmeter.flops.count import count_flops
from flopmeter.flops.long_masks import has_values
from flopmeter.flops.on_shapes import only_shapes

LENGTH = 53
POSITIONS = torch.arange(LENGTH)
DOCUMENTS = torch.tensor([0] * 10 + [1] * 24 + [2] * (LENGTH - 34))
IS_REAL = torch.tensor([[LENGTH - 9], [LENGTH]]) > POSITIONS


def causal() -> torch.Tensor:
    return POSITIONS[None, None, None] <= POSITIONS[None, None, :, None]


def window() -> torch.Tensor:
    return causal() & (POSITIONS[None, None, None] > POSITIONS[None, None, :, None] - 5)


def two_sided_window() -> torch.Tensor:
    return (POSITIONS[None] - POSITIONS[:, None]).abs() <= 4


def packed() -> torch.Tensor:
    return causal() & (DOCUMENTS[None, None, None] == DOCUMENTS[None, None, :, None])


def padded() -> torch.Tensor:
    return (causal() & IS_REAL[:, None, None, :]).expand(2, -1, LENGTH, LENGTH)


def added() -> torch.Tensor:
    return torch.where(padded(), torch.zeros(()), torch.finfo(torch.float32).min) > -9999


def upper_triangle_of_minus_infinity() -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), -torch.inf).triu(1) > -9999


def lower_triangle_of_every_head() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-2)[None, None].expand(3, 2, LENGTH, LENGTH).clone()


def filled_in_place() -> torch.Tensor:
    mask = torch.full((LENGTH, LENGTH), -1e30)
    mask.masked_fill_((POSITIONS + 1).view(LENGTH, 1) > POSITIONS, 0)
    return (mask[None, None] + 0.0) > -9999


def negated() -> torch.Tensor:
    return ~(~causal() | ~IS_REAL[:, None, None])


def chunked() -> torch.Tensor:
    return causal() & ((POSITIONS // 8)[None] == (POSITIONS // 8)[:, None])


def images_see_all_of_themselves() -> torch.Tensor:
    is_image = (POSITIONS > 20) & (POSITIONS < 30)
    return causal() | (is_image[:, None] & is_image)


def turned() -> torch.Tensor:
    return padded()[:, 0, :, :].unsqueeze(1).transpose(0, 1)


MASKS = (
    causal, window, two_sided_window, packed, padded, added, upper_triangle_of_minus_infinity,
    lower_triangle_of_every_head, filled_in_place, negated, chunked, images_see_all_of_themselves, turned,
)  # fmt: skip


@pytest.fixture(params=[64, 700], ids=["small tiles", "tiles with a rest"])
def only_small_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_masks, "MAX_VALUES", request.param)


@pytest.mark.usefixtures("only_small_values")
@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_a_mask_without_values_has_as_many_pairs_as_with_them(make: Callable[[], torch.Tensor]) -> None:
    with_values = make()
    with only_shapes():
        mask = make()
        num_pairs = mask.sum()

    assert (mask.is_meta, mask.shape, has_values(mask)) == (True, with_values.shape, True)
    assert int(num_pairs) == int(with_values.sum())


@pytest.mark.usefixtures("only_small_values")
def test_a_model_may_look_at_a_mask_that_is_not_too_large_to_be_filled() -> None:
    with only_shapes():
        assert bool(causal().any())
        assert not bool(causal().all())
        assert torch.equal(causal()[0, 0, 7].cumsum(0), torch.arange(LENGTH).clamp(max=7) + 1)


@pytest.mark.usefixtures("only_small_values")
def test_a_mask_is_unknown_after_it_was_written_from_what_depends_on_weights() -> None:
    with only_shapes():
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        view = mask[None]
        mask += torch.empty(LENGTH, device="meta")
        assert not has_values(mask)
        assert not has_values(view)


def chosen_of(
    mask: torch.Tensor | None, scores: torch.Tensor, num_chosen: int, then: torch.Tensor | None
) -> torch.Tensor:
    """What an indexer chooses of the open keys, and what the attention's own mask leaves of it."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    positions = scores.topk(num_chosen, dim=-1).indices.to(torch.int32)
    is_chosen = ~positions.new_ones(scores.shape, dtype=torch.bool).scatter(-1, positions.long(), False)
    return is_chosen if then is None else is_chosen & then


@pytest.mark.parametrize("num_chosen", [1, 5, LENGTH])
@pytest.mark.parametrize("mask", [causal, window, packed, padded], ids=lambda make: make.__name__)
def test_top_k_leaves_k_of_the_open_keys_whatever_the_weights_choose(
    mask: Callable[[], torch.Tensor], num_chosen: int
) -> None:
    shape = mask().expand(2, 1, LENGTH, LENGTH).squeeze(1).shape
    by_hand = mask().expand(2, 1, LENGTH, LENGTH).sum(-1).clamp(max=num_chosen).sum()
    for seed in range(3):
        scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        opened = mask().expand(2, 1, LENGTH, LENGTH)[:, 0]
        assert int(chosen_of(opened, scores, num_chosen, opened).sum()) == int(by_hand)

    with only_shapes():
        opened = mask().expand(2, 1, LENGTH, LENGTH)[:, 0]
        left = chosen_of(opened, torch.empty(shape, device="meta"), num_chosen, opened)[:, None]
        assert int(left.sum()) == int(by_hand)


@pytest.mark.parametrize(
    ("before", "then"), [(None, causal), (window, causal), (causal, None)], ids=["no mask", "narrower", "not applied"]
)
def test_nobody_knows_what_is_left_where_the_choice_was_made_under_another_mask(before: Any, then: Any) -> None:
    with only_shapes():
        before, then = (make and make()[0].expand(2, -1, -1) for make in (before, then))
        left = chosen_of(before, torch.empty(2, LENGTH, LENGTH, device="meta"), 5, then)
        assert left.sum().is_meta


def test_two_choices_are_not_taken_for_one() -> None:
    with only_shapes():
        opened = causal()[0].expand(2, -1, -1)
        first, second = (chosen_of(opened, torch.empty(2, LENGTH, LENGTH, device="meta"), 5, opened) for _ in range(2))
        assert int(first.sum()) == int(second.sum())
        assert not has_values(first & second)


class Largest(TorchDispatchMode):
    """Remembers how many bytes the largest tensor with values took that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and not t.is_meta and t._base is None]
        self.num_bytes = max([self.num_bytes, *(t.untyped_storage().nbytes() for t in made)])
        return out


class SparseAttention(nn.Module):
    """An indexer of one head chooses the keys of each query (DeepSeek sparse attention)."""

    WIDTH, CHOSEN = 8, 16

    def __init__(self) -> None:
        super().__init__()
        self.index = nn.Linear(self.WIDTH, 2 * self.WIDTH, bias=False).requires_grad_(False)
        self.qkv = nn.Linear(self.WIDTH, 3 * self.WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        opened = (positions <= positions[:, None]).expand(len(x), -1, -1)
        with torch.no_grad():
            query, key = self.index(x).chunk(2, -1)
            scores = torch.bmm(query, key.transpose(1, 2)).relu()
        mask = chosen_of(opened, scores, min(self.CHOSEN, x.shape[1]), opened)
        query, key, value = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], attn_mask=mask[:, None])


@pytest.mark.parametrize("length", [40, 3000])
def test_sparse_attention_counts_the_chosen_pairs_and_fills_no_mask(length: int) -> None:
    model, width, samples = SparseAttention(), SparseAttention.WIDTH, 2
    with Largest() as largest:
        count = count_flops(model, torch.randn(samples, length, width))

    open_pairs = samples * length * (length + 1) // 2
    chosen_pairs = samples * sum(min(SparseAttention.CHOSEN, i + 1) for i in range(length))
    index = 2 * samples * length * width * 2 * width + 2 * open_pairs * width
    projection, attention = 2 * samples * length * width * 3 * width, 2 * 2 * chosen_pairs * width
    assert (count.method, count.left_out) == ("meta", ())
    assert count.forward_flop == index + projection + attention
    assert count.backward_flop == projection + 2 * attention
    assert largest.num_bytes < 8 * long_masks.MAX_VALUES


def test_a_real_step_and_a_count_on_shapes_agree_on_sparse_attention() -> None:
    from flopmeter.flops.observe import observe

    model, x = SparseAttention(), torch.randn(2, 40, SparseAttention.WIDTH)
    with observe(model) as observed:
        model(x).sum().backward()

    assert observed.result().model_flop == count_flops(model, x).model_flop


def test_a_choice_that_is_not_causal_counts_all_pairs_and_says_so() -> None:
    class Unmasked(SparseAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).chunk(3, -1)
            scores = torch.bmm(query.detach(), key.detach().transpose(1, 2))
            positions = torch.arange(x.shape[1], device=x.device)
            mask = chosen_of(None, scores, 3, (positions <= positions[:, None]).expand(len(x), -1, -1))
            return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], attn_mask=mask[:, None])

    x = torch.randn(2, 40, SparseAttention.WIDTH)
    exact, full = (count_flops(Unmasked(), x, convention=convention) for convention in ("exact", "full"))

    assert exact.model_flop == full.model_flop
    assert any("no values" in sentence for sentence in exact.left_out)


def test_what_would_have_to_be_filled_and_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1])
            assert (positions <= positions[:, None]).any()
            return super().forward(x)

    monkeypatch.setattr(long_masks, "MAX_VALUES", 64)
    monkeypatch.setattr(long_masks, "MAX_FILLED_BYTES", 64)
    with pytest.raises(CountError, match="meta"):
        count_flops(Looks(4, 4, device="meta"), torch.randn(1, 20, 4))

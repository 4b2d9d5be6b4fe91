"""What a batch holds: tokens, pairs, patches, checked by listing them one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flopmeter.flops.workload import (
    LateWorkload,
    Needs,
    PatchWindow,
    Workload,
    WorkloadReader,
    late_workload,
    needs_of,
    pairs,
    workload_of,
)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.ones(rows, length, dtype=torch.long)


def mask(lengths: list[int], length: int) -> torch.Tensor:
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


def listed_pairs(lengths: list[int], window: int = 10**9) -> int:
    return sum(1 for n in lengths for query in range(n) for key in range(query + 1) if query - key < window)


def test_pairs_in_closed_form_equal_the_pairs_that_are_listed() -> None:
    for length in range(13):
        for window in range(1, 15):
            near = [(q, k) for q in range(length) for k in range(length) if abs(q - k) < window]
            assert pairs(length, causal=False, window=window) == len(near)
            assert pairs(length, causal=True, window=window) == sum(1 for q, k in near if k <= q)
        assert pairs(length, causal=True) == sum(range(1, length + 1))
        assert pairs(length, causal=False) == length * length


def test_a_batch_without_padding_is_told_by_its_shape() -> None:
    work = workload_of({"input_ids": ids(3, 5), "labels": ids(3, 5)})
    assert (work.samples, work.tokens, work.tokens_processed) == (3, 15, 15)
    assert (work.pairs_causal, work.pairs_processed) == (3 * 15, 3 * 25)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_counts_as_processed_only(side: str) -> None:
    padding = mask([5, 3], 5) if side == "right" else mask([5, 3], 5).flip(1)
    work = workload_of({"input_ids": ids(2, 5), "attention_mask": padding})
    assert (work.tokens, work.tokens_processed) == (8, 10)
    assert (work.pairs_causal, work.pairs_processed) == (15 + 6, 50)


def test_the_key_padding_mask_of_a_torch_layer_is_true_where_there_is_no_token() -> None:
    padding = mask([5, 2, 1], 5) == 0
    by_torch = workload_of({"x": ids(3, 5), "src_key_padding_mask": padding}, Needs(reads="text"))
    assert by_torch == workload_of({"input_ids": ids(3, 5), "attention_mask": mask([5, 2, 1], 5)})
    turned = {"x": ids(5, 3), "src_key_padding_mask": padding}
    assert workload_of(turned, Needs(reads="text", is_sequence_first=True)) == by_torch
    assert workload_of(turned, Needs(reads="text")) == by_torch  # the mask tells


def test_values_of_padded_rows_are_padding() -> None:
    inputs = {"inputs_embeds": torch.zeros(3, 5, 4), "attention_mask": mask([5, 2, 1], 5)}
    work = workload_of(inputs)
    assert (work.values, work.values_padding) == (8 * 4, 7 * 4)
    assert work.values_squared == 20**2 + 8**2 + 4**2
    assert work.values_squared + work.values_squared_padding == 3 * 20**2


def test_packed_documents_are_told_alike_by_positions_and_by_offsets() -> None:
    needs = Needs(window=2)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    by_position = workload_of({"input_ids": ids(1, 5), "position_ids": positions}, needs)
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    by_offset = workload_of({"input_ids": ids(1, 5), "cu_seq_lens_q": offsets}, needs)
    assert by_position == by_offset == Workload.of_lengths([3, 2], padded_to=5, rows=1, needs=needs)
    assert (by_position.tokens, by_position.pairs_causal, by_position.pairs_processed) == (5, 6 + 3, 25)
    assert by_position.pairs_window == listed_pairs([3, 2], window=2) == 8


def test_positions_of_a_batch_that_is_not_packed_change_nothing() -> None:
    positions = torch.arange(7, 12)[None]  # some models start to count after the padding id
    assert workload_of({"input_ids": ids(2, 5), "position_ids": positions}) == workload_of({"input_ids": ids(2, 5)})


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_pairs_within_a_sliding_window_are_counted_for_each_length(window: int) -> None:
    batch = {"input_ids": ids(3, 6), "attention_mask": mask([6, 4, 1], 6)}
    assert workload_of(batch, Needs(window=window)).pairs_window == listed_pairs([6, 4, 1], window)
    whole = {"input_ids": ids(2, 6)}
    assert workload_of(whole, Needs(window=window)).pairs_window == listed_pairs([6, 6], window)


def test_patches_attend_within_frames_and_within_cut_windows() -> None:
    """2 frames of 4 x 6 patches. Windows of 2 x 2 cells of 2 x 2 patches: 4 x 4 patches, then 4 x 2 are left over."""
    grids = torch.tensor([[2, 4, 6]])
    work = workload_of({"pixel_values": torch.zeros(48, 12), "image_grid_thw": grids}, _windowed(merge=2, cells=2))
    assert work.patches == 48
    assert work.patch_pairs == 2 * 24**2
    assert work.patch_pairs_window == 2 * (16**2 + 8**2)
    assert work.values == 0  # not also counted as one picture


def _windowed(merge: int, cells: int) -> Needs:
    return Needs(patch_window=PatchWindow(merge=merge, cells=cells))


def test_patches_of_images_and_videos_add_up() -> None:
    one, two = torch.tensor([[1, 4, 4]]), torch.tensor([[3, 2, 2], [1, 2, 2]])
    work = workload_of({"input_ids": ids(1, 9), "image_grid_thw": one, "video_grid_thw": two})
    assert work.patches == 16 + 12 + 4
    assert work.patch_pairs == 16**2 + 3 * 4**2 + 4**2
    assert work.tokens == 9


def test_images_are_told_by_their_values() -> None:
    work = workload_of({"pixel_values": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4, dtype=torch.long)})
    assert (work.samples, work.images, work.values, work.values_squared) == (4, 4, 768, 4 * 192**2)
    several = workload_of({"input_ids": ids(2, 9), "pixel_values": torch.zeros(2, 5, 3, 8, 8)})
    assert (several.samples, several.images, several.values) == (2, 10, 1920)


def test_a_decoder_has_tokens_and_pairs_of_its_own() -> None:
    needs = Needs(has_decoder=True)
    batch = {"input_ids": ids(2, 5), "attention_mask": mask([5, 3], 5), "labels": ids(2, 4)}
    work = workload_of(batch, needs)
    assert (work.tokens, work.decoder_tokens, work.decoder_pairs_causal) == (8, 8, 20)
    assert (work.cross_pairs, work.cross_pairs_processed) == (5 * 4 + 3 * 4, 40)
    both = workload_of({**batch, "decoder_attention_mask": mask([4, 2], 4)}, needs)
    assert (both.decoder_tokens, both.cross_pairs) == (6, 5 * 4 + 3 * 2)
    assert workload_of(batch).decoder_tokens == 0  # labels of a model without a decoder are no second text


@pytest.mark.parametrize(
    "batch", [ids(2, 3), (ids(2, 3), ids(2, 3)), [ids(2, 3)], {"anything": ids(2, 3)}, {"input_ids": ids(2, 3)}]
)
def test_a_batch_may_come_in_any_form(batch: Any) -> None:
    work = workload_of(batch)
    assert (work.samples, work.tokens, work.pairs_causal) == (2, 6, 12)


@pytest.mark.parametrize("batch", [{}, [], None, {"input_ids": None}, torch.tensor(3)])
def test_nothing_to_see_is_no_work(batch: Any) -> None:
    assert workload_of(batch) == Workload()


def test_micro_batches_add_up() -> None:
    needs = Needs(window=2)
    first, second = Workload.of_lengths([5, 3], needs=needs), Workload.of_lengths([4], needs=needs)
    both = first + second
    assert (both.samples, both.tokens, both.tokens_processed, both.pairs_processed) == (3, 12, 14, 50 + 16)
    assert both.pairs_causal == listed_pairs([5, 3, 4])
    assert (both.window, both.pairs_window) == (2, listed_pairs([5, 3, 4], window=2))


def test_a_text_beside_images_keeps_the_pairs_within_their_windows() -> None:
    """4 x 6 patches in windows of 4 x 4: 4 x 4, and 4 x 2 that are left over. The text has none."""
    needs = _windowed(merge=2, cells=2)
    images = workload_of({"input_ids": ids(1, 9), "image_grid_thw": torch.tensor([[1, 4, 6]])}, needs)
    both = Workload.of_lengths([5, 3], needs=needs) + images
    assert (both.patch_window, both.patch_pairs_window) == (needs.patch_window, 16**2 + 8**2)


def test_the_batch_may_be_the_second_dimension() -> None:
    needs = Needs(reads="sequence", is_sequence_first=True)
    work = workload_of(torch.zeros(7, 2, 4), needs)
    assert (work.samples, work.tokens, work.pairs_processed) == (2, 14, 2 * 7**2)
    assert (work.images, work.values, work.values_squared) == (2, 56, 2 * 28**2)
    assert workload_of(ids(7, 2), needs).pairs_causal == 2 * listed_pairs([7])


def test_three_dimensions_are_a_sequence_only_for_a_model_of_sequences() -> None:
    recording = torch.zeros(2, 3, 50)
    assert workload_of(recording, Needs(reads="sequence")).tokens == 6
    work = workload_of(recording, Needs(reads="values"))
    assert (work.samples, work.tokens, work.values) == (2, 0, 300)


def test_sentences_and_images_may_come_one_by_one() -> None:
    sentences = {"tokens": [torch.zeros(n, dtype=torch.long) for n in (5, 3)]}
    assert workload_of(sentences, Needs(reads="text")).pairs_causal == listed_pairs([5, 3])
    work = workload_of({"images": [torch.zeros(3, 4, 4), torch.zeros(3, 2, 2)]}, Needs(reads="values"))
    assert (work.samples, work.images, work.values, work.values_squared) == (2, 2, 60, 48**2 + 12**2)


def test_inputs_of_the_same_samples_in_a_list_are_one_input() -> None:
    work = workload_of({"views": [torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 2, 2)]}, Needs(reads="values"))
    assert (work.samples, work.images, work.values) == (2, 2, 2 * (48 + 12))


def test_what_is_looked_up_one_by_one_is_a_sample_each() -> None:
    work = workload_of({"user": ids(1, 5)[0], "item": ids(1, 5)[0]}, Needs(reads="ids"))
    assert (work.samples, work.tokens, work.pairs_causal) == (5, 5, 5)


def test_a_mask_that_numbers_its_documents_counts_each_token_once() -> None:
    numbered = torch.tensor([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]])
    for values in (numbered, numbered.float(), torch.where(numbered > 0, 0.0, float("-inf"))):
        assert workload_of({"input_ids": ids(2, 5), "attention_mask": values}).tokens == 8


def test_pairs_of_different_windows_are_not_added() -> None:
    both = Workload.of_lengths([5], needs=Needs(window=2)) + Workload.of_lengths([5], needs=Needs(window=3))
    assert (both.window, both.pairs_window, both.pairs_causal) == (0, 0, 30)


VALUES: dict[str, dict[str, torch.Tensor]] = {
    "mask": {"input_ids": ids(2, 5), "attention_mask": mask([5, 3], 5)},
    "offsets": {"input_ids": ids(1, 5), "cu_seqlens": torch.tensor([0, 3, 5])},
    "positions": {"input_ids": ids(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])},
    "grids": {"input_ids": ids(1, 5), "image_grid_thw": torch.tensor([[1, 4, 6]])},
    "decoder": {"input_ids": ids(2, 5), "attention_mask": mask([5, 3], 5), "labels": ids(2, 4)},
}
ALL_NEEDS = Needs(window=2, patch_window=PatchWindow(merge=2, cells=1), has_decoder=True)


@pytest.mark.parametrize("name", VALUES)
def test_a_late_workload_reads_no_tensor(name: str) -> None:
    """A meta tensor has no values: whatever tries to read one raises."""
    late = late_workload({key: tensor.to("meta") for key, tensor in VALUES[name].items()}, ALL_NEEDS)
    assert late.unread
    assert all(scalar.is_meta and scalar.dim() == 0 for scalar in late.unread.values())


@pytest.mark.parametrize("name", VALUES)
def test_a_late_workload_resolves_to_what_reading_gives(name: str) -> None:
    late = late_workload(VALUES[name], ALL_NEEDS)
    assert isinstance(late, LateWorkload)
    assert late.resolve() == workload_of(VALUES[name], ALL_NEEDS)


def test_nothing_is_left_unread_when_shapes_tell_all() -> None:
    batch = {"input_ids": ids(2, 5).to("meta"), "pixel_values": torch.zeros(2, 3, 4, 4, device="meta")}
    late = late_workload(batch, Needs(window=3))
    assert late.unread == {}
    assert late.resolve().tokens == 10


def test_lengths_are_counted_wherever_tensors_are_made_by_default() -> None:
    with torch.device("meta"):
        assert Workload.of_lengths([5, 3]).pairs_causal == 21


def test_a_layer_that_is_called_like_an_operator_turns_nothing() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 1, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.t(x)  # type: ignore[no-any-return]

    class Turned(Named):
        def forward(self, x: Tensor) -> Tensor:
            return self.t(x.transpose(0, 1))  # type: ignore[no-any-return]

    assert needs_of(Named()).is_sequence_first
    assert not needs_of(Turned()).is_sequence_first


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_tells_how_many_rows_it_has(layout: torch.layout) -> None:
    reader = WorkloadReader(Needs(reads="sequence"))
    for lengths in ([3, 5], [3, 6], [4, 4]):
        nested = torch.nested.nested_tensor([torch.randn(length, 16) for length in lengths], layout=layout)
        reader.see((nested,), {})
        (seen,) = reader.take()
        assert isinstance(seen, LateWorkload)
        found = seen.resolve()
        assert (found.samples, found.tokens, found.tokens_processed) == (2, sum(lengths), sum(lengths))
        assert hash(found.shape) is not None

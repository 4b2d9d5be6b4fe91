"""The facade `training.utils.monitor`: names, signatures and the contract that its functions never raise."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training.utils import monitor


def test_the_signatures_are_those_of_the_mission() -> None:
    expected = {
        "calculate_precise_mfu": [
            "model",
            "batch_size",
            "seq_length",
            "step_time",
            "measurement_mode",
            "actual_flops",
        ],
        "calculate_mfu_with_profiler": ["model", "batch_size", "seq_length", "step_time"],
        "calculate_mfu": ["flops", "compute_time", "gpu_peak_flops"],
        "profile_model_flops": ["model", "batch_example"],
        "_measure_flops_with_profiler": ["model", "batch_size", "seq_length"],
        "get_gpu_peak_flops": [],
        "_create_dummy_batch_for_profiling": ["batch_size", "seq_length", "device"],
        "_get_actual_sequence_length": ["model", "batch_example"],
        "_estimate_forward_flops": ["model", "batch_size", "seq_length"],
        "_estimate_flops_fallback": ["model", "batch_example", "seq_length"],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(monitor, name)).parameters) == parameters
    defaults = inspect.signature(monitor.calculate_precise_mfu).parameters
    assert (defaults["measurement_mode"].default, defaults["actual_flops"].default) == ("smart", None)


def test_mfu_is_flops_over_peak_and_time() -> None:
    assert monitor.calculate_mfu(50.0, 0.5, 200.0) == pytest.approx(0.5)


def test_an_impossible_mfu_is_clamped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert monitor.calculate_mfu(300.0, 1.0, 200.0) == 1.0
    assert "1.500 is impossible" in caplog.text


@pytest.mark.parametrize("arguments", [(1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (-1.0, 1.0, 1.0), ("x", 1.0, 1.0)])
def test_failure_is_zero_with_the_reason_in_the_log(
    arguments: tuple[float, float, float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert monitor.calculate_mfu(*arguments) == 0.0
    assert "calculate_mfu returns 0.0" in caplog.text


def test_the_peak_of_this_machine_is_a_rate() -> None:
    assert monitor.get_gpu_peak_flops() > 1e9


def test_the_length_is_the_mean_of_the_mask() -> None:
    batch = {"input_ids": torch.ones(2, 6), "attention_mask": torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])}
    assert monitor._get_actual_sequence_length(nn.Linear(1, 1), batch) == pytest.approx(4.0)


def test_without_a_mask_the_length_is_that_of_the_ids() -> None:
    assert monitor._get_actual_sequence_length(nn.Linear(1, 1), {"input_ids": torch.ones(2, 6)}) == 6.0


class Seeing(nn.Module):
    """A stand-in with the attributes by which multimodal models are known."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(3, 5, bias=False)
        self.config = SimpleNamespace(image_token_id=9, vision_config=SimpleNamespace(spatial_merge_size=2))


def test_visual_tokens_are_added_when_the_text_has_no_place_for_them() -> None:
    # One image of 1 x 4 x 6 patches, merged 2 x 2: six tokens for a batch of two samples of five.
    batch = {"input_ids": torch.ones(2, 5), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    assert monitor._get_actual_sequence_length(Seeing(), batch) == pytest.approx(5 + 6 / 2)


def test_visual_tokens_that_the_text_already_holds_are_not_added_again() -> None:
    batch = {"input_ids": torch.tensor([[1, 9, 9, 1]]), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    assert monitor._get_actual_sequence_length(Seeing(), batch) == 4.0


def test_an_image_without_a_grid_counts_576_tokens() -> None:
    batch = {"input_ids": torch.ones(1, 5), "pixel_values": torch.zeros(1, 3, 8, 8)}
    assert monitor._get_actual_sequence_length(Seeing(), batch) == 5 + 576


def test_the_rule_of_thumb_is_2_for_text_and_2_point_5_for_models_that_see() -> None:
    text = nn.Linear(3, 5, bias=False)
    assert monitor._estimate_forward_flops(text, 2, 7) == 2 * 15 * 14
    assert monitor._estimate_forward_flops(Seeing(), 2, 7) == 2.5 * 15 * 14
    assert monitor._estimate_flops_fallback(text, {"x": torch.ones(2, 7)}, 7) == 3 * 2 * 15 * 14


def test_a_dummy_batch_is_text_that_any_vocabulary_has() -> None:
    batch = monitor._create_dummy_batch_for_profiling(2, 3, "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 3)
    )


MODES = ("smart", "estimate", "profiler", "hybrid")
PLAIN = nn.Linear(5, 7, bias=False)
PLAIN_FLOP = 2 * (2 * (2 * 3) * 5 * 7)  # 2 samples of 3 rows: the product and the weight's gradient


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model


def llama_flop(samples: int, length: int) -> int:
    """Queries and outputs are 16 x 16, keys and values 16 x 8 (one head), the MLP 3 times 16 x 32, the head 16 x 40.

    Attention: two products over the causal pairs of two heads of 8 channels. Backward is twice the forward.
    """
    weights = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32) + 16 * 40
    attention = 2 * 2 * 2 * 8 * 2 * (length * (length + 1) // 2)
    return 3 * samples * (2 * length * weights + attention)


def mfu_of(flop: float, step_s: float) -> float:
    return flop / (step_s * monitor.get_gpu_peak_flops())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_mfu_of_a_plain_module(mode: str) -> None:
    assert monitor.calculate_precise_mfu(PLAIN, 2, 3, 0.5, mode) == pytest.approx(mfu_of(PLAIN_FLOP, 0.5))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_mfu_of_a_transformer(mode: str) -> None:
    assert monitor.calculate_precise_mfu(llama(), 2, 6, 0.5, mode) == pytest.approx(mfu_of(llama_flop(2, 6), 0.5))


def test_a_mean_length_is_rounded_to_tokens() -> None:
    assert monitor.calculate_precise_mfu(llama(), 2, 5.7, 1.0) == pytest.approx(mfu_of(llama_flop(2, 6), 1.0))


def test_known_flops_are_used_as_they_are() -> None:
    assert monitor.calculate_precise_mfu(PLAIN, 2, 3, 0.5, actual_flops=1e6) == pytest.approx(mfu_of(1e6, 0.5))


def test_an_unknown_mode_is_zero_and_the_log_lists_the_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert monitor.calculate_precise_mfu(PLAIN, 2, 3, 0.5, "exact", actual_flops=1e6) == 0.0
    assert "'exact' is none of smart, profiler, estimate, hybrid" in caplog.text


@pytest.mark.parametrize(("model", "step_time"), [(PLAIN, 0.0), (nn.ReLU(), 1.0), (None, 1.0)])
def test_what_cannot_be_measured_is_zero_with_the_reason_in_the_log(
    model: nn.Module, step_time: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert monitor.calculate_precise_mfu(model, 2, 3, step_time) == 0.0
    assert "calculate_precise_mfu returns 0.0: " in caplog.text


def test_smart_mode_runs_the_model_only_once_for_each_shape() -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(input)

    model = Counted(5, 7, bias=False)
    first = monitor.calculate_precise_mfu(model, 2, 3, 0.5)
    num_calls = len(calls)
    assert monitor.calculate_precise_mfu(model, 2, 3, 0.5) == first > 0
    assert len(calls) == num_calls > 0
    monitor.calculate_precise_mfu(model, 2, 4, 0.5)
    assert len(calls) > num_calls


def test_smart_mode_notices_that_a_part_was_frozen() -> None:
    model = llama()
    whole = monitor.calculate_precise_mfu(model, 2, 6, 0.5)
    for parameter in model.get_submodule("model").parameters():
        parameter.requires_grad_(False)
    # Only the head is left to train: of all gradients, its weight's.
    frozen = llama_flop(2, 6) / 3 + 2 * 12 * 16 * 40
    assert monitor.calculate_precise_mfu(model, 2, 6, 0.5) == pytest.approx(mfu_of(frozen, 0.5))
    assert whole == pytest.approx(mfu_of(llama_flop(2, 6), 0.5))


def test_smart_mode_stays_right_when_there_are_too_many_lengths_to_count_each() -> None:
    model = llama()
    lengths = range(2, 2 + monitor.MAX_COUNTED_SHAPES + 4)
    found = [monitor.calculate_precise_mfu(model, 2, length, 0.5) for length in lengths]
    assert found == pytest.approx([mfu_of(llama_flop(2, length), 0.5) for length in lengths])
    assert [len(counts) for counts in monitor._counted[model].values()] == [monitor.MAX_COUNTED_SHAPES]


def test_hybrid_mode_says_once_that_counters_are_no_flops(caplog: pytest.LogCaptureFixture) -> None:
    monitor._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            monitor.calculate_precise_mfu(PLAIN, 2, 3, 0.5, "hybrid")
    assert caplog.text.count("hardware counters tell utilisation, not FLOPs") == 1


def test_the_profiler_measures_forward_and_backward_and_leaves_no_trace() -> None:
    model = llama().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert monitor._measure_flops_with_profiler(model, 2, 6) == llama_flop(2, 6)
    assert monitor.calculate_mfu_with_profiler(model, 2, 6, 0.5) == pytest.approx(mfu_of(llama_flop(2, 6), 0.5))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_inside_another_profiler_nothing_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with theirs, caplog.at_level(logging.WARNING):
        assert monitor.calculate_mfu_with_profiler(PLAIN, 2, 3, 0.5) == 0.0
    assert "another profiler session is prepared or running" in caplog.text


def test_the_flops_of_a_batch_leave_its_padding_out() -> None:
    batch = {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
    }
    assert monitor.profile_model_flops(llama(), batch) == llama_flop(1, 6) + llama_flop(1, 4)


def test_a_module_that_takes_text_but_does_not_say_so_gets_a_plain_text_batch() -> None:
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 5))
            self.out = nn.Linear(5, 7, bias=False)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.out(self.table[input_ids]) * attention_mask[..., None]
            return hidden

    # The table is trained, so that the product has both gradients.
    assert monitor._measure_flops_with_profiler(Mute(), 2, 3) == 3 * (2 * (2 * 3) * 5 * 7)

"""A watched training on a GPU: no wait, the same losses, device times, the right FLOPs, the right verdict."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpu_loop import Loop, Text, events, waits_allowed, watched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopmeter import load_run
from flopmeter.demo import GPT, GPTConfig
from flopmeter.flops.count import count_flops
from flopmeter.flops.observe import observe

NUM_STEPS = 50


def test_fifty_watched_steps_never_wait_for_the_device(tmp_path: Path) -> None:
    loop = Loop()
    with watched(loop, tmp_path, profile_steps=False) as monitor:
        loop.losses(NUM_STEPS, monitor)
    assert list(load_run(tmp_path).step) == list(range(1, NUM_STEPS + 1))


@pytest.mark.values
def test_lengths_that_are_still_on_their_way_are_not_read(tmp_path: Path) -> None:
    lengths = [1 + number % 37 for number in range(NUM_STEPS)]
    loop = Loop()
    with waits_allowed():
        loop.model = Text().cuda()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-4)
        ids = torch.zeros(64, 128, dtype=torch.long, device="cuda")
        masks = [(torch.arange(128, device="cuda") < length).long().repeat(64, 1) for length in lengths]
    # An estimate measures no step: to read the masks of an observed one is to wait for it.
    with watched(loop, tmp_path, mfu_calculation_mode="estimate"):
        for mask in masks:  # and not a word: no loss whose event the record could wait for
            loop.model(input_ids=ids, attention_mask=mask).backward()
            loop.optimizer.step()
    run = load_run(tmp_path)
    tokens = [
        rate * s for rate, s in zip(run.column("perf/tokens_per_second"), run.column("perf/step_time"), strict=True)
    ]
    assert tokens == pytest.approx([64 * length for length in lengths])


@pytest.mark.values
def test_the_losses_are_those_of_a_run_without_us(tmp_path: Path) -> None:
    plain = Loop().losses(NUM_STEPS)
    loop = Loop()
    with watched(loop, tmp_path) as monitor:
        ours = loop.losses(NUM_STEPS, monitor)
    with waits_allowed():
        assert torch.equal(torch.stack(plain), torch.stack(ours))
        logged = load_run(tmp_path).column("training/loss")
        assert list(logged) == pytest.approx([loss.item() for loss in ours])


def test_a_loop_with_everything_in_it_never_waits(tmp_path: Path) -> None:
    """Pinned batches of two workers, copied on a side stream; autocast, clipping, a fused update, a gradient scaler."""
    with waits_allowed():
        data = TensorDataset(torch.randint(0, 100, (1024, 32)), torch.randint(0, 100, (1024, 32)))
        loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=True)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        loop = Loop()
        loop.model = nn.Sequential(nn.Embedding(100, 64), encoder, nn.Linear(64, 100)).cuda()
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), fused=True)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    with watched(loop, tmp_path, profile_steps=False) as monitor:
        for number, batch in enumerate(loader, 1):
            with torch.cuda.stream(side):
                ids, labels = (part.to("cuda", non_blocking=True) for part in batch)
            current.wait_stream(side)
            ids.record_stream(current)
            labels.record_stream(current)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(loop.model(ids).flatten(0, 1).float(), labels.flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0, foreach=True)
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=True)
            monitor.log_step(number, 0, loss, norm, 1e-4)
    run = load_run(tmp_path)
    assert list(run.step) == list(range(1, 65))
    assert not [event for event in run.events if event["event"] == "warning"]


def _collect(_: int) -> None:
    gc.collect()


def test_workers_that_are_forked_after_a_run_survive_what_it_left_to_the_garbage_collector(tmp_path: Path) -> None:
    """Memory that is pinned may not be freed in a forked child: torch then aborts it."""
    gc.collect()
    gc.disable()
    try:
        for name in ("one", "two"):
            loop = Loop()
            with watched(loop, tmp_path / name, profile_steps=False) as monitor:
                loop.losses(8, monitor)
            del loop, monitor
        assert len(list(DataLoader(range(8), num_workers=1, worker_init_fn=_collect))) == 8  # type: ignore[arg-type]
    finally:
        gc.enable()


def test_events_time_each_phase_on_the_device(tmp_path: Path) -> None:
    loop = Loop(width=2048)
    with watched(loop, tmp_path, detail_every=25, profile_steps=False) as monitor:
        loop.losses(100, monitor)
    found = events(tmp_path, "device_time")
    assert found
    device_s = found[-1]["device_s"]
    assert all(device_s[phase] > 0 for phase in ("forward", "backward", "optimizer"))
    assert device_s["backward"] > device_s["forward"]  # twice the products


def test_the_count_of_an_observed_step_is_the_formula(tmp_path: Path) -> None:
    loop = Loop()
    with watched(loop, tmp_path) as monitor:
        loop.losses(NUM_STEPS, monitor)
    assert load_run(tmp_path).column("perf/model_flop")[-1] == loop.flop


def test_convolutions_are_counted_in_the_format_that_cudnn_takes_for_them() -> None:
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 units")
    with waits_allowed():
        model = nn.Conv2d(3, 8, 3).cuda()
        with observe(model) as observed:
            model(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
        assert set(observed.result().by_dtype) == {"tf32"}


def test_a_gpt_with_this_gpus_attention_is_counted_as_by_hand() -> None:
    layers, hidden, length, vocabulary, samples = 2, 64, 32, 256, 4
    # Forward: 2 FLOP per token and weight of the linears, 4 x width per attended (causal) pair; backward twice as much.
    weights = layers * 12 * hidden**2 + hidden * vocabulary  # qkv 3, out 1, MLP 4 + 4; and the head
    pairs = samples * length * (length + 1) / 2
    by_hand = 3 * (2 * samples * length * weights + layers * 4 * hidden * pairs)
    with waits_allowed():
        sizes = GPTConfig(num_layers=layers, hidden=hidden, num_heads=2, length=length, vocabulary=vocabulary)
        model = GPT(sizes).to("cuda")
        tokens = torch.randint(vocabulary, (samples, length + 1), device="cuda")
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        assert count_flops(model, batch).model_flop == by_hand
        with observe(model) as observed:
            model(**batch).backward()
        assert observed.result().model_flop == by_hand


@pytest.mark.parametrize("reads_loss", [False, True], ids=["free running", "with .item()"])
@pytest.mark.parametrize(
    ("loop_sizes", "bound"),
    [({"width": 32, "num_layers": 200, "rows": 8}, "host"), ({"width": 4096, "num_layers": 4, "rows": 4096}, "device")],
    ids=["thousands of tiny kernels", "a few huge ones"],
)
def test_who_waits_for_whom(tmp_path: Path, loop_sizes: dict[str, int], bound: str, reads_loss: bool) -> None:
    loop = Loop(**loop_sizes)
    with watched(loop, tmp_path, detail_every=20, profile_steps=False) as monitor:
        for number in range(1, 46):  # the last five alone would not tell
            loss = loop.step()
            monitor.log_step(number, 0, loss, None, 1e-4)
            if reads_loss:
                with waits_allowed():
                    loss.item()
    verdicts = [event["verdict"]["bound"] for event in events(tmp_path, "device_time")]
    assert verdicts[-1] == bound

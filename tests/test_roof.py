"""What a card was measured to reach: kept by machine, device and dtype, and found again by a run on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flopmeter import load_run, watch
from flopmeter.devices import measure, roof
from flopmeter.devices.measure import measure_peak
from flopmeter.devices.roof import keep_roof, roof_of, throttling

WIDTH, BATCH = 64, 32


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOPMETER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "roofs.json"


def test_a_programs_own_products_are_weighed_by_their_time() -> None:
    small, large, other = (10, 10, 10), (20, 20, 20), (40, 40, 40)
    keep_roof("H100", "a", "bf16", {small: 1000.0, large: 4000.0}, {"clock_hz": 1.98e9})
    found = roof_of("H100", "a", "bf16", {small: 3, large: 1, other: 0.1})
    assert found is not None
    # 3 x 2,000 at 1,000 a second, and 16,000 at 4,000: 22,000 in 10 s. 12,800 more were not measured.
    assert found["flop_per_s"] == pytest.approx(22_000 / 10)
    assert found["own_shapes"] == pytest.approx(22_000 / 34_800)
    assert found["clock_hz"] == 1.98e9
    few = roof_of("H100", "a", "bf16", {small: 1, other: 1})
    assert few == {"clock_hz": 1.98e9, "flop_per_s": 4000.0, "own_shapes": 0.0}


def test_a_roof_is_of_one_machine_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_roof("H100", "a", "bf16", {(8, 8, 8): 1000.0}, {})
    keep_roof("H100", "a", "bf16", {(8, 8, 8): 900.0}, {})  # a busier moment
    assert roof_of("H100", "a", "bf16") == {"flop_per_s": 1000.0, "own_shapes": 0.0}
    assert roof_of("H100", "b", "bf16") is roof_of("H100", "a", "fp16") is None
    monkeypatch.setattr(roof.socket, "gethostname", lambda: "another")
    assert roof_of("H100", "a", "bf16") is None


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "[" * 5000, '{"%s": {"shapes": {"1x1x1": "fast"}}}'])
def test_a_cache_of_anything_holds_no_roof(own_cache: Path, content: str) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text(content.replace("%s", roof._key("H100", None, "bf16")))
    assert roof_of("H100", None, "bf16") is None


def test_what_holds_a_clock_down_is_told_and_rest_is_not() -> None:
    assert throttling(0x1 | 0x4 | 0x40) == ["the power cap", "heat, in hardware"]
    assert throttling(0x1) == throttling(0) == []


def test_a_sweep_that_shares_its_cores_is_no_roof(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.time, "process_time", lambda: 0.0)
    assert measure_peak("cpu", "fp32", 0.2, own_shapes=[(64, 64, 64)]).note == measure.STARVED
    assert not own_cache.exists()


def test_a_run_finds_the_roof_of_its_own_products(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MIN_CPU_SHARE", 0.0)  # whatever else runs here
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(folder: Path) -> None:
        monitor = watch(model, optimizer, output_dir=folder)
        for _ in range(12):
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.finish_training()

    train(tmp_path / "first")
    first = load_run(tmp_path / "first")
    assert not first.named("roof")
    products = first.last("facts")["products"]
    expected = {(m, n, k): calls for _, m, n, k, calls in products}
    # Forward and weight gradient of either layer, and the gradient of the second one's input, whichever way they lie.
    assert sum(expected.values()) == 5
    assert {tuple(sorted(shape)) for shape in expected} == {(BATCH, WIDTH, 2 * WIDTH)}
    measured = measure_peak("cpu", "fp32", 2.0, own_shapes=list(expected))
    rates = {tuple(each["shape"]): each["flop_per_s"] for each in measured.shapes}
    assert {*rates, *measured.skipped} == set(expected)  # a busy machine runs out of time
    assert json.loads(own_cache.read_text())
    train(tmp_path / "second")
    (found,) = load_run(tmp_path / "second").named("roof")
    work = {shape: 2 * shape[0] * shape[1] * shape[2] * calls for shape, calls in expected.items()}
    done = {shape: flop for shape, flop in work.items() if shape in rates}
    assert found["own_shapes"] == pytest.approx(sum(done.values()) / sum(work.values()))
    assert found["flop_per_s"] == pytest.approx(sum(done.values()) / sum(flop / rates[s] for s, flop in done.items()))

"""Which FLOPs a step is given when the model is trained otherwise than when it was counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter.metrics import DOUBT
from flopmeter.monitor import TrainingMonitor, effort
from flopmeter.monitor.measuring import CHANGED, DIFFERENT, INEXACT
from flopmeter.monitor.schedule import Schedule
from flopmeter.record import Run, load_run

FEATURES, HIDDEN, BATCH = 6, 10, 4
FIRST, SECOND = 2 * BATCH * FEATURES * HIDDEN, 2 * BATCH * HIDDEN
FROZEN = FIRST + 2 * SECOND  # both forward passes, and the gradient of the second weight
TRAINED = 2 * FIRST + 3 * SECOND  # the first weight's gradient, and on the way to it that of the second's input
NUM_STEPS, CHANGES_AT = 16, 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)
        self.gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing:  # reentrant: runs to its end again
            x.requires_grad_()
            return self.second(checkpoint(self.first, x, use_reentrant=True))
        return self.second(self.first(x))

    def freeze(self, is_frozen: bool) -> None:
        self.first.requires_grad_(not is_frozen)


def train(
    folder: Path,
    change: Callable[[Net, int], Any],
    *,
    num_steps: int = NUM_STEPS,
    mode: str = "smart",
    measure_every: int | None = None,
) -> Run:
    """A loop that calls `change` before each step, with its number."""
    config = {
        "monitoring": {
            "peak_flop_per_s": 1e12, "sinks": [], "report": False, "profile_steps": False, "detail_every": 1000,
            "mfu_calculation_mode": mode,
        }
    }  # fmt: skip
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(folder, config, flops_profile_freq=measure_every, model=model, optimizer=optimizer) as monitor:
        for step in range(1, num_steps + 1):
            change(model, step)
            model(torch.randn(BATCH, FEATURES)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step)
    return load_run(folder)


def freeze_until(at: int) -> Callable[[Net, int], None]:
    return lambda model, step: model.freeze(step < at)


def changes(run: Run) -> int:
    return [event["message"] for event in run.named("warning")].count(CHANGED)


@pytest.fixture(autouse=True)
def every_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "WATCH_SHARE", 1e9)
    monkeypatch.setattr(Schedule, "_needed_s", lambda *_: 0.0)


def test_steps_after_unfreezing_have_the_flop_of_all_that_is_trained(tmp_path: Path) -> None:
    run = train(tmp_path, freeze_until(CHANGES_AT))
    wanted = [FROZEN] * (CHANGES_AT - 1) + [TRAINED] * (NUM_STEPS - CHANGES_AT + 1)
    assert list(run.column("perf/model_flop")) == wanted
    assert run.marks[CHANGES_AT] == ("observed",)  # the step after the one that showed it
    assert changes(run) == 1


def test_a_budget_that_forbids_measuring_leaves_the_closed_form_of_the_model_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "_needed_s", lambda *_: 1e12)
    run = train(tmp_path, freeze_until(CHANGES_AT))
    assert list(run.column("perf/model_flop"))[CHANGES_AT - 1 :] == [TRAINED] * (NUM_STEPS - CHANGES_AT + 1)
    assert [place for place, marks in run.marks.items() if "observed" in marks] == [3]


def test_estimates_follow_as_well(tmp_path: Path) -> None:
    run = train(tmp_path, freeze_until(CHANGES_AT), mode="estimate")
    wanted = [FROZEN] * (CHANGES_AT - 1) + [TRAINED] * (NUM_STEPS - CHANGES_AT + 1)
    assert list(run.column("perf/model_flop")) == wanted


def test_a_change_that_only_the_measured_step_shows_is_counted_for_the_model_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "WATCH_SHARE", 1e-15)
    run = train(tmp_path, freeze_until(4))  # the fourth step is the first to be measured
    assert list(run.column("perf/model_flop")) == [FROZEN] * 3 + [TRAINED] * (NUM_STEPS - 3)
    assert changes(run) == 0  # nothing had been counted before


def test_checkpointing_that_is_switched_on_shows_in_what_was_run(tmp_path: Path) -> None:
    def switch(model: Net, step: int) -> None:
        model.gradient_checkpointing = step >= CHANGES_AT

    run = train(tmp_path, switch)
    seconds, hfu = run.column("perf/step_time"), run.column("perf/hfu")
    executed = [round(share * step_s * 1e12) for share, step_s in zip(hfu, seconds, strict=True)]
    assert executed[CHANGES_AT - 2] == TRAINED
    # The first layer's forward pass runs twice, and the batch, which reentrant checkpointing makes require a gradient,
    # gets one: as much again.
    assert executed[CHANGES_AT + 1 :] == [TRAINED + 2 * FIRST] * (NUM_STEPS - CHANGES_AT - 1)


def test_going_back_finds_the_counts_of_before_and_is_said_once(tmp_path: Path) -> None:
    run = train(tmp_path, lambda model, step: model.freeze(step // 4 % 2 == 1), num_steps=40)
    assert list(run.column("perf/model_flop")) == [FROZEN if step // 4 % 2 else TRAINED for step in range(1, 41)]
    assert len([marks for marks in run.marks.values() if "observed" in marks]) == 2
    assert changes(run) == 1


def test_what_is_frozen_within_a_step_is_no_change(tmp_path: Path) -> None:
    """As a GAN's loop does while it trains the other network."""

    class Toggling(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.freeze(is_frozen=True)
            out = super().forward(x)
            self.freeze(is_frozen=False)
            return out

    def become(model: Net, step: int) -> None:
        model.__class__ = Toggling

    run = train(tmp_path, become)
    assert changes(run) == 0
    assert set(run.column("perf/model_flop")) == {FROZEN}


def test_steps_of_one_shape_that_differ_have_the_mean_of_those_counted_and_it_is_said_once(tmp_path: Path) -> None:
    """The first layer is called once or twice, as where layers are dropped at random."""

    class Dropping(Net):
        calls = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(sum(self.first(x) for _ in range(self.calls)))

    def become(model: Net, step: int) -> None:
        model.__class__ = Dropping
        model.calls = 2 if step == 8 else 1  # type: ignore[assignment]

    run = train(tmp_path, become, measure_every=2, num_steps=11)
    assert [place + 1 for place, marks in run.marks.items() if "observed" in marks] == [4, 6, 8, 10]
    twice = TRAINED + 2 * FIRST  # forward, and the weight's gradient
    flop = list(run.column("perf/model_flop"))
    assert flop[-1] == pytest.approx((TRAINED + twice + TRAINED) / 3)
    difference = (twice - TRAINED) / ((TRAINED + twice) / 2)
    messages = [event["message"] for event in run.named("warning")]
    assert messages.count(DIFFERENT.format(difference)) == 1
    assert len(messages) == 1


class Pairing(nn.Module):
    """Work that no field of a batch grows with: the products of all pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y @ y.t()).square().mean()


def pairing_flop(rows: int) -> int:
    layer, pairs = 2 * rows * FEATURES**2, 2 * rows * rows * FEATURES
    return 2 * layer + 3 * pairs  # no gradient of the batch is wanted; both factors of the pairs have one


def test_where_the_law_fails_new_shapes_are_measured_one_by_one_and_the_others_are_marked(tmp_path: Path) -> None:
    config = {
        "monitoring": {
            "peak_flop_per_s": 1e12, "sinks": [], "report": False, "profile_steps": False, "detail_every": 1000,
        }
    }  # fmt: skip
    model = Pairing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rows = [(4, 8, 12)[step % 3] for step in range(30)]
    with TrainingMonitor(tmp_path, config, model=model, optimizer=optimizer) as monitor:
        for step, num in enumerate(rows):
            model(torch.randn(num, FEATURES)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step + 1)
            monitor.latest(wait_s=10.0)  # the background knows of the step before the next one
    run = load_run(tmp_path)
    flop, doubts = run.column("perf/model_flop"), run.work[DOUBT]
    observed = [place for place, marks in run.marks.items() if "observed" in marks]
    assert {rows[place] for place in observed} == {4, 8, 12}
    assert len(observed) <= 7  # one for each, three again, because equal steps may be luck, and the look that is due
    known = [place for place in range(30) if doubts[place] != doubts[place]]
    assert set(range(observed[5] + 1, 30)) <= set(known)
    assert all(flop[place] == pytest.approx(pairing_flop(rows[place])) for place in known)
    assert all(doubts[place] > 0.01 for place in range(3, 30) if place not in known)
    assert [event["message"] for event in run.named("warning")] == [INEXACT.format(run.named("count")[1]["flop_error"])]

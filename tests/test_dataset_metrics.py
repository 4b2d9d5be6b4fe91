"""Per-dataset sums, against sums made by hand, and on the meta device, where reading any value raises."""

from __future__ import annotations

import itertools
import logging
import math
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.errors import ConfigError

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flopmeter.dataset_metrics import (  # noqa: E402
    FIRST_CAPACITY,
    MAX_DATASETS,
    DatasetMetrics,
    Taken,
)


def read(taken: Taken | None) -> dict[str, float]:
    assert taken is not None
    return taken.metrics(taken.sums.tolist() if taken.sums is not None else ())


def measure(*updates: Any, **settings: Any) -> dict[str, float]:
    """Metrics after some updates, none of which may be dropped."""
    metrics = DatasetMetrics(every=1, **settings)
    for update in updates:
        metrics.update(*update)
    assert metrics.num_dropped == 0
    return read(metrics.take())


def one_hot(classes: Any, num_classes: int = 4) -> Any:
    """Logits whose largest value is at the given class."""
    return torch.nn.functional.one_hot(torch.tensor(classes), num_classes).float()


# Loss and samples


def test_losses_are_averaged_over_the_samples_of_each_dataset() -> None:
    values = measure(
        (["web", "code", "web"], torch.tensor([1.0, 5.0, 2.0])), (["code", "web"], torch.tensor([7.0, 6.0]))
    )
    assert values == {
        "dataset/web/loss": (1 + 2 + 6) / 3,
        "dataset/web/samples": 3.0,
        "dataset/code/loss": (5 + 7) / 2,
        "dataset/code/samples": 2.0,
    }


@pytest.mark.parametrize("loss", [torch.tensor(4.0), torch.tensor([4.0]), 4.0])
def test_one_loss_for_the_batch_counts_for_each_of_its_samples(loss: Any) -> None:
    values = measure((["web", "code", "web"], loss), (["web"], torch.tensor([1.0])))
    assert values["dataset/web/loss"] == (4 + 4 + 1) / 3
    assert values["dataset/code/loss"] == 4.0


def test_one_name_stands_for_the_whole_batch() -> None:
    values = measure(("web", torch.tensor([1.0, 2.0])), ("code", torch.tensor([5.0])))
    assert values["dataset/web/loss"] == 1.5
    assert (values["dataset/web/samples"], values["dataset/code/samples"]) == (2.0, 1.0)


def test_the_size_of_a_batch_with_one_name_and_one_loss_is_told_by_its_labels() -> None:
    labels = torch.zeros(5, 3, dtype=torch.long)
    assert measure(("web", torch.tensor(2.0), None, labels, labels))["dataset/web/samples"] == 5.0
    assert measure(("web", torch.tensor(2.0)))["dataset/web/samples"] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_losses_are_summed_in_full_precision(dtype: Any) -> None:
    # In bfloat16 a sum of ones stops at 256, in float16 at 2048.
    assert measure((["web"] * 5000, torch.ones(5000, dtype=dtype)))["dataset/web/loss"] == 1.0


def test_a_nan_loss_spoils_its_own_dataset_only_and_only_until_the_next_take() -> None:
    metrics = DatasetMetrics(every=1)
    metrics.update(["web", "code"], torch.tensor([math.nan, 2.0]))
    values = read(metrics.take())
    assert math.isnan(values["dataset/web/loss"])
    assert values["dataset/code/loss"] == 2.0
    metrics.update(["web", "code"], torch.tensor([3.0, 2.0]))
    assert read(metrics.take())["dataset/web/loss"] == 3.0


def test_means_begin_anew_after_a_take_and_samples_go_on() -> None:
    metrics = DatasetMetrics(every=1)
    assert metrics.take() is None
    metrics.update(["web", "code"], torch.tensor([1.0, 2.0]))
    metrics.take()
    metrics.update(["web"], torch.tensor([9.0]))
    assert read(metrics.take()) == {
        "dataset/web/loss": 9.0,
        "dataset/web/samples": 2.0,
        "dataset/code/samples": 1.0,
    }
    assert read(metrics.take()) == {"dataset/web/samples": 2.0, "dataset/code/samples": 1.0}


def test_what_was_taken_does_not_change_with_later_updates() -> None:
    metrics = DatasetMetrics(every=1)
    metrics.update(["web"], torch.tensor([1.0]))
    taken = metrics.take()
    metrics.update(["web"], torch.tensor([100.0]))
    assert read(taken) == {"dataset/web/loss": 1.0, "dataset/web/samples": 1.0}


# Accuracy


def test_the_largest_logit_is_the_answer_and_ignored_labels_do_not_count() -> None:
    names = ["web", "web", "web", "code"]
    values = measure((names, torch.zeros(4), one_hot([1, 2, 3, 0]), torch.tensor([1, 3, -100, 0])))
    assert values["dataset/web/accuracy"] == 1 / 2
    assert values["dataset/code/accuracy"] == 1.0


def test_logits_of_a_sequence_answer_for_the_label_at_the_next_position() -> None:
    # After 0 comes 2 (right), after 2 comes 1 (wrong), after 3 comes an ignored one; the last answer has no label.
    labels = torch.tensor([[0, 2, 3, -100], [1, 1, 1, 1]])
    logits = one_hot([[2, 1, 0, 0], [1, 1, 1, 3]])
    values = measure((["web", "code"], torch.zeros(2), logits, labels))
    assert values["dataset/web/accuracy"] == 1 / 2
    assert values["dataset/code/accuracy"] == 1.0


def test_labels_are_not_shifted_for_masked_language_models() -> None:
    labels = torch.tensor([[-100, 2, -100, 3]])
    logits = one_hot([[2, 2, 3, 0]])
    values = measure((["web"], torch.zeros(1), logits, labels), shift_labels=False)
    assert values["dataset/web/accuracy"] == 1 / 2


def test_predictions_are_compared_as_they_stand_and_before_logits() -> None:
    labels = torch.tensor([[5, 6, -100], [7, 7, 7]])
    predictions = torch.tensor([[5, 0, -100], [7, 7, 0]])
    values = measure((["web", "code"], torch.zeros(2), torch.zeros(1), labels, predictions))
    assert values["dataset/web/accuracy"] == 1 / 2
    assert values["dataset/code/accuracy"] == 2 / 3


def test_accuracy_is_weighted_by_labels_not_by_samples() -> None:
    # Three labels of which two are right, then one label that is wrong: 2 of 4.
    first = (["web"], torch.zeros(1), None, torch.tensor([[1, 1, 1]]), torch.tensor([[1, 1, 0]]))
    second = (["web"], torch.zeros(1), None, torch.tensor([[1, -100, -100]]), torch.tensor([[0, 0, 0]]))
    assert measure(first, second)["dataset/web/accuracy"] == 2 / 4


@pytest.mark.parametrize(
    ("logits", "labels"), [(one_hot([1]), torch.tensor([-100])), (one_hot([[1]]), torch.tensor([[1]]))]
)
def test_a_dataset_without_a_label_that_counts_has_no_accuracy(logits: Any, labels: Any) -> None:
    values = measure((["web"], torch.ones(1), logits, labels))
    assert values == {"dataset/web/loss": 1.0, "dataset/web/samples": 1.0}


def test_logits_without_labels_and_labels_alone_give_no_accuracy() -> None:
    values = measure((["web"], torch.ones(1), one_hot([1])), (["web"], torch.ones(1), None, torch.tensor([1])))
    assert "dataset/web/accuracy" not in values


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from([-100, 0, 1]), st.integers(0, 1))
        ),
        max_size=4,
    )
)
def test_the_vectorised_sums_are_those_of_a_loop(batches: list[list[tuple[str, int, int, int]]]) -> None:
    metrics = DatasetMetrics(every=1)
    expected: dict[str, list[float]] = {}
    for batch in batches:
        names, losses, labels, predictions = zip(*batch, strict=True) if batch else ([], [], [], [])
        metrics.update(
            list(names),
            torch.tensor(losses, dtype=torch.float32),
            labels=torch.tensor(labels, dtype=torch.long),
            predictions=torch.tensor(predictions, dtype=torch.long),
        )
        for name, loss, label, prediction in batch:
            row = expected.setdefault(name, [0, 0, 0, 0, 0])
            row[:3] = [row[0] + 1, row[1] + loss, row[2] + 1]
            row[3:] = [row[3] + (label == prediction), row[4] + (label != -100)]
    taken = metrics.take()
    assert metrics.num_dropped == 0
    totals = {}
    if taken is not None:
        columns = dict(zip(taken.names, zip(*taken.sums.tolist(), strict=True), strict=False))
        totals = {name: (count, *columns[name]) for name, count in taken.samples.items()}
    assert totals == {name: tuple(row) for name, row in expected.items()}


# One batch in so many


def test_samples_are_counted_in_every_batch_and_losses_in_one_of_so_many() -> None:
    metrics = DatasetMetrics(every=10)
    for _ in range(50):
        metrics.update(["web", "web"], torch.tensor([1.0, 3.0]))
    taken = metrics.take()
    assert taken is not None
    assert taken.sums[:2, 0].tolist() == [5 * 4.0, 5 * 2]
    assert read(taken) == {"dataset/web/loss": 2.0, "dataset/web/samples": 100}


def test_the_first_batch_is_looked_at() -> None:
    metrics = DatasetMetrics(every=10)
    metrics.update(["web"], torch.tensor([3.0]))
    assert read(metrics.take())["dataset/web/loss"] == 3.0


def test_datasets_that_come_in_turn_are_all_looked_at() -> None:
    metrics = DatasetMetrics(every=10)
    for name in itertools.islice(itertools.cycle(["web", "code", "maths", "books", "talks"]), 400):
        metrics.update(name, torch.tensor([1.0]))
    assert sum(key.endswith("/loss") for key in read(metrics.take())) == 5


def test_choosing_the_batch_leaves_the_random_generators_alone() -> None:
    before = random.getstate(), torch.get_rng_state()
    metrics = DatasetMetrics(every=2)
    for _ in range(20):
        metrics.update(["web"], torch.tensor([1.0]))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("every", [0, -5])
def test_an_impossible_interval_is_refused(every: int) -> None:
    with pytest.raises(ConfigError, match="dataset_metrics_every"):
        DatasetMetrics(every=every)


# No wait, no loop, no graph


@pytest.mark.parametrize("names", [["web", "code", "web"], "web"])
@pytest.mark.parametrize("loss_shape", [(3,), ()])
def test_nothing_is_read_from_the_device(names: Any, loss_shape: tuple[int, ...]) -> None:
    metrics = DatasetMetrics(every=1)
    loss = torch.empty(loss_shape, device="meta", requires_grad=True)
    logits = torch.empty(3, 5, 7, device="meta", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.empty(3, 5, device="meta", dtype=torch.long)
    metrics.update(names, loss, logits, labels)
    metrics.update(names, loss, predictions=labels, labels=labels)
    metrics.update([f"dataset {n}" for n in range(3)], loss)
    taken = metrics.take()
    assert metrics.num_dropped == 0
    assert taken is not None
    assert (taken.sums.device.type, taken.sums.shape[0]) == ("meta", 4)


class Operators(TorchDispatchMode):
    """Counts what reaches the device."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def num_operators(metrics: DatasetMetrics, names: Sequence[str]) -> int:
    size = len(names)
    with Operators() as operators:
        metrics.update(names, torch.zeros(size), torch.zeros(size, 6, 3), torch.zeros(size, 6, dtype=torch.long))
    return operators.num_calls


def test_the_number_of_operators_grows_neither_with_samples_nor_with_datasets() -> None:
    metrics = DatasetMetrics(every=1)
    num_operators(metrics, ["a"])
    assert num_operators(metrics, ["a", "b"]) == num_operators(metrics, [f"{n % 10}" for n in range(200)])


def test_a_batch_that_is_not_looked_at_costs_no_operator() -> None:
    metrics = DatasetMetrics(every=10)
    num_operators(metrics, ["a"])
    inputs = torch.zeros(1), torch.zeros(1, 6, 3), torch.zeros(1, 6, dtype=torch.long)
    with Operators() as operators:
        for _ in range(9):
            metrics.update(["a"], *inputs)
    assert operators.num_calls == 0


def test_the_graph_of_a_loss_is_free_after_the_update() -> None:
    weights = torch.ones(3, requires_grad=True)
    hidden = weights * 2
    loss = hidden.exp()
    watched = weakref.ref(hidden)
    metrics = DatasetMetrics(every=1)
    metrics.update(["web", "code", "web"], loss, torch.stack([hidden] * 3), torch.tensor([0, 1, 2]))
    del hidden, loss
    taken = metrics.take()
    assert taken is not None
    assert not taken.sums.requires_grad
    assert watched() is None


def test_a_loss_that_is_changed_in_place_afterwards_is_counted_as_it_was() -> None:
    metrics = DatasetMetrics(every=1)
    loss = torch.tensor([8.0])
    metrics.update(["web"], loss)
    loss /= 4
    assert read(metrics.take())["dataset/web/loss"] == 8.0


def test_batches_in_and_out_of_inference_mode_and_autocast_add_up() -> None:
    metrics = DatasetMetrics(every=1)
    with torch.inference_mode():
        metrics.update(["web", "code"], torch.tensor([1.0, 1.0]))
    metrics.update(["web", "code"], torch.tensor([2.0, 2.0], requires_grad=True))
    with torch.autocast("cpu", torch.bfloat16):
        metrics.update(["web", "code"], torch.tensor([257.0, 257.0]))
    assert metrics.num_dropped == 0
    assert read(metrics.take())["dataset/web/loss"] == (1 + 2 + 257) / 3


# Names


def test_sums_survive_the_coming_of_many_new_datasets() -> None:
    # Dataset n comes with update n, and has the loss k in update k: from n to the last, n + last over 2 on average.
    names = [f"dataset {n}" for n in range(5 * FIRST_CAPACITY)]
    last = len(names) - 1
    values = measure(*((names[: k + 1], torch.full((k + 1,), float(k))) for k in range(len(names))))
    for n, name in enumerate(names):
        assert values[f"dataset/{name}/loss"] == (n + last) / 2
        assert values[f"dataset/{name}/samples"] == last - n + 1


def test_a_list_of_names_that_the_loader_changes_in_place_is_read_anew() -> None:
    metrics = DatasetMetrics(every=1)
    names = ["web", "web"]
    metrics.update(names, torch.tensor([1.0, 1.0]))
    names[1] = "code"
    metrics.update(names, torch.tensor([1.0, 5.0]))
    values = read(metrics.take())
    assert (values["dataset/web/loss"], values["dataset/code/loss"]) == (1.0, 5.0)


def test_a_name_is_one_segment_of_the_key() -> None:
    values = measure((["allenai/c4", "维基 百科", ""], torch.tensor([1.0, 2.0, 3.0])))
    assert values["dataset/allenai--c4/loss"] == 1.0
    assert values["dataset/维基 百科/loss"] == 2.0
    assert values["dataset/unnamed/loss"] == 3.0


def test_names_that_become_alike_are_one_dataset() -> None:
    values = measure((["a/b", "a--b"], torch.tensor([1.0, 4.0])))
    assert values == {"dataset/a--b/loss": 2.5, "dataset/a--b/samples": 2.0}


def test_names_without_end_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    metrics = DatasetMetrics(every=1)
    for n in range(MAX_DATASETS + 50):
        metrics.update([f"sample {n}"], 1.0)
    taken = metrics.take()
    assert taken is not None
    assert (len(taken.samples), metrics.num_dropped) == (MAX_DATASETS, 50)
    assert caplog.messages == [
        "dataset metrics: an update is dropped (more than 1000 dataset names: are they names of samples?);"
        " more of them will be in silence"
    ]


# What does not fit

LABELS = torch.zeros(2, 3, dtype=torch.long)
MISFITS = {
    "more losses than names": (["a", "b"], torch.zeros(3)),
    "losses by token": (["a", "b"], torch.zeros(2, 3)),
    "names missing": ([], torch.zeros(3)),
    "labels of another batch": (["a", "b"], torch.zeros(2), None, torch.zeros(3), torch.zeros(3)),
    "a single label": (["a"], torch.zeros(1), None, torch.tensor(1), torch.tensor(1)),
    "predictions of another length": (["a", "b"], torch.zeros(2), None, LABELS, LABELS[:, 1:]),
    "logits of another length": (["a", "b"], torch.zeros(2), torch.zeros(2, 4, 9), LABELS),
    "logits that are one number": (["a", "b"], torch.zeros(2), torch.zeros(2, 1), LABELS[:, 0]),
    "labels that are numbers": (["a", "b"], torch.zeros(2), torch.zeros(2, 9), torch.zeros(2)),
    "logits without classes": (["a", "b"], torch.zeros(2), torch.tensor(0.0), LABELS[:, 0]),
    "two kinds of device": (["a", "b"], torch.zeros(2), None, LABELS, LABELS.to("meta")),
    "numbers as names": ([1, 2], torch.zeros(2)),
    "a tensor of names": (torch.tensor([1, 2]), torch.zeros(2)),
    "names that cannot be looked up": ([["a"], ["b"]], torch.zeros(2)),
    "no names": (None, torch.zeros(2)),
    "no loss": (["a", "b"], None),
}


@pytest.mark.parametrize("update", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_together_is_dropped_with_one_warning(
    update: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = DatasetMetrics(every=1)
    for _ in range(3):
        metrics.update(*update)
    metrics.update(["a"], torch.tensor([2.0]))
    assert metrics.num_dropped == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert read(metrics.take()) == {"dataset/a/loss": 2.0, "dataset/a/samples": 1.0}


def test_a_batch_on_another_kind_of_device_than_the_first_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    metrics = DatasetMetrics(every=1)
    metrics.update(["a"], torch.tensor([2.0]))
    metrics.update(["a"], torch.zeros(1, device="meta"))
    assert metrics.num_dropped == 1
    assert read(metrics.take()) == {"dataset/a/loss": 2.0, "dataset/a/samples": 1.0}
    assert "earlier batches were on cpu and this one is on meta" in caplog.text


@pytest.mark.parametrize("loss", [torch.zeros(0), torch.tensor(1.0)])
def test_a_batch_without_samples_changes_nothing(loss: Any) -> None:
    metrics = DatasetMetrics(every=1)
    metrics.update([], loss)
    assert metrics.take() is None
    assert metrics.num_dropped == 0

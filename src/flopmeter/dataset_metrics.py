"""How does each dataset of a mixture fare: its loss, its accuracy, its samples, without waiting for the device?

    metrics = DatasetMetrics(every=10)
    metrics.update(batch["dataset"], losses, logits, labels)      # each batch: no sync, no loop over samples
    taken = metrics.take()                                        # sums on the device, not read yet
    taken.metrics(taken.sums.tolist())                            # later: {"dataset/code/loss": 1.9, ...}

Samples are counted in every batch, from the names alone. Loss and accuracy come from one batch in `every`, at a place
that varies (drawn from a generator of our own): were it always the tenth, a loader that takes its datasets in turn
would show some of them never. A batch is one call of `update`; with gradient accumulation, a micro-batch.

Accuracy: predictions are compared with labels as they stand. Logits (N, C) answer for labels (N). Logits (N, S, C) at
position t answer for the label at t + 1, as Hugging Face's causal models shift them (`shift_labels=False`, in settings
`dataset_labels_shifted`, for masked language models and token classification). Labels of -100 do not count. A loss is a
mean over samples, an accuracy over labels.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from flopmeter.errors import ConfigError, FlopmeterError
from flopmeter.torch_compat import DisableTorchFunction

logger = logging.getLogger("flopmeter")

IGNORED_LABEL = -100
MAX_DATASETS = 1000
"""More names than this are sample ids by mistake; their updates are dropped, so that memory stays bounded."""

NUM_ROWS = 4
"""Rows of the sums: loss, samples with a loss, right labels, labels."""
NOTHING = (0.0,) * NUM_ROWS
FIRST_CAPACITY = 16
"""Datasets for which there is room before the sums move to a larger place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What was accumulated up to a `take`; nothing of it has been read from the device."""

    samples: Mapping[str, int]
    """Samples by dataset, since the start of the run."""
    names: tuple[str, ...]
    """Dataset of each column of `sums`."""
    sums: torch.Tensor | None
    """(4, datasets) on the device: loss, samples with a loss, right labels, labels. None: no batch was looked at."""

    def metrics(self, values: Sequence[Sequence[float]] = ()) -> dict[str, float]:
        """The metrics, given the host's copy of `sums` (none when it is None).

        A mean over nothing is left out, so a dataset that was not looked at has only its samples. A key has one segment
        for the name: "/" in it becomes "--" (`allenai/c4` is `dataset/allenai--c4/loss`), an empty one "unnamed"; names
        that are then alike are one dataset.
        """
        columns = dict(zip(self.names, zip(*values, strict=True), strict=False))
        totals: dict[str, tuple[float, ...]] = {}
        for name, num_samples in self.samples.items():
            key, found = name.replace("/", "--") or "unnamed", (float(num_samples), *columns.get(name, NOTHING))
            totals[key] = tuple(map(sum, zip(totals.get(key, (0.0, *NOTHING)), found, strict=True)))
        result: dict[str, float] = {}
        for key, (count, loss, num_losses, correct, labels) in totals.items():
            if num_losses:
                result[f"dataset/{key}/loss"] = loss / num_losses
            if labels:
                result[f"dataset/{key}/accuracy"] = correct / labels
            result[f"dataset/{key}/samples"] = count
        return result


class DatasetMetrics:
    """Accumulates on the device, on the training thread; never raises, never synchronises, keeps no graph.

    Args:
        every: Look at the loss and the labels of one batch in so many.
        shift_labels: Whether logits (N, S, C) at one position answer for the label at the next.
    """

    def __init__(self, every: int = 10, *, shift_labels: bool = True) -> None:
        if every < 1:
            raise ConfigError(f"dataset_metrics_every: {every} is no number of steps; allowed: 1 or more")
        self.every = every
        self.num_dropped = 0
        """Updates that did not fit together; the first one gave a warning."""
        self._shift_labels = shift_labels
        self._samples: Counter[str] = Counter()
        self._ids: dict[str, int] = {}
        self._sums: torch.Tensor | None = None
        self._is_empty = True
        self._last_columns: tuple[tuple[str, ...], torch.Tensor] | None = None
        self._num_calls = 0
        self._place = 0
        # Not the user's generator: the monitor consumes no random numbers.
        self._random = random.Random(0)

    def update(
        self,
        dataset_names: Sequence[str] | str,
        loss: torch.Tensor | float,
        logits: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        predictions: torch.Tensor | None = None,
    ) -> None:
        """Take in one batch. If it is looked at and does not fit together it is dropped whole, with one warning.

        Args:
            dataset_names: One for each sample, or one for all.
            loss: One for each sample, or one for the batch, which then counts for each sample of every dataset in it.
            predictions: Class or token ids; they take precedence over `logits`.
        """
        try:
            with DisableTorchFunction():  # the user's function modes and tensor classes are not for us
                if isinstance(dataset_names, str):
                    counts = Counter({dataset_names: num_samples(loss, labels)})
                else:
                    counts = Counter(dataset_names)
                self._register(counts.keys() - self._ids.keys())
                if self._is_due():
                    answers = logits if predictions is None else predictions
                    self._add(dataset_names, loss, answers, labels, is_logits=predictions is None)
            # Last, so that an update which failed has left nothing behind.
            self._samples.update(counts)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run; the reason is logged)
            self.num_dropped += 1
            if self.num_dropped == 1:
                reason = error if isinstance(error, FlopmeterError) else f"{type(error).__name__}: {error}"
                logger.warning("dataset metrics: an update is dropped (%s); more of them will be in silence", reason)

    def take(self) -> Taken | None:
        """What has come together since the last take, or None; call it on the training thread, read it anywhere."""
        if not self._samples:
            return None
        sums = None
        if self._sums is not None and not self._is_empty:
            with DisableTorchFunction():
                sums = self._sums[:, : len(self._ids)].clone()
                self._sums.zero_()
            self._is_empty = True
        return Taken(samples=dict(self._samples), names=tuple(self._ids), sums=sums)

    def _add(
        self,
        names: Sequence[str] | str,
        loss: torch.Tensor | float,
        answers: torch.Tensor | None,
        labels: torch.Tensor | None,
        *,
        is_logits: bool,
    ) -> None:
        """Look at one batch. Shapes and devices are known to the host, so that checking them costs no wait."""
        if answers is None or labels is None:
            answers = labels = None
        number = num_samples(loss, labels) if isinstance(names, str) else len(names)
        if not isinstance(loss, torch.Tensor):
            try:
                loss = float(loss)
            except (TypeError, ValueError):
                raise FlopmeterError(f"a loss is a tensor or a number, not {type(loss).__name__}") from None
        elif loss.numel() != 1 and loss.shape != (number,):
            raise FlopmeterError(f"{number} samples are named and the loss has the shape {tuple(loss.shape)}")
        if answers is not None and labels is not None:
            shapes = f"{number} samples are named, labels have the shape {tuple(labels.shape)}"
            if not labels.dim() or len(labels) != number:
                raise FlopmeterError(shapes)
            if not is_logits and answers.shape != labels.shape:
                raise FlopmeterError(f"{shapes}, predictions {tuple(answers.shape)}")
            has_classes = answers.shape[:-1] == labels.shape and answers.shape[-1] >= 2
            if is_logits and (not has_classes or labels.is_floating_point()):
                raise FlopmeterError(f"{shapes}, logits {tuple(answers.shape)}: pass class ids as predictions instead")
        # Several GPUs are fine; between CPU and GPU nothing can be copied without waiting.
        tensors = [each for each in (loss, answers, labels) if isinstance(each, torch.Tensor)]
        devices = {tensor.device.type: tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise FlopmeterError(f"tensors are on {' and '.join(map(str, devices.values()))}: put them on one device")
        # While a CUDA graph is recorded, what we add now would be added again at every replay.
        if not number or ("cuda" in devices and torch.cuda.is_current_stream_capturing()):
            return
        sums = self._room(next(iter(devices.values()), None))
        losses = loss if isinstance(loss, torch.Tensor) else torch.full((1,), loss, device=sums.device)
        losses = losses.detach().reshape(-1).to(sums).expand(number)
        rows = [losses, torch.ones_like(losses)]
        if answers is not None and labels is not None:
            answers, labels = answers.detach(), labels.detach()
            if is_logits:
                if self._shift_labels and labels.dim() == 2:
                    answers, labels = answers[:, :-1], labels[:, 1:]
                answers = answers.argmax(-1)
            labels = labels.to(answers.device, non_blocking=True)
            is_counted = labels != IGNORED_LABEL
            for flags in (is_counted & (answers == labels), is_counted):
                rows.append(flags.reshape(number, flags.numel() // number).sum(1).to(sums))
        sums[: len(rows)].index_add_(1, self._columns(names, number, sums.device), torch.stack(rows))
        self._is_empty = False

    def _register(self, new: Collection[str]) -> None:
        if not all(isinstance(name, str) for name in new):
            raise FlopmeterError("a dataset name must be text")
        if len(self._ids) + len(new) > MAX_DATASETS:
            raise FlopmeterError(f"more than {MAX_DATASETS} dataset names: are they names of samples?")
        for name in sorted(new):
            self._ids[name] = len(self._ids)

    def _is_due(self) -> bool:
        """Whether this batch is the one of its `every` that is looked at: the very first, then at a varying place."""
        offset = self._num_calls % self.every
        if offset == 0 and self._num_calls:
            self._place = self._random.randrange(self.every)
        self._num_calls += 1
        return offset == self._place

    def _room(self, device: torch.device | None) -> torch.Tensor:
        """The sums, with a column for each dataset; copied to a larger place, unread, when names were added."""
        old = self._sums
        if old is not None and device is not None and old.device.type != device.type:
            raise FlopmeterError(f"earlier batches were on {old.device} and this one is on {device}")
        if old is not None and len(self._ids) <= old.shape[1]:
            return old
        device = old.device if old is not None else device or torch.device("cpu")
        # A tensor made in the user's inference mode could not be added to outside of it.
        with torch.inference_mode(False):
            dtype = torch.float32 if device.type == "mps" else torch.float64
            sums = torch.zeros(NUM_ROWS, max(FIRST_CAPACITY, 2 * len(self._ids)), dtype=dtype, device=device)
            if old is not None:
                sums[:, : old.shape[1]].copy_(old)
        self._sums = sums
        return sums

    def _columns(self, names: Sequence[str] | str, number: int, device: torch.device) -> torch.Tensor:
        """The column of each sample, on the device; kept for the next batch with the same names."""
        if isinstance(names, str):
            return torch.full((number,), self._ids[names], device=device)
        if self._last_columns is None or self._last_columns[0] != tuple(names):
            # From pinned memory, without waiting: a plain copy would wait until the GPU has caught up.
            columns = torch.tensor(
                list(map(self._ids.__getitem__, names)), device="cpu", pin_memory=device.type == "cuda"
            )
            self._last_columns = tuple(names), columns.to(device, non_blocking=True)
        return self._last_columns[1]


def num_samples(loss: torch.Tensor | float, labels: torch.Tensor | None) -> int:
    """Size of a batch that has one name for all; without labels and with one loss for all it counts as one sample."""
    tensors = (labels, loss)
    return next((len(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim()), 1)

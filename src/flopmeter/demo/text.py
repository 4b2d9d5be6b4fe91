"""Synthetic English, made on the spot: enough structure to learn, nothing to download."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

_WHO = ("the engineer", "a small model", "the cluster", "one slow rank", "the loader", "a large batch", "the compiler")
_DOES = ("waits for", "feeds", "measures", "speeds up", "forgets", "compiles", "counts")
_WHAT = ("the optimizer", "every kernel", "a gradient", "the next step", "its own shadow", "all tokens", "the peak")
_WHEN = ("at night", "in silence", "twice", "before breakfast", "under load", "for an hour", "without a sound")


class SyntheticText(IterableDataset[dict[str, torch.Tensor]]):
    """An endless stream of samples: bytes and the bytes that follow them."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        choice = random.Random(self._seed).choice  # our own generator: the global one is the user's
        while True:
            text = bytearray()
            while len(text) <= self._length:
                text += f"{choice(_WHO)} {choice(_DOES)} {choice(_WHAT)} {choice(_WHEN)}. ".encode()
            tokens = torch.frombuffer(text[: self._length + 1], dtype=torch.uint8).long()
            yield {"input_ids": tokens[:-1], "labels": tokens[1:]}

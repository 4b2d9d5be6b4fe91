"""The training waits for data because the loader cannot compute it fast enough.

How we know. Every step measures how long the loop sat in the loader's `next`, and meanwhile the loader was busy: its
workers (or, without workers, the training process during the wait) computed for more than half of the time. Decoding,
augmenting, tokenizing or collating is the brake, not the disk.

What to do. Do the work once, ahead of the run: tokenize and store the tokens (memory-mapped), resize and decode
images once. Give the loader more cores: DataLoader(..., num_workers=N, persistent_workers=True), N up to the cores
that this process may use; workers that already fill the machine's cores gain nothing from more of them. Move
augmentations to the GPU (torchvision.transforms.v2, DALI), use fast tokenizers in batches, and keep per-sample Python
out of collate_fn.

The gain assumes that the wait goes away entirely (expected), or by half (low).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import BUSY_SHARE, Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.text import percent, seconds

MIN_SHARE = 0.05
"""As for a loader that waits: below one step in twenty there is nothing left to win."""


def check(evidence: Evidence) -> Finding | None:
    """Look for a wait in which the loader computes."""
    share, wait_s = evidence.share("data_wait"), evidence.seconds("data_wait")
    if share < MIN_SHARE:
        return None
    if evidence.loader_busy is None:
        raise NotCheckedError("the loader's CPU time was not recorded (workers need psutil)")
    if evidence.loader_busy < BUSY_SHARE:
        return None
    return Finding(
        rule="cpu_preprocessing",
        title=f"the steps wait for data for {percent(share)} of the time, while the loader computes",
        lost=share,
        evidence=(
            f"{seconds(wait_s / evidence.num_steps)} of every step are spent waiting for the next batch",
            evidence.loader_evidence(),
        ),
        advice=(
            "tokenize, decode and resize once, ahead of the run, and memory-map the result",
            "DataLoader: raise num_workers up to the cores of this process, with persistent_workers=True",
            "augment on the GPU, and tokenize in batches with a fast tokenizer",
        ),
        gain=evidence.gain(wait_s, low_s=wait_s / 2, high_s=wait_s),
    )

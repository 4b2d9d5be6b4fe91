"""Self-check of the FLOP helpers on this machine: every name can be imported, and the estimate holds against the count.

python scripts/test_simplified_flops.py
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import nn

from flopmeter import count_flops

NAMES = (
    "calculate_precise_mfu", "calculate_mfu_with_profiler", "calculate_mfu", "profile_model_flops",
    "get_gpu_peak_flops", "TrainingMonitor", "_measure_flops_with_profiler", "_create_dummy_batch_for_profiling",
    "_get_actual_sequence_length", "_estimate_forward_flops", "_estimate_flops_fallback",
)  # fmt: skip
TOLERANCE = 0.03
SIZES = ((1, 16), (4, 64), (2, 256))


class TinyLanguageModel(nn.Module):
    """Embedding, two feed-forward blocks and a head: small enough to count by hand."""

    def __init__(self, vocabulary: int = 256, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(input_ids)))
        return logits


def main() -> int:
    module = importlib.import_module("training.utils.monitor")
    missing = [name for name in NAMES if not hasattr(module, name)]
    print(
        f"{'ok  ' if not missing else 'FAIL'} helpers: {len(NAMES) - len(missing)} of {len(NAMES)} importable {missing}"
    )
    is_right = not missing
    model = TinyLanguageModel()
    for batch_size, length in SIZES:
        batch = module._create_dummy_batch_for_profiling(batch_size, length, "cpu")
        estimated, counted = module.profile_model_flops(model, batch), count_flops(model, batch).model_flop
        error = estimated / counted - 1
        is_close = abs(error) <= TOLERANCE
        is_right &= is_close
        sizes = f"batch {batch_size}, length {length}"
        print(
            f"{'ok  ' if is_close else 'FAIL'} {sizes}: estimate {estimated:.4g}, counted {counted:.4g}, {error:+.2%}"
        )
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

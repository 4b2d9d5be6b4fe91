"""Trains a small GPT by DeepSpeed under ZeRO 1 to 3, one after the other, with a gradient accumulated over two batches.

python deepspeed_loop.py FOLDER: leaves a run in FOLDER/zero1 to zero3.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from flopmeter import watch

CONFIG = {
    "monitoring": {
        "sinks": [],
        "report": False,
        "peak_flop_per_s": 1e12,
        "performance_monitoring": {"smart_mode": {"recalibration_frequency": 5}},
    }
}
LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH, NUM_STEPS = 2, 32, 64, 4, 16, 12


def made_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def main(folder: Path) -> None:
    for stage in (1, 2, 3):
        model = made_model()
        settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings
        )
        with watch(engine, optimizer, output_dir=folder / f"zero{stage}", config=CONFIG):
            for _ in range(2 * NUM_STEPS):
                ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
        engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

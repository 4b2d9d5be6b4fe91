"""A Hugging Face Trainer with one callback: MFU in its own logs, every step in a run file.

    python examples/hf_trainer.py

Needs transformers and accelerate. Nothing is downloaded: the model is built from a config, the text is noise.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from flopmeter.integrations.transformers import FlopmeterCallback

VOCABULARY, LENGTH = 512, 64


class Noise(Dataset):
    """Sequences of different lengths, padded to one."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(LENGTH) < LENGTH - index % 16).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output-dir", default="runs/hf_trainer")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
    args = TrainingArguments(
        arguments.output_dir,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    callback = FlopmeterCallback()
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Noise(), callbacks=[callback])
    trainer.train()
    print(f"last log: perf/mfu {trainer.state.log_history[-1]['perf/mfu']:.4f}")
    print(f"run file: {callback.monitor.run_path}")


if __name__ == "__main__":
    main()

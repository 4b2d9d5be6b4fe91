"""A Lightning Trainer with one callback: a small convolutional net on noise, MFU in the Trainer's own logger.

    python examples/lightning_trainer.py

Needs lightning.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopmeter.integrations.lightning import FlopmeterCallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/lightning_trainer")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images = torch.randn(arguments.steps * 32, 1, 28, 28)
    data = TensorDataset(images, torch.randint(0, 10, (len(images),)))
    callback = FlopmeterCallback(arguments.output_dir)
    trainer = Trainer(
        max_steps=arguments.steps,
        logger=CSVLogger(arguments.output_dir),
        callbacks=[callback],
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=32))
    print(f"perf/mfu {callback.monitor.summary()['perf/mfu']:.4f}")
    print(f"run file: {callback.monitor.run_path}")


if __name__ == "__main__":
    main()

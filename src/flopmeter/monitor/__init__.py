"""Ties work, time and peak together for one training loop, and writes what it learns to the run file.

monitor = watch(model, optimizer, loader, output_dir="runs/mine")     # hooks mark phases and steps
...
monitor.finish_training()

with TrainingMonitor("runs/mine", model=model) as monitor:            # or say it yourself
    for step, batch in enumerate(monitor.batches(loader)):
        loss = train(batch)
        monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=3e-4)
"""

from __future__ import annotations

from flopmeter.monitor.training_monitor import TrainingMonitor, watch

__all__ = ["TrainingMonitor", "watch"]

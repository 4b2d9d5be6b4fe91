"""Do `flopmeter run` and the callbacks report the MFU that a loop instrumented by hand reports, on the same model?

    python benchmarks/integrations.py [--record FILE]
    python benchmarks/integrations.py --short

A tiny Llama is trained on the same batches by a plain loop with `TrainingMonitor`, by a plain loop that knows nothing
of flopmeter, under `flopmeter run`, by a Hugging Face Trainer, by a Lightning Trainer and by a loop with Accelerate,
each with its integration. Rounds are interleaved, so that a machine
that slows down slows all of them; the ratio to the plain loop is taken within a round, and its median is reported. A
framework spends time of its own in a step, which belongs into its MFU: so what flopmeter says is also held against a
clock outside of it, over the same steps (`mfu_over_clock`, which must be 1 within 2 %). `model_flop` must be equal.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from flopmeter import TrainingMonitor, load_run
from outcome import add_record_option, finish

BENCHMARK_VERSION = 2
VOCABULARY, LENGTH, BATCH, WARMUP = 512, 64, 4, 5
CONFIG = {"monitoring": {"sinks": [], "peak_flop_per_s": 1e12, "flops_profile_freq": 0}}

Marks = list[float]


class Tokens(Dataset):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make_model(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None))


def by_hand(folder: Path, steps: int, hidden: int) -> Marks:
    model, marks = make_model(hidden), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Tokens(steps * BATCH), BATCH)
    with TrainingMonitor(folder, CONFIG, model=model, optimizer=optimizer, loader=loader) as monitor:
        for step, batch in enumerate(loader, start=1):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, loss=loss)
            marks.append(perf_counter())
    return marks


def plain(marks_file: Path, steps: int, hidden: int) -> None:
    """The program that `flopmeter run` measures: the loop of `by_hand` without a monitor."""
    model, marks = make_model(hidden), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in DataLoader(Tokens(steps * BATCH), BATCH):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(perf_counter())
    marks_file.write_text(json.dumps(marks))


def by_run(folder: Path, steps: int, hidden: int) -> Marks:
    settings, marks_file = folder / "settings.yaml", folder / "marks.json"
    settings.write_text(json.dumps(CONFIG))  # JSON is YAML
    command = ["-m", "flopmeter", "run", "--quiet", "-o", str(folder), "--config", str(settings), __file__]
    program = ["--plain", str(marks_file), "--steps", str(steps), "--hidden", str(hidden)]
    subprocess.run([sys.executable, *command, *program], check=True)
    marks: Marks = json.loads(marks_file.read_text())
    return marks


def by_transformers(folder: Path, steps: int, hidden: int) -> Marks:
    from flopmeter.integrations.transformers import FlopmeterCallback

    marks: Marks = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(perf_counter())

    args = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, report_to="none", save_strategy="no",
        logging_steps=10, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callbacks = [Clock(), FlopmeterCallback(config=CONFIG)]
    trainer = Trainer(make_model(hidden), args, train_dataset=Tokens(steps * BATCH), callbacks=callbacks)
    trainer.log = quiet(trainer.log)
    trainer.train()
    return marks


def quiet(log: Callable[..., None]) -> Callable[..., None]:
    """The Trainer prints its logs; a benchmark's output is one line."""

    def call(*args: Any, **kwargs: Any) -> None:
        from contextlib import redirect_stdout
        from io import StringIO

        with redirect_stdout(StringIO()):
            log(*args, **kwargs)

    return call


def by_lightning(folder: Path, steps: int, hidden: int) -> Marks:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    from flopmeter.integrations.lightning import FlopmeterCallback

    marks: Marks = []

    class Step(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(hidden)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            marks.append(perf_counter())

    trainer = LightningTrainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, callbacks=[Clock(), FlopmeterCallback(folder, CONFIG)],
    )  # fmt: skip
    trainer.fit(Step(), DataLoader(Tokens(steps * BATCH), BATCH))
    return marks


def by_accelerate(folder: Path, steps: int, hidden: int) -> Marks:
    from accelerate import Accelerator

    from flopmeter import watch

    accelerator, model, marks = Accelerator(cpu=True), make_model(hidden), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Tokens(steps * BATCH), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer, loader, output_dir=folder, config=CONFIG, accelerator=accelerator)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(perf_counter())
    accelerator.end_training()
    return marks


WAYS: dict[str, Callable[[Path, int, int], Marks]] = {
    "by_hand": by_hand,
    "run": by_run,
    "transformers": by_transformers,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
}


def measure(way: str, steps: int, hidden: int) -> dict[str, float]:
    """One run: its MFU by flopmeter, and its MFU by a clock of the benchmark's own over the same steps."""
    with tempfile.TemporaryDirectory() as folder:
        marks = WAYS[way](Path(folder), steps, hidden)
        run = load_run(folder)
    flop = run.column("perf/model_flop")[-1]
    num_steps = len(run) - WARMUP  # `flopmeter run` has none of the steps in which it came to understand the loop
    own_s = sum(run.column("perf/step_time")[WARMUP:])
    # The only pauses are those in which flopmeter samples.
    pauses = [event for event in run.events if event["event"] == "pause" and event["after_step"] >= WARMUP]
    clock_s = marks[-1] - marks[-1 - num_steps] - sum(event["duration_s"] for event in pauses)
    mfu, clock_mfu = (flop * num_steps / wall_s / 1e12 for wall_s in (own_s, clock_s))
    return {"model_flop": flop, "mfu": mfu, "clock_mfu": clock_mfu, "steps": len(run)}


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Each way against the loop by hand and against the clock, as medians over the rounds."""
    result: dict[str, Any] = {}
    for way in rounds[0]:
        runs = [(one[way], one["by_hand"]) for one in rounds]
        result[way] = {
            "model_flop": runs[0][0]["model_flop"],
            "steps": runs[0][0]["steps"],
            "mfu_over_clock": statistics.median(run["mfu"] / run["clock_mfu"] for run, _ in runs),
            "mfu_over_by_hand": statistics.median(run["mfu"] / hand["mfu"] for run, hand in runs),
            "clock_over_by_hand": statistics.median(run["clock_mfu"] / hand["clock_mfu"] for run, hand in runs),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--short", "--quick", action="store_true", help="a few steps of a small model, to see that it runs"
    )
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="of by_hand (always), run, transformers, lightning, accelerate"
    )
    add_record_option(parser)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        plain(arguments.plain, arguments.steps, arguments.hidden)
        return
    if arguments.short:
        arguments.steps, arguments.rounds, arguments.hidden = 12, 1, 32
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ways = ["by_hand", *(way for way in arguments.ways.split(",") if way != "by_hand")]
    rounds = [{way: measure(way, arguments.steps, arguments.hidden) for way in ways} for _ in range(arguments.rounds)]
    found = compare(rounds)
    figures = {
        "threads": torch.get_num_threads(),
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "ways": found,
        "same_model_flop": len({way["model_flop"] for way in found.values()}) == 1,
    }
    finish("integrations", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()

"""A tiny Qwen2.5-VL on images and text from two datasets: the vision tower is counted, each dataset has its metrics.

    python examples/multimodal.py

Needs transformers. Nothing is downloaded: the model is built from a config, the images are noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from flopmeter import TrainingMonitor, load_run

IMAGE, VOCABULARY, LENGTH = 1, 320, 48
PATCH_VALUES = 3 * 2 * 14 * 14
DATASETS = ("charts", "photos")


def make_model() -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def batches(num_batches: int) -> Iterator[tuple[dict[str, torch.Tensor], list[str]]]:
    """Images of two sizes, one per sample; every third batch has text only."""
    generator = torch.Generator().manual_seed(0)
    for index in range(num_batches):
        ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator)
        batch = {"input_ids": ids}
        if index % 3 != 2:
            grids = torch.tensor([(1, 8, 8), (1, 4, 8)])
            for row, (_, height, width) in enumerate(grids.tolist()):
                ids[row, 2 : 2 + height * width // 4] = IMAGE
            batch["pixel_values"] = torch.randn(int(grids.prod(1).sum()), PATCH_VALUES, generator=generator)
            batch["image_grid_thw"] = grids
            batch["mm_token_type_ids"] = (ids == IMAGE).int()
        yield batch | {"labels": ids}, [DATASETS[index % 2], DATASETS[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output-dir", default="runs/multimodal")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"monitoring": {"dataset_metrics_every": 1, "detail_every": 4}}
    with TrainingMonitor(arguments.output_dir, config, model=model, optimizer=optimizer) as monitor:
        for step, (batch, datasets) in enumerate(monitor.batches(batches(arguments.steps)), start=1):
            out = model(**batch)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.update_dataset_metrics(datasets, out.loss.detach(), out.logits, batch["labels"])
            monitor.log_step(step, epoch=0, loss=out.loss, learning_rate=1e-3)
        monitor.finish_training()

    run = load_run(monitor.run_path)
    for name in DATASETS:
        loss = [value for value in run.column(f"dataset/{name}/loss") if value == value]
        print(f"{name}: loss {loss[-1]:.3f}")
    flop = {round(value / 1e6, 1) for value in run.column("perf/model_flop")[3:] if value == value}
    print(f"MFLOP per step, with images and without: {sorted(flop)}")


if __name__ == "__main__":
    main()

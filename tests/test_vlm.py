"""Models that see: the vision tower is counted, image sizes are respected, and text-only batches come in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flopmeter import TrainingMonitor, count_flops, load_run

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "flops_profile_freq": 0}}
IMAGE, VOCABULARY, ROWS, LENGTH = 1, 320, 2, 48
HIDDEN, KEY_VALUE, INNER, VISION, VISION_INNER = 64, 32, 96, 48, 96
PATCH_VALUES = 3 * 2 * 14 * 14
TEXT = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN_TEXT = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}

Grids = list[tuple[int, int, int]]
BOTH_SIZES: Grids = [(1, 8, 8), (1, 4, 8)]
OTHER_SIZES: Grids = [(1, 4, 4), (1, 12, 4)]


def qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": VISION, "hidden_size": HIDDEN, "num_heads": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=QWEN_TEXT, vision_config=vision, image_token_id=IMAGE)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    vision = {
        "depth": 2, "hidden_size": VISION, "intermediate_size": VISION_INNER, "num_heads": 4,
        "out_hidden_size": HIDDEN, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=vision, image_token_id=IMAGE)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=VISION, intermediate_size=VISION_INNER, num_hidden_layers=2, num_attention_heads=4,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def text_batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def qwen_batch(grids: Grids) -> dict[str, torch.Tensor]:
    batch, sizes = text_batch(), torch.tensor(grids)
    for row, (_, height, width) in enumerate(grids):
        batch["input_ids"][row, 2 : 2 + height * width // 4] = IMAGE
    pixels = torch.randn(int(sizes.prod(1).sum()), PATCH_VALUES, generator=torch.Generator().manual_seed(0))
    kinds = (batch["input_ids"] == IMAGE).int()
    return {**batch, "pixel_values": pixels, "image_grid_thw": sizes, "mm_token_type_ids": kinds}


def llava_batch() -> dict[str, torch.Tensor]:
    batch = text_batch()
    batch["input_ids"][:, 2:6] = IMAGE  # an image of 28 x 28 is four patches
    return {**batch, "pixel_values": torch.randn(ROWS, 3, 28, 28, generator=torch.Generator().manual_seed(0))}


def train(folder: Path, model: Any, batches: list[dict[str, torch.Tensor]], num_steps: int) -> list[float]:
    """Model FLOPs of each step. The fourth step is the one that is observed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with TrainingMonitor(folder, CONFIG, model=model, optimizer=optimizer) as monitor:
        for step in range(num_steps):
            model(**batches[step % len(batches)]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step)
    return list(load_run(folder).column("perf/model_flop"))


def text_flop() -> int:
    per_token = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * INNER + HIDDEN * VOCABULARY
    return 3 * ROWS * (2 * per_token * LENGTH + 2 * 2 * HIDDEN * LENGTH * (LENGTH + 1) // 2)


def qwen2_vision_flop(grids: Grids) -> int:
    """By hand: patches attend within their image; four of them are merged into one token; pixels need no gradient."""
    patches = [height * width for _, height, width in grids]
    embedding = 2 * 2 * sum(patches) * PATCH_VALUES * VISION
    weights = 3 * VISION * VISION + VISION * VISION + 2 * VISION * VISION_INNER
    block = 3 * (2 * sum(patches) * weights + 2 * 2 * VISION * sum(n * n for n in patches))
    merger = 3 * 2 * sum(patches) // 4 * ((4 * VISION) ** 2 + 4 * VISION * HIDDEN)
    return embedding + block + merger


def test_the_vision_tower_of_qwen2_vl_is_counted_by_its_grids(tmp_path: Path) -> None:
    torch.manual_seed(0)
    flop = train(tmp_path, qwen2_vl(), [qwen_batch(BOTH_SIZES), text_batch(), qwen_batch(OTHER_SIZES)], 9)
    by_hand = [text_flop() + qwen2_vision_flop(BOTH_SIZES), text_flop(), text_flop() + qwen2_vision_flop(OTHER_SIZES)]
    assert flop[3:] == pytest.approx(by_hand * 2)


MODELS: dict[str, tuple[Callable[[], Any], list[dict[str, torch.Tensor]]]] = {
    "qwen2_vl": (qwen2_vl, [qwen_batch(BOTH_SIZES), qwen_batch(OTHER_SIZES)]),
    "qwen2_5_vl": (qwen2_5_vl, [qwen_batch(BOTH_SIZES), qwen_batch(OTHER_SIZES)]),
    "llava": (llava, [llava_batch()]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_step_has_the_flop_of_its_own_batch(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    make, images = MODELS[name]
    model, batches = make(), [images[0], images[-1], text_batch(), images[0], text_batch(32)]
    expected = [count_flops(model, batch).model_flop for batch in batches]
    flop = train(tmp_path, model, batches, 2 * len(batches))
    # The fourth step is observed; what comes before it is estimated, for LLaVA less well (see below).
    first = 3 if name == "llava" else 0
    assert flop[first:] == pytest.approx((expected * 2)[first:], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_images_count_before_any_step_with_images_was_observed(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    make, images = MODELS[name]
    model = make()
    vision = count_flops(model, images[0]).model_flop - count_flops(model, text_batch()).model_flop
    flop = train(tmp_path, model, [text_batch()] * 4 + images[:1], 10)
    assert flop[3] == count_flops(model, text_batch()).model_flop
    # From the module tree, which does not know that LLaVA takes the features of the last layer but one.
    assert flop[-1] - flop[3] == pytest.approx(vision, rel=0.35 if name == "llava" else 1e-3)


def test_frozen_towers_need_no_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qwen2_vl()
    model.model.visual.requires_grad_(False)
    flop = train(tmp_path, model, [text_batch(), qwen_batch(BOTH_SIZES)], 8)
    patches = [height * width for _, height, width in BOTH_SIZES]
    weights = PATCH_VALUES * VISION + 4 * VISION * VISION + 2 * VISION * VISION_INNER
    merger = 2 * sum(patches) // 4 * ((4 * VISION) ** 2 + 4 * VISION * HIDDEN)
    forward = 2 * sum(patches) * weights + 2 * 2 * VISION * sum(n * n for n in patches) + merger
    assert flop[-1] - flop[-2] == pytest.approx(forward)


def test_a_trainer_mixes_images_and_text(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from flopmeter.integrations.transformers import FlopmeterCallback

    torch.manual_seed(0)
    model, batches = qwen2_5_vl(), [qwen_batch(BOTH_SIZES), text_batch()]
    given: list[int] = []

    def collate(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        given.append(int(samples[0]["index"] % 3 > 0))
        return batches[given[-1]]

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=1, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data: Any = [{"index": index} for index in range(8)]
    callbacks: Any = [FlopmeterCallback(config=CONFIG)]
    transformers.Trainer(model, args, train_dataset=data, data_collator=collate, callbacks=callbacks).train()
    expected = [count_flops(model, batch).model_flop for batch in batches]
    flop = list(load_run(tmp_path).column("perf/model_flop"))
    assert flop[3:] == pytest.approx([expected[kind] for kind in given[3:8]], rel=1e-3)

"""Which public programs run, how, on what data, and what is true of them? The recipes of `wild.py`.

An edit names a place by a pattern and says what stands there instead; it holds nothing of the program but the names
that find the place. `right` are the findings that a reader who knows the truth accepts as the first one. From a
reading they follow by rule, so that no wish comes in: of what is not matrix products, the largest kind of work names
the finding (loader: cpu_preprocessing; other operators: memory_bound; update: optimizer_heavy; Python: own_code),
together with any kind that has 0.7 of its share; from 15 to 25 % of the step `healthy` is right, too, and below it
alone. Where Python or other operators come first, and half of a step's CPU time is 7.5 us for each event, kernel_launch
is right as well. A cause that was taken out is right from +15 % on.
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["LM", "fine-tuning", "CNN", "ViT", "GAN/diffusion", "RL", "GNN/sequence", "framework/DDP"]


class PlaceError(Exception):
    """An edit does not find its place."""


@dataclass(frozen=True)
class Edit:
    """A change at one place of a program."""

    file: str
    """Path below the copied folder."""
    pattern: str
    """Regular expression that finds the place; without one the text is put at the end."""
    text: str
    """What stands there instead."""

    def apply(self, program: Path) -> None:
        """Change the file; a pattern that finds nothing means that the recipe is of another version of the program."""
        path = program / self.file
        changed, num = re.subn(self.pattern, self.text, path.read_text("utf-8"), flags=re.MULTILINE)
        if not num:
            raise PlaceError(f"{self.file} has no {self.pattern!r}: the recipe is of another version")
        path.write_text(changed, encoding="utf-8")


@dataclass(frozen=True)
class Variant:
    """What is done to a program beside what every run needs."""

    edits: tuple[Edit, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to run one program, and what is true of it."""

    name: str
    kind: Kind
    repository: str
    """Folder of the checked-out copy."""
    script: str
    """Below `folder`."""
    folder: str = "."
    """Where it runs, below what is copied."""
    copied: str = "."
    """The part of the repository that it needs."""
    on_path: tuple[str, ...] = ()
    """Folders below what is copied that join PYTHONPATH."""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] | None = None
    edits: tuple[Edit, ...] = ()
    """What every run needs: sizes, the number of steps, a device."""
    data: Callable[[Path], None] | None = None
    """Makes the data below what was copied; the same at every call."""
    ranks: int = 1
    """More than one: under torchrun."""
    losses: str
    """Finds what must be the same with and without us."""
    cause: Variant = Variant()
    """A fault that the recipe puts in; the twin runs without it."""
    removal: Variant = Variant()
    """Takes out a cause that is the program's own; done to the twin only."""
    clock: Literal["cpu", "wall"] = "cpu"
    """What the gain is measured by: CPU time of the process, or wall time where the cause is a wait or a worker."""
    read_steps: int = 12
    """Optimizer steps of a reading; more where they are short or a cycle of the program takes many."""
    flop_per_step: float | None = None
    """Model FLOPs of an ordinary step, by hand."""
    truth: str = ""
    """What an independent reading or the gain without the cause says."""
    right: frozenset[str] = frozenset()
    """First findings that agree with it; empty: not judged."""
    chosen: Literal["before", "after"] = "before"
    """Whether before or after the rules were frozen."""

    @property
    def has_fault(self) -> bool:
        """Whether the recipe put a fault in."""
        return self.cause != Variant()

    @property
    def has_twin(self) -> bool:
        """Whether there is something to take out."""
        return self.has_fault or self.removal != Variant()

    def how_to_run(self) -> list[Any]:
        """All but what is said about the result: a run is repeated when this changes."""
        said = {"losses", "truth", "right", "chosen", "kind", "clock", "read_steps", "flop_per_step"}
        return [getattr(self, one.name) for one in fields(self) if one.name not in said | {"data"}]


# Data. Everything is drawn from a fixed seed.

WORDS = [
    f"{a}{b}{c}" for a in ("ba", "ke", "lo", "mi", "ru", "ta") for b in ("n", "s", "th", "r") for c in ("a", "en", "o")
]


def sentence(draw: random.Random, shortest: int, longest: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(shortest, longest)))


def char_tokens(program: Path) -> None:
    """nanoGPT's binary files: 65 characters."""
    folder = program / "data" / "shakespeare_char"
    draw = np.random.default_rng(0)
    for name in ("train", "val"):
        draw.integers(0, 65, 200_000, dtype=np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "stoi": {}, "itos": {}}))


def text_file(name: str, lines: int = 4000, shortest: int = 4, longest: int = 24) -> Callable[[Path], None]:
    def make(program: Path) -> None:
        draw = random.Random(0)
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text("\n".join(sentence(draw, shortest, longest) for _ in range(lines)) + "\n")

    return make


def digits(folder: str, num: int = 12_000, num_test: int = 1000) -> Callable[[Path], None]:
    """MNIST's own files, of noise."""

    def make(program: Path) -> None:
        raw = program / folder / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        for name, count in (("train", num), ("t10k", num_test)):
            pictures = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = draw.integers(0, 10, count, dtype=np.uint8)
            for kind, magic, shape, body in (
                ("images-idx3", 2051, (count, 28, 28), pictures), ("labels-idx1", 2049, (count,), labels),
            ):  # fmt: skip
                head = b"".join(size.to_bytes(4, "big") for size in (magic, *shape))
                (raw / f"{name}-{kind}-ubyte").write_bytes(head + body.tobytes())
                (raw / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(b""))

    return make


def cifar(folder: str, num: int = 3000, classes: int = 10) -> Callable[[Path], None]:
    """A module `made` whose CIFAR is noise in memory, with the file format's attributes left out."""

    def make(program: Path) -> None:
        (program / folder / "made.py").write_text(
            "import numpy\nfrom PIL import Image\nfrom torch.utils.data import Dataset\n\n\n"
            "class Cifar(Dataset):\n"
            "    def __init__(self, root=None, train=True, download=False, transform=None):\n"
            f"        draw, num = numpy.random.default_rng(0), {num} if train else 200\n"
            "        self.data = draw.integers(0, 256, (num, 32, 32, 3), dtype=numpy.uint8)\n"
            f"        self.targets = draw.integers(0, {classes}, num).tolist()\n"
            "        self.transform = transform\n\n"
            "    def __len__(self):\n        return len(self.data)\n\n"
            "    def __getitem__(self, at):\n"
            "        return self.transform(Image.fromarray(self.data[at])), self.targets[at]\n"
        )

    return make


def pictures(folder: str, per_class: int, size: int, classes: int = 4) -> Callable[[Path], None]:
    """JPEG files by class, for training and validation."""

    def make(program: Path) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        for part, num in (("train", per_class), ("val", 8)):
            for label in range(classes):
                place = program / folder / part / f"class{label}"
                place.mkdir(parents=True)
                for at in range(num):
                    small = draw.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
                    Image.fromarray(small).resize((size, size)).save(place / f"{at}.jpg", quality=90)

    return make


def bsd(program: Path) -> None:
    """BSDS300's folders, of noise."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, num in (("train", 90), ("test", 4)):
        place = program / "super_resolution" / "dataset" / "BSDS300" / "images" / part
        place.mkdir(parents=True)
        for at in range(num):
            small = draw.integers(0, 256, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(small).resize((481, 321)).save(place / f"{at}.jpg", quality=90)


def masks(program: Path) -> None:
    """Pytorch-UNet's pairs of pictures and masks."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for at in range(100):
        picture = draw.integers(0, 256, (96, 96, 3), dtype=np.uint8)
        Image.fromarray(picture).save(program / "data" / "imgs" / f"{at}.png")
        Image.fromarray((picture[:, :, 0] > 128).astype(np.uint8) * 255).save(program / "data" / "masks" / f"{at}.png")


def citations(folder: str, num: int = 2708, words: int = 1433) -> Callable[[Path], None]:
    """A graph of the size of Cora, in its file format."""

    def make(program: Path) -> None:
        draw = np.random.default_rng(0)
        place = program / folder
        place.mkdir(parents=True, exist_ok=True)
        labels = draw.integers(0, 7, num)
        rows = ((draw.random(words) < 0.02).astype(int) for _ in range(num))
        lines = (f"{at}\t{chr(9).join(map(str, row))}\tclass{labels[at]}" for at, row in enumerate(rows))
        (place / "cora.content").write_text("\n".join(lines) + "\n")
        edges = draw.integers(0, num, (5429, 2))
        (place / "cora.cites").write_text("\n".join(f"{a}\t{b}" for a, b in edges) + "\n")

    return make


def waves(program: Path) -> None:
    import torch

    phase = np.random.default_rng(2).integers(-80, 80, 32)[:, None]
    torch.save(np.sin((np.arange(200) + phase) / 20.0), program / "traindata.pt")


def tokenizer(folder: Path, *, chat: bool = False) -> None:
    """A tokenizer of words, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
    built = Tokenizer(models.WordLevel({word: at for at, word in enumerate(special + WORDS)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=built, model_max_length=512, **{f"{n}_token": s for n, s in zip(names, special, strict=True)}
    )
    if chat:
        fast.chat_template = (
            "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
        )
    fast.save_pretrained(folder)


BERT = {
    "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768,
    "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip


def bert(program: Path) -> None:
    """A small BERT with random weights, and pairs of sentences with a label."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**BERT)).save_pretrained(program / "model")
    tokenizer(program / "model")
    draw = random.Random(0)
    for name, num in (("train", 720), ("validation", 64)):
        rows = (
            {
                "sentence1": sentence(draw, 4, 12),
                "sentence2": sentence(draw, 4, 40),
                "label": draw.randint(0, 1),
                "idx": at,
            }
            for at in range(num)
        )
        (program / f"{name}.json").write_text("\n".join(map(json.dumps, rows)) + "\n")


def llama(program: Path, *, chat: bool = True) -> None:
    """A small Llama with random weights, lines of text, and data for TRL."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=5, eos_token_id=6,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(program / "model")
    tokenizer(program / "model", chat=chat)
    draw = random.Random(0)
    (program / "text.txt").write_text("\n".join(sentence(draw, 40, 60) for _ in range(3000)) + "\n")

    def talk(longest: int) -> dict[str, Any]:
        asked, answers = sentence(draw, 4, 12), [sentence(draw, 8, longest) for _ in range(2)]
        ask = [{"role": "user", "content": asked}]
        chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
        return {"prompt": ask, "chosen": chosen, "rejected": rejected}

    for folder, make in (
        ("preferences", lambda: talk(60)),
        ("chats", lambda: {"messages": (row := talk(60))["prompt"] + row["chosen"]}),
    ):
        (program / folder).mkdir()
        (program / folder / "train.jsonl").write_text("\n".join(json.dumps(make()) for _ in range(800)) + "\n")


def pretraining_text(program: Path) -> None:
    draw = random.Random(0)
    rows = (json.dumps({"text": sentence(draw, 100, 140)}) for _ in range(360))
    (program / "dataset" / "made.jsonl").write_text("\n".join(rows) + "\n")


def word_windows(program: Path) -> None:
    """A module `made` in the place of a text that would be downloaded: windows of 35 tokens of 2,000 kinds."""
    (program / "made.py").write_text(
        "import torch\nfrom torch.utils.data import Dataset\n\n\n"
        "class Words(Dataset):\n    vocab_size = 2000\n\n"
        "    def __init__(self):\n"
        "        self.ids = torch.randint(0, 2000, (1280, 36), generator=torch.Generator().manual_seed(0))\n\n"
        "    def __len__(self):\n        return len(self.ids)\n\n"
        "    def __getitem__(self, at):\n        return self.ids[at, :-1], self.ids[at, 1:]\n"
    )


# FLOPs by hand: a multiplication with an addition is 2, training is three forward passes.


def gpt_flop(layers: int, width: int, vocabulary: int, length: int, batch: int, *, mlp: int = 0) -> float:
    """A decoder: matrix products of every token, and causal pairs in attention; embeddings are looked up."""
    per_token = 2 * (layers * (4 * width**2 + 2 * width * (mlp or 4 * width)) + width * vocabulary)
    pairs = layers * 4 * width * length * (length + 1) / 2
    return 3 * batch * (length * per_token + pairs)


def mnist_flop(batch: int) -> float:
    """Two convolutions and two linear layers; the first one's input needs no gradient."""
    first = 2 * 9 * 32 * 26**2
    return batch * (3 * (first + 2 * 9 * 32 * 64 * 24**2 + 2 * 9216 * 128 + 2 * 128 * 10) - first)


OWN = Recipe(
    name="own_gpt_fp64", kind="LM", repository="tests/programs", script="mini_gpt.py", copied=".",
    edits=(
        Edit("mini_gpt.py", r"^VOCABULARY, .*$", "VOCABULARY, WIDTH, HEADS, LAYERS = 64, 256, 4, 2"),
        Edit("mini_gpt.py", r"^BATCH, .*$", "BATCH, LENGTH, ACCUMULATE, STEPS = 4, 64, 1, 30"),
    ),
    cause=Variant((Edit("mini_gpt.py", r"torch\.manual_seed\(0\)", r"\g<0>; torch.set_default_dtype(torch.float64)"),)),
    losses=r"final loss (\S+)", flop_per_step=gpt_flop(2, 256, 64, 64, 4), right=frozenset({"fp32_matmul"}),
    truth="float64: a program of our own, in which every number has twice the bytes that it needs",
)  # fmt: skip


def seeded(file: str) -> Edit:
    """For a program that draws its weights and batches without a seed."""
    return Edit(file, r"^import torch$", r"\g<0>; torch.manual_seed(0); __import__('numpy').random.seed(0)")


NANOGPT = (
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--dtype=float32", "--dropout=0.0",
    "--n_layer=4", "--n_head=4", "--n_embd=256", "--block_size=128", "--batch_size=4", "--log_interval=5",
)  # fmt: skip
NANOGPT_LOSSES = r"loss (\d+\.\d+)"
GLUE = (
    "--model_name_or_path", "model", "--train_file", "train.json", "--validation_file", "validation.json", "--do_train",
    "--output_dir", "out", "--per_device_train_batch_size", "16", "--max_steps", "45", "--max_seq_length", "128",
    "--logging_steps", "10", "--report_to", "none", "--save_strategy", "no", "--use_cpu", "True",
)  # fmt: skip
TRL = (
    "--model_name_or_path", "model", "--max_steps", "36", "--logging_steps", "5", "--report_to", "none", "--use_cpu",
    "True", "--output_dir", "out", "--save_strategy", "no", "--per_device_train_batch_size", "4", "--bf16", "False",
    "--dtype", "float32", "--eval_strategy", "no",
)  # fmt: skip
HF_LOSSES = r"'loss': '?([\d.e+-]+)"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="nanogpt",
        truth="matrix products 83 % of a step, other operators 11 %, update 5 %, Python 1 %",
        right=frozenset({"healthy"}),
        kind="LM", repository="nanoGPT", script="train.py",
        data=char_tokens,
        arguments=(*NANOGPT, "--max_iters=45", "--eval_interval=100000", "--eval_iters=1"),
        losses=NANOGPT_LOSSES,
        flop_per_step=gpt_flop(4, 256, 65, 128, 4),
    ),
    Recipe(
        name="nanogpt_eager_attention",
        truth="attention spelled out over 512 tokens: +93 % without, by CPU time",
        right=frozenset({"eager_attention"}),
        kind="LM", repository="nanoGPT", script="train.py",
        data=char_tokens,
        arguments=(
            *NANOGPT, "--max_iters=45", "--eval_interval=100000", "--eval_iters=1", "--block_size=512",
            "--batch_size=1", "--n_layer=3", "--n_head=8", "--n_embd=128",
        ),
        cause=Variant((Edit("model.py", r"hasattr\(torch\.nn\.functional, .*?\)", "False"),)),
        losses=NANOGPT_LOSSES,
        flop_per_step=gpt_flop(3, 128, 65, 512, 1),
    ),
    Recipe(
        name="nanogpt_eval_often",
        truth="evaluation of 16 batches every 10 steps: +56 % without it",
        right=frozenset({"eval_pause"}),
        kind="LM", repository="nanoGPT", script="train.py",
        data=char_tokens,
        arguments=(*NANOGPT, "--max_iters=45"),
        cause=Variant(arguments=("--eval_interval=10", "--eval_iters=8")),
        removal=Variant(arguments=("--eval_interval=100000", "--eval_iters=1")),
        clock="cpu",
        losses=r"iter \d+: loss (\d+\.\d+)",
        flop_per_step=gpt_flop(4, 256, 65, 128, 4),
    ),
    Recipe(
        name="nanogpt_checkpoints",
        truth="a checkpoint and an evaluation of 2 batches every second step: +88 % without",
        right=frozenset({"checkpoint_pause", "eval_pause"}),
        kind="LM", repository="nanoGPT", script="train.py",
        data=char_tokens,
        arguments=(*NANOGPT, "--max_iters=45", "--eval_iters=1", "--always_save_checkpoint=True"),
        clock="wall",
        cause=Variant(arguments=("--eval_interval=2",)),
        removal=Variant(arguments=("--eval_interval=100000",)),
        losses=r"iter \d+: loss (\d+\.\d+)",
    ),
    Recipe(
        name="mingpt_chargpt",
        truth="matrix products 55 % of a step, other operators (dropout, the GELU spelled out) 37 %",
        right=frozenset({"memory_bound"}),
        kind="LM", repository="minGPT", script="chargpt.py",
        folder="projects/chargpt",
        on_path=(".",),
        data=text_file("projects/chargpt/input.txt", 3000),
        arguments=(
            "--model.model_type=gpt-mini", "--trainer.max_iters=45", "--trainer.batch_size=4",
            "--trainer.num_workers=0", "--trainer.device=cpu",
        ),
        edits=(
            Edit("projects/chargpt/chargpt.py", r'"O God, O God!"', '"ba"'),
            Edit("projects/chargpt/chargpt.py", r"generate\(x, 500", "generate(x, 8"),
        ),
        losses=r"train loss (\S+)",
        flop_per_step=gpt_flop(6, 192, 21, 128, 4),
    ),
    Recipe(
        name="makemore_transformer",
        truth="tiny operators 47 % of a step: 4,827 events in 27 ms of CPU; Python 20 %, update 13 %",
        right=frozenset({"memory_bound", "kernel_launch"}),
        kind="LM", repository="makemore", script="makemore.py",
        data=text_file("made.txt", 3000, 1, 1),
        arguments=("-i", "made.txt", "-n", "0", "--max-steps", "240"),
        losses=r"\| loss (\d+\.\d+)",
    ),
    Recipe(
        name="makemore_rnn",
        truth="tiny operators 65 % of a step: 2,996 events in 5 ms of CPU; matrix products 15 %",
        right=frozenset({"kernel_launch", "memory_bound"}),
        kind="LM", repository="makemore", script="makemore.py",
        data=text_file("made.txt", 3000, 3, 4),
        arguments=("-i", "made.txt", "-n", "0", "--max-steps", "160", "--type", "rnn"),
        losses=r"\| loss (\d+\.\d+)",
    ),
    Recipe(
        name="minimind_pretrain",
        truth="matrix products 70 % of a step, other operators 20 %, Python 5 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="LM", repository="minimind", script="train_pretrain.py",
        folder="trainer",
        data=pretraining_text,
        arguments=(
            "--data_path", "../dataset/made.jsonl", "--device", "cpu", "--epochs", "1", "--batch_size", "4",
            "--dtype", "bfloat16", "--num_workers", "0", "--accumulation_steps", "2", "--hidden_size", "128",
            "--num_hidden_layers", "2", "--max_seq_len", "128", "--log_interval", "10", "--save_interval", "100000",
        ),
        losses=r"loss: ?(\d+\.\d+)",
    ),
    Recipe(
        name="hf_run_clm",
        truth="matrix products 79 % of a step, other operators 15 %, Python 5 %",
        right=frozenset({"healthy"}),
        kind="fine-tuning", repository="transformers", copied="examples/pytorch/language-modeling", script="run_clm.py",
        data=llama,
        arguments=(
            "--model_name_or_path", "model", "--train_file", "text.txt", "--do_train", "--output_dir", "out",
            "--per_device_train_batch_size", "4", "--block_size", "128", "--max_steps", "45", "--logging_steps",
            "10", "--report_to", "none", "--save_strategy", "no", "--use_cpu", "True",
        ),
        losses=HF_LOSSES,
        flop_per_step=3
        * 4
        * (128 * 2 * (4 * (2 * 256**2 + 2 * 256 * 128 + 3 * 256 * 768) + 256 * 128) + 4 * 4 * 256 * 128 * 129 / 2),
    ),
    Recipe(
        name="hf_run_glue_padded",
        truth="sentence pairs padded to 128: +174 % when padded to the longest of a batch, by CPU time",
        right=frozenset({"padding_waste"}),
        edits=(Edit("run_glue.py", r"evaluate\.load\(.*\)", "None"),),
        kind="fine-tuning", repository="transformers", script="run_glue.py",
        copied="examples/pytorch/text-classification",
        data=bert,
        arguments=GLUE,
        losses=HF_LOSSES,
        cause=Variant(arguments=("--pad_to_max_length", "True")),
        removal=Variant(arguments=("--pad_to_max_length", "False")),
    ),
    Recipe(
        name="trl_sft",
        truth="checkpointing: +17 % without it; by the lengths of the data a quarter of the tokens is padding",
        right=frozenset({"recompute", "padding_waste"}),
        kind="fine-tuning", repository="trl", copied="trl/scripts", script="sft.py",
        data=llama,
        arguments=(*TRL, "--dataset_name", "chats"),
        losses=HF_LOSSES,
        removal=Variant(arguments=("--gradient_checkpointing", "False")),
    ),
    Recipe(
        name="trl_dpo",
        truth="checkpointing: +23 % without it; by the lengths of the data 30 % of the tokens are padding",
        right=frozenset({"recompute", "padding_waste"}),
        kind="fine-tuning", repository="trl", copied="trl/scripts", script="dpo.py",
        data=llama,
        arguments=(*TRL, "--dataset_name", "preferences"),
        losses=HF_LOSSES,
        removal=Variant(arguments=("--gradient_checkpointing", "False")),
    ),
    Recipe(
        name="pytorch_cifar",
        truth="matrix products 47 % of a step, other operators (batch norm) 43 %, Python 5 %",
        right=frozenset({"memory_bound"}),
        kind="CNN", repository="pytorch-cifar", script="main.py",
        data=cifar(".", 360),
        edits=(
            Edit("main.py", r"torchvision\.datasets\.CIFAR10", '__import__("made").Cifar'),
            seeded("main.py"),
            Edit("utils.py", r"os\.popen\(.*\)\.read\(\)", "'24 80'"),
            Edit("main.py", r"^net = SimpleDLA\(\)", "net = MobileNetV2()"),
            Edit("main.py", r"batch_size=128", "batch_size=8"),
            Edit("main.py", r"start_epoch\+200", "start_epoch+1"),
            Edit("main.py", r"^\s+progress_bar\(.*\n.*\)$", "        print('loss', loss.item())"),
        ),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="pytorch_cifar_gc",
        truth="a full garbage collection in every step: +320 % without, by CPU time",
        right=frozenset({"gc_pause"}),
        kind="CNN", repository="pytorch-cifar", script="main.py",
        data=cifar(".", 480),
        edits=(
            Edit("main.py", r"torchvision\.datasets\.CIFAR10", '__import__("made").Cifar'),
            seeded("main.py"),
            Edit("utils.py", r"os\.popen\(.*\)\.read\(\)", "'24 80'"),
            Edit("main.py", r"^net = SimpleDLA\(\)", "net = ResNet18()"),
            Edit("models/resnet.py", r"\b64\b", "16"),
            Edit("models/resnet.py", r"\b128\b", "32"),
            Edit("models/resnet.py", r"\b256\b", "64"),
            Edit("models/resnet.py", r"\b512\b", "128"),
            Edit("main.py", r"batch_size=128", "batch_size=8"),
            Edit("main.py", r"start_epoch\+200", "start_epoch+1"),
            Edit("main.py", r"^\s+progress_bar\(.*\n.*\)$", "        print('loss', loss.item())"),
        ),
        cause=Variant((Edit("main.py", r"^(\s+)optimizer\.step\(\)", r"\g<0>\n\1__import__('gc').collect()"),)),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="examples_mnist",
        truth="matrix products 62 % of a step, other operators 22 %, loader 9 %, update 6 %",
        right=frozenset({"healthy", "memory_bound"}),
        flop_per_step=mnist_flop(64),
        kind="CNN", repository="examples", script="main.py",
        folder="mnist",
        data=digits("data", 3200, 200),
        copied=".",
        arguments=("--epochs", "1", "--no-accel"),
        losses=r"Loss: (\d+\.\d+)",
    ),
    Recipe(
        name="examples_mnist_slow_disk",
        truth="a sleep of 4 ms a picture: +124 % without; the CPU time stays as it is",
        right=frozenset({"data_stall"}),
        flop_per_step=mnist_flop(64),
        kind="CNN", repository="examples", script="main.py",
        folder="mnist",
        data=digits("data", 3200, 200),
        arguments=("--epochs", "1", "--no-accel"),
        losses=r"Loss: (\d+\.\d+)",
        clock="wall",
        cause=Variant(
            (
                Edit(
                    "mnist/main.py",
                    r"transforms\.ToTensor\(\),",
                    r"transforms.Lambda(lambda x: [__import__('time').sleep(0.004), x][1]), \g<0>",
                ),
            )
        ),
    ),
    Recipe(
        name="examples_vae",
        truth="the loader decodes in the training thread for 43 % of a step; matrix products 24 %",
        right=frozenset({"cpu_preprocessing"}),
        kind="GAN/diffusion", repository="examples", script="main.py",
        folder="vae",
        data=digits("data", 6400, 200),
        arguments=("--epochs", "1", "--no-accel"),
        losses=r"loss: (\d+\.\d+)|Loss: (\d+\.\d+)",
        # 784-400-(20, 20)-400-784; the first layer's input needs no gradient
        flop_per_step=128 * 2 * (3 * (784 * 400 + 2 * 400 * 20 + 20 * 400 + 400 * 784) - 784 * 400),
        edits=(Edit("vae/main.py", r"save_image\(", "(lambda *_, **__: None)("),),
    ),
    Recipe(
        name="examples_dcgan",
        truth="matrix products 58 % of a step, loader 13 %, other operators 12 %, Python 10 %",
        right=frozenset({"healthy"}),
        kind="GAN/diffusion", repository="examples", script="main.py",
        folder="dcgan",
        arguments=(
            "--dataset", "fake", "--niter", "1", "--batchSize", "8", "--ngf", "16", "--ndf", "16", "--workers", "0",
            "--manualSeed", "1", "--outf", ".", "--imageSize", "64",
        ),
        edits=(
            Edit("dcgan/main.py", r"FakeData\(", r"\g<0>size=480, "),
            Edit("dcgan/main.py", r"vutils\.save_image\(", "(lambda *_, **__: None)("),
        ),
        losses=r"Loss_D: (\S+) Loss_G: (\S+)",
    ),
    Recipe(
        name="gan_wgan_gp",
        truth="matrix products 50 % of a step, loader in the training thread 24 %, other operators 14 %",
        right=frozenset({"healthy", "cpu_preprocessing"}),
        edits=(seeded("implementations/wgan_gp/wgan_gp.py"),),
        kind="GAN/diffusion", repository="PyTorch-GAN", script="wgan_gp.py",
        folder="implementations/wgan_gp",
        data=digits("data/mnist", 3200, 64),
        arguments=("--n_epochs", "3", "--n_cpu", "0", "--sample_interval", "100000"),
        losses=r"loss: (\S+)\]",
    ),
    Recipe(
        name="unet",
        truth="matrix products 43 % of a step, update 23 % (RMSprop, foreach), other operators 19 %, loader 7 %",
        right=frozenset({"healthy", "memory_bound", "optimizer_heavy"}),
        kind="CNN", repository="Pytorch-UNet", script="train.py",
        data=masks,
        arguments=("--epochs", "1", "--batch-size", "1", "--scale", "1.0"),
        edits=(
            Edit("train.py", r"os\.cpu_count\(\)", "1"),
            Edit("train.py", r"pin_memory=True", "pin_memory=False"),
            Edit("train.py", r"^import wandb$", "wandb = __import__('unittest.mock').mock.MagicMock()"),
            seeded("train.py"),
            Edit("unet/unet_model.py", r"\b(64|128|256|512|1024)\b", r"(\1 // 4)"),
        ),
        losses=r"loss \(batch\)=([\d.]+)",
    ),
    Recipe(
        name="timm_resnet10t",
        truth="matrix products 69 % of a step, other operators 20 %, update 6 %, loader 3 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="ViT", repository="pytorch-image-models", script="train.py",
        data=pictures("pictures", 80, 256),
        arguments=(
            "--data-dir", "pictures", "--model", "resnet10t", "--num-classes", "4", "--batch-size", "8", "--epochs",
            "1", "--workers", "1", "--input-size", "3", "96", "96", "--device", "cpu", "--log-interval", "10",
            "--no-prefetcher", "--sched-on-updates", "--warmup-epochs", "0",
        ),
        losses=r"Loss: +(\S+)",
    ),
    Recipe(
        name="timm_vit_tiny",
        truth="matrix products 69 % of a step, other operators 20 %, update 4 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="ViT", repository="pytorch-image-models", script="train.py",
        data=pictures("pictures", 80, 96),
        arguments=(
            "--data-dir", "pictures", "--model", "vit_tiny_patch16_224", "--num-classes", "4", "--batch-size", "8",
            "--epochs", "1", "--workers", "1", "--device", "cpu", "--log-interval", "10", "--no-prefetcher",
            "--no-aug", "--warmup-epochs", "0", "--img-size", "96", "--model-kwargs", "img_size=96",
        ),
        losses=r"Loss: +(\S+)",
    ),
    Recipe(
        name="vit_pytorch_decorr",
        truth="matrix products 47 % of a step, other operators 37 %, Python 8 %, update 7 %",
        right=frozenset({"memory_bound"}),
        kind="ViT", repository="vit-pytorch", script="train_vit_decorr.py",
        data=cifar(".", 360, 100),
        edits=(
            Edit(
                "train_vit_decorr.py",
                r"from torchvision\.datasets import CIFAR100",
                "from made import Cifar as CIFAR100",
            ),
            Edit("train_vit_decorr.py", r"^EPOCHS = .*", "EPOCHS = 1"),
            seeded("train_vit_decorr.py"),
            Edit("train_vit_decorr.py", r"^BATCH_SIZE = .*", "BATCH_SIZE = 8"),
        ),
        losses=r"loss: (\d+\.\d+)",
    ),
    Recipe(
        name="cleanrl_ppo",
        truth="Python 45 %, 3,263 events in 6.8 ms of CPU; rollouts are half of the wall time",
        right=frozenset({"own_code", "kernel_launch", "side_passes"}),
        kind="RL", repository="cleanrl", copied="cleanrl", script="ppo.py",
        read_steps=32,
        arguments=("--total-timesteps", "12000", "--no-cuda"),
        edits=(
            Edit(
                "ppo.py",
                r"^(\s+)writer\.add_scalar\(\"losses/value_loss\", (.*), global_step\)",
                r"\g<0>; print('loss', \2)",
            ),
        ),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="cleanrl_dqn",
        truth="Python 62 % of a step, tiny operators 29 %: 590 events in 2.7 ms of CPU",
        right=frozenset({"own_code", "kernel_launch"}),
        kind="RL", repository="cleanrl", script="cleanrl/dqn.py",
        on_path=(".",),
        arguments=("--total-timesteps", "14000", "--learning-starts", "2000", "--no-cuda", "--buffer-size", "5000"),
        edits=(
            Edit(
                "cleanrl/dqn.py",
                r"^(\s+)writer\.add_scalar\(\"losses/td_loss\", (.*), global_step\)",
                r"\g<0>; print('loss', \2)",
            ),
        ),
        losses=r"\bloss (\S+)",
        # 4-120-84-2, batch of 128; the first layer's input needs no gradient; the target network's pass is no training
        flop_per_step=128 * 2 * (3 * (4 * 120 + 120 * 84 + 84 * 2) - 4 * 120),
    ),
    Recipe(
        name="examples_actor_critic",
        truth="tiny operators 57 % of a step, Python 33 %: 3,738 events in 14 ms of CPU",
        right=frozenset({"memory_bound", "kernel_launch"}),
        kind="RL", repository="examples", script="actor_critic.py",
        folder="reinforcement_learning",
        arguments=("--log-interval", "5"),
        edits=(Edit("reinforcement_learning/actor_critic.py", r"count\(1\)", "range(1, 120)"),),
        losses=r"Average reward: (\S+)",
    ),
    Recipe(
        name="pygcn",
        truth="matrix products 85 % of a step (16 columns wide), other operators 8 %, update 5 %",
        right=frozenset({"healthy"}),
        kind="GNN/sequence", repository="pygcn", script="train.py",
        folder="pygcn",
        on_path=(".",),
        data=citations("data/cora"),
        arguments=("--epochs", "120", "--no-cuda"),
        losses=r"loss_train: (\S+)",
    ),
    Recipe(
        name="examples_gat",
        truth="other operators (dropout and softmax over all pairs) 49 % of a step, matrix products 48 %; looked at "
        "again after a verdict: two evaluations behind every step, +30 % without them, by CPU time",
        right=frozenset({"side_passes", "eval_pause", "memory_bound"}),
        kind="GNN/sequence", repository="examples", script="main.py",
        folder="gat",
        data=citations("gat/cora", 600),
        edits=(
            Edit("gat/main.py", r"idx\[:1200\], idx\[1200:1600\], idx\[1600:\]", "idx[:100], idx[100:200], idx[200:]"),
        ),
        arguments=("--epochs", "36", "--no-accel", "--val-every", "5"),
        removal=Variant((Edit("gat/main.py", r"= test\(model, .*\)", "= 0.0, 0.0"),)),
        losses=r"loss_train: (\S+)",
    ),
    Recipe(
        name="examples_time_sequence",
        truth="float64: +21 % in float32, by CPU time; looked at again after a verdict: with 17.6 times the batch 2.4 "
        "times the samples a CPU second",
        right=frozenset({"fp32_matmul", "kernel_launch"}),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        kind="GNN/sequence", repository="examples", script="train.py",
        folder=".",
        copied="time_sequence_prediction",
        data=waves,
        arguments=("--steps", "24"),
        edits=(
            Edit("train.py", r"plt\.savefig\(.*\)", "pass"),
            Edit("train.py", r"future = 1000", "future = 10"),
            Edit("train.py", r"lr=0\.8", r"\g<0>, max_iter=2"),
        ),
        removal=Variant(
            (
                Edit("train.py", r"torch\.double", "torch.float"),
                Edit("train.py", r"seq\.double\(\)", "seq.float()"),
                Edit("train.py", r"(from_numpy\(.*\))", r"\1.float()"),
            )
        ),
        losses=r"loss: (\S+)",
    ),
    Recipe(
        name="examples_mnist_rnn",
        truth="the loader decodes in the training thread for 65 % of a step; matrix products 20 %",
        right=frozenset({"cpu_preprocessing"}),
        kind="GNN/sequence", repository="examples", script="main.py",
        folder="mnist_rnn",
        data=digits("data", 3200, 200),
        arguments=("--epochs", "1"),
        losses=r"Loss: (\d+\.\d+)",
    ),
    Recipe(
        name="s4",
        truth="other operators (transforms, complex products, a Vandermonde matrix) 91 % of a step",
        right=frozenset({"memory_bound"}),
        edits=(seeded("example.py"), Edit("example.py", r"start_epoch, args\.epochs", "0, 1")),
        kind="GNN/sequence", repository="s4", script="example.py",
        data=digits("data", 440, 32),
        arguments=(
            "--dataset", "mnist", "--num_workers", "0", "--epochs", "1", "--batch_size", "8", "--d_model", "32",
            "--n_layers", "2",
        ),
        losses=r"Loss: (\d+\.\d+)",
    ),
    Recipe(
        name="lightning_fabric_lm",
        truth="matrix products 59 % of a step, other operators (dropout, softmax) 37 %",
        right=frozenset({"memory_bound"}),
        kind="framework/DDP", repository="pytorch-lightning", script="train.py",
        copied="examples/fabric/language_model",
        losses=r"loss (\d+\.\d+)",
        data=word_windows,
        edits=(
            Edit("train.py", r"WikiText2\(\)", '__import__("made").Words()'),
            Edit("train.py", r"max_epochs=20", "max_epochs=1"),
            Edit("train.py", r"\b4000\b", "80"),
            Edit("train.py", r"\b2000\b", "40"),
            Edit("train.py", r"% 200", "% 10"),
        ),
    ),
    Recipe(
        name="lightning_fabric_mnist_ddp",
        truth="matrix products 43 % of a step, other operators 32 %, loader 11 %, update 10 %",
        right=frozenset({"memory_bound"}),
        kind="framework/DDP", repository="pytorch-lightning", script="train_fabric.py",
        copied="examples/fabric/image_classifier",
        losses=r"Loss: (\S+)",
        data=digits("data", 3200, 64),
        ranks=2,
        arguments=("--epochs", "1", "--batch-size", "32"),
        edits=(Edit("train_fabric.py", r"^DATASETS_PATH = .*", 'DATASETS_PATH = "data"'),),
        environment={"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_STRATEGY": "ddp", "LT_ACCELERATOR": "cpu"},
    ),
    Recipe(
        name="accelerate_nlp",
        truth="matrix products 65 % of a step, other operators 23 %; "
        "by the lengths of the data a third of the tokens is padding",
        right=frozenset({"healthy", "memory_bound", "padding_waste"}),
        kind="framework/DDP", repository="accelerate", copied="examples", script="nlp_example.py",
        data=bert,
        arguments=("--cpu",),
        edits=(
            Edit(
                "nlp_example.py",
                r"load_dataset\(.*\)",
                'load_dataset("json", data_files={"train": "train.json", "validation": "validation.json"})',
            ),
            Edit("nlp_example.py", r'"(google-bert/)?bert-base-cased"', '"model"'),
            Edit("nlp_example.py", r'"num_epochs": \d+', '"num_epochs": 1'),
            Edit("nlp_example.py", r"evaluate\.load\(.*\)", "__import__('unittest.mock').mock.MagicMock()"),
            Edit("nlp_example.py", r"^(\s+)accelerator\.backward\(loss\)", r"\g<0>\n\1print('loss', loss.item())"),
        ),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="examples_ddp_minimal",
        truth="the all-reduce of gloo takes 83 % of a step of a linear layer on two ranks",
        right=frozenset({"exposed_communication"}),
        kind="framework/DDP", repository="examples", script="multigpu_torchrun.py",
        copied="distributed/ddp-tutorial-series",
        ranks=2,
        arguments=("4", "100", "--batch_size", "8"),
        edits=(
            Edit("multigpu_torchrun.py", r"torch\.cuda\.set_device\(.*\)", "pass"),
            Edit("multigpu_torchrun.py", r"nccl", "gloo"),
            seeded("multigpu_torchrun.py"),
            Edit("multigpu_torchrun.py", r"\.to\(self\.gpu_id\)", ""),
            Edit("multigpu_torchrun.py", r", device_ids=\[self\.gpu_id\]", ""),
            Edit("multigpu_torchrun.py", r"pin_memory=True", "pin_memory=False"),
            Edit(
                "multigpu_torchrun.py",
                r"^(\s+)loss\.backward\(\)",
                r"\g<0>\n\1if self.gpu_id == 0: print('loss', loss.item())",
            ),
        ),
        losses=r"loss (\S+)",
    ),
    # Chosen after the rules were frozen.
    Recipe(
        name="makemore_mlp",
        truth="tiny operators 28 % of a step, loader in the training thread 22 %, matrix products 18 %, update 17 %: "
        "1,338 events in 1.6 ms of CPU",
        right=frozenset({"cpu_preprocessing", "kernel_launch", "memory_bound"}),
        read_steps=60,
        kind="LM", repository="makemore", script="makemore.py", chosen="after",
        data=text_file("made.txt", 3000, 1, 1),
        arguments=("-i", "made.txt", "-n", "0", "--max-steps", "300", "--type", "mlp"),
        losses=r"\| loss (\d+\.\d+)",
    ),
    Recipe(
        name="makemore_gru",
        truth="tiny operators 62 % of a step, Python 18 %: 6,668 events in 6.7 ms of CPU",
        right=frozenset({"kernel_launch", "memory_bound"}),
        read_steps=16,
        kind="LM", repository="makemore", script="makemore.py", chosen="after",
        data=text_file("made.txt", 3000, 3, 4),
        arguments=("-i", "made.txt", "-n", "0", "--max-steps", "120", "--type", "gru"),
        losses=r"\| loss (\d+\.\d+)",
    ),
    Recipe(
        name="mingpt_adder",
        truth="tiny operators 41 % of a step, matrix products 21 %, update 17 %: 4,649 events in 9.5 ms of CPU",
        right=frozenset({"kernel_launch", "memory_bound"}),
        read_steps=16,
        kind="LM", repository="minGPT", script="adder.py", folder="projects/adder", on_path=(".",), chosen="after",
        arguments=("--trainer.max_iters=120", "--trainer.num_workers=0", "--trainer.device=cpu"),
        edits=(Edit("projects/adder/adder.py", r"iter_num % 500 == 0", "iter_num < 0"),),
        losses=r"train loss (\S+)",
    ),
    Recipe(
        name="nanogpt_own_python",
        flop_per_step=gpt_flop(4, 256, 65, 128, 4),
        truth="a sum in Python in every step: +38 % without, by CPU time",
        right=frozenset({"own_code"}),
        kind="LM", repository="nanoGPT", script="train.py", chosen="after",
        data=char_tokens,
        arguments=(*NANOGPT, "--max_iters=45", "--eval_interval=100000", "--eval_iters=1"),
        cause=Variant((Edit("train.py", r"^(\s+)iter_num \+= 1", r"\g<0>\n\1sum(i * i for i in range(1_500_000))"),)),
        losses=NANOGPT_LOSSES,
    ),
    Recipe(
        name="hf_run_mlm",
        truth="matrix products 67 % of a step, other operators (dropout) 22 %, Python 7 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="fine-tuning", repository="transformers", copied="examples/pytorch/language-modeling", script="run_mlm.py",
        data=llama,
        edits=(Edit("run_mlm.py", r"evaluate\.load\(.*\)", "None"),),
        arguments=(
            "--model_type", "bert", "--tokenizer_name", "model", "--train_file", "text.txt", "--do_train",
            "--config_overrides",
            "hidden_size=192,num_hidden_layers=3,num_attention_heads=4,intermediate_size=768,vocab_size=128",
            "--output_dir", "out", "--per_device_train_batch_size", "8", "--line_by_line", "--max_seq_length",
            "128", "--max_steps", "45", "--logging_steps", "10", "--report_to", "none", "--save_strategy", "no",
            "--use_cpu", "True",
        ),
        losses=HF_LOSSES,
    ),
    Recipe(
        name="trl_reward",
        truth="checkpointing: +34 % without it; by the lengths of the data 30 % of the tokens are padding",
        right=frozenset({"padding_waste", "recompute"}),
        kind="fine-tuning", repository="trl", copied="trl/scripts", script="reward.py", chosen="after",
        data=llama,
        arguments=(*TRL, "--dataset_name", "preferences"),
        losses=HF_LOSSES,
        removal=Variant(arguments=("--gradient_checkpointing", "False")),
    ),
    Recipe(
        name="gan_lsgan",
        truth="matrix products 77 % of a step, other operators 19 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="GAN/diffusion", repository="PyTorch-GAN", script="lsgan.py", folder="implementations/lsgan",
        chosen="after",
        edits=(seeded("implementations/lsgan/lsgan.py"),),
        data=digits("data/mnist", 1600, 64),
        arguments=("--n_epochs", "2", "--n_cpu", "0", "--sample_interval", "100000"),
        losses=r"loss: (\S+)\]",
    ),
    Recipe(
        name="gan_infogan",
        truth="matrix products 77 % of a step, other operators 18 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="GAN/diffusion", repository="PyTorch-GAN", script="infogan.py", folder="implementations/infogan",
        chosen="after",
        edits=(seeded("implementations/infogan/infogan.py"),),
        data=digits("data/mnist", 1600, 64),
        arguments=("--n_epochs", "1", "--n_cpu", "0", "--batch_size", "32", "--sample_interval", "100000"),
        losses=r"loss: (\S+)\]",
    ),
    Recipe(
        name="examples_siamese",
        truth="matrix products 59 to 71 % of a step, update 17 to 25 % (Adadelta, tensor by tensor)",
        right=frozenset({"healthy", "optimizer_heavy"}),
        kind="CNN", repository="examples", script="main.py", folder="siamese_network", chosen="after",
        data=digits("data", 320, 400),
        edits=(
            Edit("siamese_network/main.py", r"'\.\./data'", "'../data'"),
            Edit("siamese_network/main.py", r"^import argparse, random, copy$", r"\g<0>; random.seed(0)"),
        ),
        arguments=("--epochs", "5", "--no-accel", "--batch-size", "8", "--log-interval", "5"),
        losses=r"Loss: (\d+\.\d+)",
    ),
    Recipe(
        name="examples_super_resolution",
        truth="matrix products 77 % of a step, loader 12 %, Python 5 %",
        right=frozenset({"healthy"}),
        kind="CNN", repository="examples", script="main.py", folder="super_resolution", chosen="after",
        data=bsd,
        arguments=(
            "--upscale_factor", "4", "--batchSize", "2", "--testBatchSize", "2", "--nEpochs", "1", "--threads", "0",
        ),
        losses=r"Loss: (\d+\.\d+)",
    ),
    Recipe(
        name="timm_mobilenetv3",
        truth="two readings disagree: matrix products 29 to 42 %, loader 13 to 21 %, other operators 15 to 23 %",
        kind="ViT", repository="pytorch-image-models", script="train.py", chosen="after",
        data=pictures("pictures", 80, 96),
        arguments=(
            "--data-dir", "pictures", "--model", "mobilenetv3_small_050", "--num-classes", "4", "--batch-size", "8",
            "--epochs", "1", "--workers", "1", "--device", "cpu", "--log-interval", "10", "--no-prefetcher",
            "--warmup-epochs", "0", "--input-size", "3", "64", "64",
        ),
        losses=r"Loss: +(\S+)",
    ),
    Recipe(
        name="cleanrl_c51",
        truth="tiny operators 46 % of a step, Python 43 %: 3,723 events in 3.5 ms of CPU",
        right=frozenset({"kernel_launch", "memory_bound", "own_code"}),
        read_steps=24,
        kind="RL", repository="cleanrl", script="cleanrl/c51.py", on_path=(".",), chosen="after",
        arguments=("--total-timesteps", "4000", "--learning-starts", "1000", "--no-cuda", "--buffer-size", "5000"),
        edits=(
            Edit(
                "cleanrl/c51.py", r"^(\s+)writer\.add_scalar\(\"losses/loss\", (.*), global_step\)",
                r"\g<0>; print('loss', \2)",
            ),
        ),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="cleanrl_sac",
        truth="matrix products 69 % of a step, other operators 13 %, Python 12 %, update 6 %; looked at again after a "
        "verdict: matrix products 57 %, Python 27 %, other operators 13 %",
        right=frozenset({"healthy", "own_code"}),
        kind="RL", repository="cleanrl", script="cleanrl/sac_continuous_action.py", on_path=(".",),
        arguments=(
            "--total-timesteps", "700", "--learning-starts", "300", "--no-cuda", "--buffer-size", "5000",
            "--env-id", "Pendulum-v1",
        ),
        edits=(
            Edit("cleanrl/sac_continuous_action.py", r'infos\["final_observation"\]', "next_obs"),
            Edit(
                "cleanrl/sac_continuous_action.py",
                r"^(\s+)writer\.add_scalar\(\"losses/qf1_loss\", (.*), global_step\)", r"\g<0>; print('loss', \2)",
            ),
        ),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="examples_reinforce",
        truth="tiny operators 44 to 59 % of a step, Python 38 to 49 %: 6,909 events in 20 ms of CPU",
        right=frozenset({"kernel_launch", "memory_bound", "own_code"}),
        read_steps=12,
        kind="RL", repository="examples", script="reinforce.py", folder="reinforcement_learning",
        arguments=("--log-interval", "5"),
        edits=(Edit("reinforcement_learning/reinforce.py", r"count\(1\)", "range(1, 160)"),),
        losses=r"Average reward: (\S+)",
    ),
    Recipe(
        name="lightning_fabric_kfold",
        flop_per_step=mnist_flop(32),
        truth="matrix products 54 % of a step, other operators 24 %, update 12 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="framework/DDP", repository="pytorch-lightning", script="train_fabric.py",
        copied="examples/fabric/kfold_cv", chosen="after",
        data=digits("data", 1600, 64),
        arguments=("--epochs", "1", "--batch-size", "32", "--folds", "2"),
        edits=(Edit("train_fabric.py", r"^DATASETS_PATH = .*", 'DATASETS_PATH = "data"'),),
        losses=r"Loss: (\S+)",
    ),
    Recipe(
        name="accelerate_accumulation",
        truth="matrix products 70 % of a step, other operators 22 %; "
        "by the lengths of the data a third of the tokens is padding",
        right=frozenset({"healthy", "memory_bound", "padding_waste"}),
        kind="framework/DDP", repository="accelerate", copied="examples", script="by_feature/gradient_accumulation.py",
        chosen="after",
        data=bert,
        arguments=("--cpu", "--gradient_accumulation_steps", "2"),
        edits=(
            Edit(
                "by_feature/gradient_accumulation.py", r"load_dataset\(.*\)",
                'load_dataset("json", data_files={"train": "train.json", "validation": "validation.json"})',
            ),
            Edit("by_feature/gradient_accumulation.py", r'"(google-bert/)?bert-base-cased"', '"model"'),
            Edit("by_feature/gradient_accumulation.py", r'"num_epochs": \d+', '"num_epochs": 2'),
            Edit(
                "by_feature/gradient_accumulation.py", r"evaluate\.load\(.*\)",
                "__import__('unittest.mock').mock.MagicMock()",
            ),
            Edit(
                "by_feature/gradient_accumulation.py", r"^(\s+)accelerator\.backward\(loss\)",
                r"\g<0>\n\1print('loss', loss.item())",
            ),
        ),
        losses=r"\bloss (\S+)",
    ),
    # Chosen after the rules had been mended again, and frozen.
    Recipe(
        name="gan_acgan",
        truth="matrix products 72 % of a step, other operators 22 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="GAN/diffusion", repository="PyTorch-GAN", script="acgan.py", folder="implementations/acgan",
        chosen="after",
        edits=(seeded("implementations/acgan/acgan.py"),),
        data=digits("data/mnist", 1600, 64),
        arguments=("--n_epochs", "1", "--n_cpu", "0", "--batch_size", "32", "--sample_interval", "100000"),
        losses=r"D loss: (\S+),",
    ),
    Recipe(
        name="gan_aae",
        truth="update 34 % of a step (Adam, tensor by tensor), matrix products 32 %, loader 18 %; looked at again "
        "after a verdict: +27 % with all batches made before, +19 % with a fused update, by CPU time",
        right=frozenset({"optimizer_heavy", "cpu_preprocessing"}),
        kind="GAN/diffusion", repository="PyTorch-GAN", script="aae.py", folder="implementations/aae", chosen="after",
        edits=(seeded("implementations/aae/aae.py"),),
        data=digits("data/mnist", 3200, 64),
        arguments=("--n_epochs", "1", "--n_cpu", "0", "--batch_size", "64", "--sample_interval", "100000"),
        losses=r"D loss: (\S+)\]",
    ),
    Recipe(
        name="cleanrl_td3",
        truth="matrix products 58 % of a step, Python 21 %, update 18 % (Adam, tensor by tensor)",
        right=frozenset({"healthy", "own_code", "optimizer_heavy"}),
        kind="RL", repository="cleanrl", script="cleanrl/td3_continuous_action.py", on_path=(".",), chosen="after",
        arguments=(
            "--total-timesteps", "700", "--learning-starts", "300", "--no-cuda", "--buffer-size", "5000",
            "--env-id", "Pendulum-v1",
        ),
        edits=(
            Edit("cleanrl/td3_continuous_action.py", r'infos\["final_observation"\]', "next_obs"),
            Edit(
                "cleanrl/td3_continuous_action.py",
                r"^(\s+)writer\.add_scalar\(\"losses/qf1_loss\", (.*), global_step\)", r"\g<0>; print('loss', \2)",
            ),
        ),
        losses=r"\bloss (\S+)",
    ),
    Recipe(
        name="examples_imagenet_dummy",
        truth="matrix products 71 % of a step, other operators 11 %, update 11 %",
        right=frozenset({"healthy"}),
        kind="CNN", repository="examples", script="main.py", folder="imagenet", chosen="after",
        edits=(
            Edit("imagenet/main.py", r"1281167", "160"),
            Edit("imagenet/main.py", r"50000", "4"),
            Edit("imagenet/main.py", r"\(3, 224, 224\)", "(3, 96, 96)"),
        ),
        arguments=(
            "--dummy", "--no-accel", "-a", "resnet18", "-b", "4", "-j", "0", "--epochs", "1", "-p", "5", "--seed", "1",
        ),
        losses=r"Loss (\S+)",
    ),
    Recipe(
        name="examples_gcn",
        truth="two evaluations behind every step: +89 % without them, by CPU time",
        right=frozenset({"side_passes", "eval_pause"}),
        kind="GNN/sequence", repository="examples", script="main.py", folder="gcn", chosen="after",
        data=citations("gcn/cora"),
        edits=(Edit("gcn/main.py", r"with requests\.get\(.*\n.*\n.*extractall\(\)", "pass"),),
        arguments=("--epochs", "120", "--no-accel", "--val-every", "10"),
        removal=Variant((Edit("gcn/main.py", r"= test\(model, .*\)", "= 0.0, 0.0"),)),
        losses=r"loss_train: (\S+)",
    ),
    Recipe(
        name="examples_forward_forward",
        truth="matrix products 76 % of a step, other operators 22 %",
        right=frozenset({"healthy", "memory_bound"}),
        kind="CNN", repository="examples", script="main.py", folder="mnist_forward_forward",
        data=digits("mnist_forward_forward/data", 1000, 100),
        arguments=("--epochs", "60", "--no_accel", "--train_size", "500", "--test_size", "100"),
        edits=(seeded("mnist_forward_forward/main.py"),),
        losses=r"Loss:  (\S+)",
    ),
    Recipe(
        name="nanogpt_float64",
        truth="every number in float64: +96 % without, by CPU time",
        right=frozenset({"fp32_matmul"}),
        kind="LM", repository="nanoGPT", script="train.py", chosen="after",
        data=char_tokens,
        arguments=(*NANOGPT, "--max_iters=45", "--eval_interval=100000", "--eval_iters=1"),
        cause=Variant((Edit("train.py", r"^import torch$", r"\g<0>; torch.set_default_dtype(torch.float64)"),)),
        losses=NANOGPT_LOSSES,
    ),
    Recipe(
        name="pytorch_cifar_slow_transform",
        truth="a sum in Python for every picture, in the training thread: +276 % without, by CPU time",
        right=frozenset({"cpu_preprocessing"}),
        kind="CNN", repository="pytorch-cifar", script="main.py", chosen="after",
        data=cifar(".", 360),
        edits=(
            Edit("main.py", r"torchvision\.datasets\.CIFAR10", '__import__("made").Cifar'),
            seeded("main.py"),
            Edit("utils.py", r"os\.popen\(.*\)\.read\(\)", "'24 80'"),
            Edit("main.py", r"^net = SimpleDLA\(\)", "net = LeNet()"),
            Edit("main.py", r"batch_size=128", "batch_size=8"),
            Edit("main.py", r"start_epoch\+200", "start_epoch+1"),
            Edit("main.py", r"^\s+progress_bar\(.*\n.*\)$", "        print('loss', loss.item())"),
            Edit("main.py", r"num_workers=2", "num_workers=0"),
        ),
        cause=Variant(
            (
                Edit(
                    "main.py",
                    r"transforms\.RandomHorizontalFlip\(\),",
                    r"\g<0> transforms.Lambda(lambda x: [sum(i * i for i in range(40_000)), x][1]),",
                ),
            )
        ),
        losses=r"\bloss (\S+)",
    ),
)  # fmt: skip

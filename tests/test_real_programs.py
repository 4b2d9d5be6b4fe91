"""Programs that other people wrote, unmodified, under `flopmeter run`: right steps, right FLOPs, the same result.

Each is a file of a released distribution, fetched from the package registry and checked against the hash written here.
Models are made from configs and data from nothing, so that nothing else is downloaded. Every program runs twice, with
and without flopmeter, and what it leaves behind must be the same to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from flopmeter import count_flops, load_run

OWN = Path(__file__).parent / "programs"
TOLERANCE = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A released distribution."""

    requirement: str
    """Name and version, as pip takes them."""
    file: str
    """The file's name in the registry."""
    sha256: str
    """Of that file."""


TRL = Archive(
    requirement="trl==1.16.0",
    file="trl-1.16.0-py3-none-any.whl",
    sha256="c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
)
IGNITE = Archive(
    requirement="pytorch-ignite==0.5.5",
    file="pytorch_ignite-0.5.5.tar.gz",
    sha256="2c14de75c939a3cc06d2e7de00b1e0a261917ef9bd874dac2e69d789dfa9cc64",
)
SCHEDULE_FREE = Archive(
    requirement="schedulefree==1.4.1",
    file="schedulefree-1.4.1.tar.gz",
    sha256="69ef25601d1fc0d8dd00cb36f9af78833f88b7846f1bb6ddecc9f144f3e9f7cb",
)
PYTORCH_OPTIMIZER = Archive(
    requirement="pytorch_optimizer==4.1.0",
    file="pytorch_optimizer-4.1.0.tar.gz",
    sha256="76c994e94c0b2d0802976c14804a9de09d7055cd3b05db56a86d3295eced435f",
)
TORCHVISION = Archive(
    requirement="torchvision==0.28.0",
    file="torchvision-0.28.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    sha256="7e80f543b22503d9415e126db5f0ff3917036925e38560ee6b9ae38c571a4002",
)

# torchvision's wheel is built for CUDA, so its operators do not load beside a CPU torch. Of it only data sets and
# transforms are used here; these names let it be imported. Two of the programs set no seed. (All this is in a second
# `sitecustomize`, which ours must let through.)
WITHOUT_OPERATORS = """
import torch
torch.manual_seed(0)
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@pytest.fixture(scope="session")
def unpacked(request: pytest.FixtureRequest) -> Callable[[Archive], Path]:
    """Fetches an archive once, checks it, and gives the folder of its contents."""
    cache: Path = request.config.cache.mkdir("programs")  # type: ignore[union-attr]

    def get(archive: Archive) -> Path:
        path = cache / archive.file
        if not path.exists():
            _download(archive, cache)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == archive.sha256
        name, version = archive.file.removesuffix(".tar.gz").split("-")[:2]
        return _unpack(path, cache / f"{name}-{version}")

    return get


def _download(archive: Archive, folder: Path) -> None:
    name = archive.requirement.partition("==")[0]
    kind = ("--no-binary", name) if archive.file.endswith(".tar.gz") else ("--only-binary", name)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", *kind, "-d", str(folder)]
    answer = subprocess.run([*command, archive.requirement], capture_output=True, text=True, check=False)
    if answer.returncode != 0 or not (folder / archive.file).exists():
        pytest.skip(f"{archive.file} cannot be had from the registry here: {answer.stderr.strip()[-200:]}")


def _unpack(path: Path, folder: Path) -> Path:
    if not folder.exists():
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(folder)
        else:
            with tarfile.open(path) as source:
                source.extractall(folder.parent, filter="data")
    if path.name.startswith("torchvision"):
        (folder / "sitecustomize.py").write_text(WITHOUT_OPERATORS)
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program, and what is known about it."""

    archive: Archive
    """Where it comes from."""
    program: tuple[str, ...]
    """What python is given; a path is inside the archive."""
    num_steps: int
    """Optimizer steps, or cycles of them, that it does."""
    flop: Callable[[Path], float]
    """Model FLOPs of one step, derived by hand or counted on the model in the folder given."""
    result: Callable[[Path, str], Any]
    """What it leaves behind: from its folder and what it printed."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Makes its data."""
    more: tuple[Archive, ...] = ()
    """What else it imports."""
    needs: tuple[str, ...] = field(default=())
    """Libraries that must be installed."""


# --- data ------------------------------------------------------------------------------------------------------------


def make_digits(folder: Path) -> None:
    """320 pictures of noise in MNIST's file format, where MNIST would be."""
    for root in (folder, folder.parent / "data"):
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        noise = random.Random(0)
        for name, num in (("train", 320), ("t10k", 64)):
            pictures, labels = noise.randbytes(num * 784), bytes(noise.randrange(10) for _ in range(num))
            (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, num, 28, 28) + pictures)
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, num) + labels)


WORDS = [f"w{index}" for index in range(50)]
TOKENS = 16


def make_language_model(folder: Path) -> None:
    """A Llama of two layers, its tokenizer, and texts of 16 tokens with the end mark."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes, **ids)).save_pretrained(
        folder / "model"
    )
    _write_texts(folder)


def _write_texts(folder: Path) -> None:
    chance = random.Random(0)

    def text(num_words: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(num_words))

    rows = {
        "texts": [{"text": text(TOKENS - 1)} for _ in range(64)],
        "pairs": [{"prompt": text(7) + " ", "chosen": text(8), "rejected": text(8)} for _ in range(64)],
    }
    for name, lines in rows.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))


def training_arguments(data: str) -> tuple[str, ...]:
    options = {
        "model_name_or_path": "model", "dataset_name": data, "output_dir": "out", "max_steps": "12", "bf16": "false",
        "per_device_train_batch_size": "4", "learning_rate": "1e-3", "save_strategy": "no", "report_to": "none",
        "gradient_checkpointing": "false", "use_cpu": "true",
    }  # fmt: skip
    return tuple(part for name, value in options.items() for part in (f"--{name}", value))


# --- FLOPs of a step, by hand ----------------------------------------------------------------------------------------


def trained(*layers: float) -> float:
    """Forward, weights' gradients, and the inputs' gradients of all layers but the first."""
    return 3 * sum(layers) - layers[0]


def ignite_mnist_flop(folder: Path) -> float:
    # Convolutions 1 -> 10 and 10 -> 20 of 5 x 5 on 28 x 28 and, pooled, 12 x 12; then 320 -> 50 -> 10.
    return 32 * trained(2 * 10 * 24**2 * 25, 2 * 20 * 8**2 * 10 * 25, 2 * 320 * 50, 2 * 50 * 10)


def schedule_free_flop(folder: Path) -> float:
    # Convolutions 1 -> 32 and 32 -> 64 of 3 x 3 on 28 x 28; then 9216 -> 128 -> 10.
    return 32 * trained(2 * 32 * 26**2 * 9, 2 * 64 * 24**2 * 32 * 9, 2 * 9216 * 128, 2 * 128 * 10)


def autoencoder_flop(folder: Path) -> float:
    # One sample through 784 -> 64 -> 3 -> 64 -> 784.
    return trained(2 * 784 * 64, 2 * 64 * 3, 2 * 3 * 64, 2 * 64 * 784)


def dcgan_flop(folder: Path) -> float:
    # Filters of 4 x 4. The discriminator halves 64 x 64 four times (3, 4, 8, 16, 32 channels) and ends with one number;
    # a transposed convolution multiplies each of its inputs with each filter, in the generator from 1 x 1 to 64 x 64.
    discriminator = [2 * 16 * cin * cout * side**2 for cin, cout, side in
                     [(3, 4, 32), (4, 8, 16), (8, 16, 8), (16, 32, 4), (32, 1, 1)]]  # fmt: skip
    generator = [2 * 16 * cin * cout * side**2 for cin, cout, side in
                 [(8, 32, 1), (32, 16, 4), (16, 8, 8), (8, 4, 16), (4, 3, 32)]]  # fmt: skip
    # The discriminator sees real and fake pictures, then fake ones again with gradients back into the pictures.
    return 16 * (3 * trained(*discriminator) + discriminator[0] + trained(*generator))


def sft_flop(folder: Path) -> float:
    # TRL's loss gives logits to the 15 of 16 tokens that have a successor, and makes them again in the backward pass.
    return _llama(folder, 4) - 3 * _logits(4)


def dpo_flop(folder: Path) -> float:
    # The policy on 4 chosen and 4 rejected answers, and the reference model forward on the same.
    return (_llama(folder, 8) - 3 * _logits(8)) * 4 / 3


def _llama(folder: Path, batch_size: int) -> float:
    from transformers import AutoModelForCausalLM

    return _counted(AutoModelForCausalLM.from_pretrained(folder / "model"), batch_size)


def _logits(num_tokens: int) -> float:
    return 2 * num_tokens * 32 * 64


def reward_flop(folder: Path) -> float:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    return _counted(model, 8)  # chosen and rejected answers in one batch


def _counted(model: torch.nn.Module, batch_size: int) -> float:
    ids = torch.full((batch_size, TOKENS), 5)
    return count_flops(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).model_flop


# --- what a program leaves behind ------------------------------------------------------------------------------------


def saved_weights(pattern: str) -> Callable[[Path, str], Any]:
    def read(folder: Path, printed: str) -> Any:
        (path,) = folder.glob(pattern)
        if path.suffix == ".safetensors":
            return hashlib.sha256(path.read_bytes()).hexdigest()
        return _plain(torch.load(path, weights_only=False))

    return read


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None  # dates, versions


def validation_results(folder: Path, printed: str) -> Any:
    found = re.findall(r"Avg accuracy: [\d.]+ Avg loss: [\d.]+|loss: [\d.]+", printed)
    assert found
    return found[-1], [line for line in found if line.startswith("Avg")]


HUGGING_FACE = ("transformers", "accelerate", "datasets", "tokenizers")
CASES = {
    "trl: supervised fine-tuning": Case(
        archive=TRL,
        program=("-m", "trl.scripts.sft", *training_arguments("texts")),
        num_steps=12,
        flop=sft_flop,
        result=saved_weights("out/*.safetensors"),
        prepare=make_language_model,
        needs=HUGGING_FACE,
    ),
    "trl: preferences": Case(
        archive=TRL,
        program=("-m", "trl.scripts.dpo", *training_arguments("pairs")),
        num_steps=12,
        flop=dpo_flop,
        result=saved_weights("out/*.safetensors"),
        prepare=make_language_model,
        needs=HUGGING_FACE,
    ),
    "trl: reward model": Case(
        archive=TRL,
        program=("-m", "trl.scripts.reward", *training_arguments("pairs")),
        num_steps=12,
        flop=reward_flop,
        result=saved_weights("out/*.safetensors"),
        prepare=make_language_model,
        needs=HUGGING_FACE,
    ),
    "ignite: digits": Case(
        archive=IGNITE,
        program=("examples/mnist/mnist.py", "--batch_size", "32", "--epochs", "2", "--val_batch_size", "64"),
        num_steps=20,
        flop=ignite_mnist_flop,
        result=validation_results,
        prepare=make_digits,
        more=(TORCHVISION,),
        needs=("tqdm", "PIL"),
    ),
    "ignite: two networks": Case(
        archive=IGNITE,
        program=(
            "examples/gan/dcgan.py", "--dataset", "fake", "--dataroot", ".", "--workers", "0", "--batch-size", "16",
            "--epochs", "1", "--g-filters", "4", "--d-filters", "4", "--z-dim", "8", "--seed", "1", "--output-dir",
            "out",
        ),
        num_steps=16,
        flop=dcgan_flop,
        result=saved_weights("out/networks_checkpoint_16.pt"),
        more=(TORCHVISION,),
        needs=("tqdm", "PIL"),
    ),
    "schedulefree: digits": Case(
        archive=SCHEDULE_FREE,
        program=("examples/mnist/main.py", "--batch-size", "32", "--epochs", "1", "--save-model"),
        num_steps=10,
        flop=schedule_free_flop,
        result=saved_weights("mnist_cnn.pt"),
        prepare=make_digits,
        more=(TORCHVISION,),
        needs=("PIL",),
    ),
    "pytorch_optimizer: Lightning": Case(
        archive=PYTORCH_OPTIMIZER,
        program=("examples/pytorch_lightning_example.py",),
        num_steps=100,
        flop=autoencoder_flop,
        result=saved_weights("lightning_logs/version_0/checkpoints/*.ckpt"),
        prepare=make_digits,
        more=(TORCHVISION,),
        needs=("pytorch_lightning", "PIL"),
    ),
}  # fmt: skip


def start(program: list[str], folder: Path, path: list[Path]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        [sys.executable, *program], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def with_and_without(program: list[str], tmp_path: Path, case: Case | None, path: list[Path]) -> list[Any]:
    """Runs both at once; gives what each left behind."""
    commands = {"alone": program, "measured": ["-m", "flopmeter", "run", "-o", "record", *program]}
    processes = {}
    for name, command in commands.items():
        folder = tmp_path / name / "work"
        folder.mkdir(parents=True)
        if case is not None:
            case.prepare(folder)
        processes[name] = start(command, folder, path)
    printed = {name: process.communicate(timeout=280)[0] for name, process in processes.items()}
    results = []
    for name, process in processes.items():
        assert process.returncode == 0, printed[name][-3000:]
        folder = tmp_path / name / "work"
        results.append(case.result(folder, printed[name]) if case else re.findall("final loss.*", printed[name]))
    return results


def check(record: Path, num_steps: int, flop: float) -> None:
    run = load_run(record)
    assert run.step[-1] == num_steps
    steady = run.steady()
    assert steady
    for index in steady:
        assert run.column("perf/model_flop")[index] == pytest.approx(flop, rel=TOLERANCE)


SLOW = ("trl: preferences", "trl: reward model", "ignite: digits")
"""Of a kind with the others."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_a_program_of_somebody_else_is_measured_rightly_and_not_changed(
    name: str, tmp_path: Path, unpacked: Callable[[Archive], Path]
) -> None:
    case = CASES[name]
    for library in case.needs:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    root, *others = (unpacked(archive) for archive in (case.archive, *case.more))
    program = list(case.program)
    if program[0] != "-m":
        program[0] = str(root / program[0])
    alone, measured = with_and_without(program, tmp_path, case, [root, *others])
    assert measured == alone
    check(tmp_path / "measured" / "work" / "record", case.num_steps, case.flop(tmp_path / "alone" / "work"))


# Our own small loops. A linear layer of n rows takes 2 * n * in * out forward, as much for its weights' gradient.
def conv_net_flop() -> float:
    return 16 * trained(2 * 8 * 26**2 * 9, 2 * 8 * 13 * 13 * 10)


def mini_gpt_flop() -> float:
    tokens, width, layers, vocabulary, length = 4 * 16, 32, 2, 64, 16
    products = layers * (2 * tokens * width * (3 + 1 + 4 + 4) * width) + 2 * tokens * width * vocabulary
    attention = layers * 2 * (2 * 4 * (length * (length + 1) // 2) * width)
    return 2 * 3 * (products + attention)  # two micro-batches; the first product's input is the embedding's output


def gan_flop() -> float:
    generator, critic = (2 * 8 * 32, 2 * 32 * 16), (2 * 16 * 32, 2 * 32)
    return 8 * (3 * trained(*critic) + critic[0] + trained(*generator))


LOOPS = {"conv_net": (18, conv_net_flop), "mini_gpt": (12, mini_gpt_flop), "gan": (12, gan_flop)}


@pytest.mark.parametrize("name", LOOPS)
def test_a_small_loop_is_measured_rightly_and_not_changed(name: str, tmp_path: Path) -> None:
    num_steps, flop = LOOPS[name]
    alone, measured = with_and_without([str(OWN / f"{name}.py")], tmp_path, None, [])
    assert measured == alone != []
    check(tmp_path / "measured" / "work" / "record", num_steps, flop())

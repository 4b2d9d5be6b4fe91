"""What must be the same with every torch from 2.6 on: `make test-versions` runs this file on each.

Expected FLOPs are derived by hand; a product of (m, k) and (k, n) has 2mkn. Where every input wants its gradient, the
backward pass has twice the forward pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import count_flops, load_run, watch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
ROWS, WIDTH, HIDDEN = 8, 16, 32
NUM_STEPS = 40
PRODUCT = 2 * ROWS * WIDTH * HIDDEN
STEP_FLOP = 5 * PRODUCT
"""Two products forward, two for the weights' gradients, and one for the gradient between the layers."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own, which differ from version to version


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU())
        self.second = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Backend:
    """Runs graphs as they are and counts: compiled code that is in use is seen by it."""

    def __init__(self) -> None:
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return graph(*args)

        return run


@pytest.fixture
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


def settings(mode: str = "smart") -> dict[str, Any]:
    own = {"mfu_calculation_mode": mode, "peak_flop_per_s": 1e12, "report": False, "sinks": []}
    return {"monitoring": own}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == kind]


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        *(("model", mode) for mode in ("smart", "estimate", "profiler", "hybrid")),
        *((what, "smart") for what in ("in place", "submodule", "loss", "optimizer", "accumulated")),
    ],
)
def test_compiled_code_runs_in_40_of_40_steps(tmp_path: Path, backend: Backend, what: str, mode: str) -> None:
    net = Net()
    model: Any = net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step: Any = optimizer.step
    loss_of: Any = lambda out: out.square().mean()  # noqa: E731 - one of two
    if what in ("model", "accumulated"):
        model = torch.compile(net, backend=backend)
    elif what == "in place":
        net.compile(backend=backend)
    elif what == "submodule":
        net.first = torch.compile(net.first, backend=backend)
    elif what == "loss":
        loss_of = torch.compile(loss_of, backend=backend)
    else:
        step = torch.compile(optimizer.step, backend=backend)
    micro_batches = 2 if what == "accumulated" else 1
    with watch(model, optimizer, output_dir=tmp_path, config=settings(mode)):
        for _ in range(NUM_STEPS):
            for _ in range(micro_batches):
                loss_of(model(torch.randn(ROWS, WIDTH))).backward()
            step()
            optimizer.zero_grad()
    assert (backend.num_graphs, backend.num_calls) == (1, NUM_STEPS * micro_batches)
    run = load_run(tmp_path)
    assert len(run) == NUM_STEPS
    if mode != "estimate":
        assert events(tmp_path, "count")
    assert run.columns["perf/model_flop"][-1] == STEP_FLOP * micro_batches


def test_a_model_can_be_compiled_and_exported_while_a_step_is_observed(tmp_path: Path, backend: Backend) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path, config=settings()):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        compiled = torch.compile(lambda batch: model(batch).sum(), backend=backend, fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(2, 4)).backward()
        exported = torch.export.export(model, (torch.ones(2, 4),), strict=True)
        assert torch.equal(exported.module()(torch.ones(2, 4)), model(torch.ones(2, 4)))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert (backend.num_graphs, backend.num_calls) == (1, 3)


def test_nothing_is_observed_beside_cuda_graphs_of_which_nobody_says_when_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cudagraph_trees

    monkeypatch.delattr(cudagraph_trees, "graph_capture_lock", raising=False)
    monkeypatch.setattr(cudagraph_trees.local, "tree_manager_containers", {0: object()}, raising=False)
    train(tmp_path, settings())
    (count,) = events(tmp_path, "count")
    assert count["method"] == "the uncompiled twin (meta)"
    assert count["model_flop"] == STEP_FLOP
    assert events(tmp_path, "facts") == []
    assert "CUDA graphs" in events(tmp_path, "warning")[0]["message"]


def train(folder: Path, config: dict[str, Any], num_steps: int = 8, optimizer_kind: Any = torch.optim.SGD) -> None:
    model = Net()
    optimizer = optimizer_kind(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=folder, config=config):
        for _ in range(num_steps):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Products(torch.optim.SGD):
    """Multiplies each gradient by itself, as Muon does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad @ parameter.grad.T


def test_products_of_an_optimizer_are_no_work_of_the_model_in_a_profiled_step(tmp_path: Path) -> None:
    train(tmp_path, settings("profiler"), optimizer_kind=Products)
    count = events(tmp_path, "count")[0]
    forward, backward, own = (count[f"{name}_flop"] for name in ("forward", "backward", "optimizer"))
    own_flop = 2 * WIDTH * HIDDEN * HIDDEN + 2 * HIDDEN * WIDTH * WIDTH
    assert (forward, backward, own) == (2 * PRODUCT, 3 * PRODUCT, own_flop)


@pytest.mark.parametrize("mode", ["smart", "profiler"])
def test_a_plain_model_is_measured_in_every_mode(tmp_path: Path, mode: str) -> None:
    train(tmp_path, settings(mode))
    assert {count["model_flop"] for count in events(tmp_path, "count")} == {STEP_FLOP}
    assert [event["message"] for event in events(tmp_path, "warning")] == []


def test_the_header_says_what_is_off_with_this_torch(tmp_path: Path) -> None:
    train(tmp_path, settings(), num_steps=1)
    off = " ".join(load_run(tmp_path).header.off)
    told = ["compiled code" in off, "profiled" in off, "reduce-overhead" in off, "custom operator" in off]
    assert told == [VERSION < (2, 10), VERSION < (2, 12), VERSION < (2, 13), VERSION >= (2, 14)]
    assert all(line.startswith(f"torch {torch.__version__}") for line in load_run(tmp_path).header.off)


class Case(NamedTuple):
    """A model, what it is called with, and the FLOPs of its forward pass."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    forward_flop: int
    unwanted_flop: int = 0
    """For gradients that nobody wants: of a recurrence's first state."""


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class ByHand(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


class SwitchesAutocastOff(Net):
    """As the rotary embeddings of transformers 4 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            return self.second(hidden.float())


B, H, S, D = 2, 4, 8, 16


def heads(num_heads: int = H, length: int = S) -> torch.Tensor:
    return torch.randn(B, num_heads, length, D, requires_grad=True)


def wanted(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def no_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


PAIRS = 2 * 2 * B * H * D  # two products, for each pair of a query and a key
MODELS: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(nn.Linear(WIDTH, HIDDEN), (wanted(ROWS, WIDTH),), PRODUCT),
    "mlp": lambda: Case(Net(), (wanted(ROWS, WIDTH),), 2 * PRODUCT),
    "checkpointed mlp": lambda: Case(Checkpointed(), (wanted(ROWS, WIDTH),), 2 * PRODUCT),
    "autocast off inside": lambda: Case(SwitchesAutocastOff(), (wanted(ROWS, WIDTH),), 2 * PRODUCT),
    "linear of a sequence": lambda: Case(nn.Linear(WIDTH, HIDDEN), (wanted(2, 4, WIDTH),), PRODUCT),
    "bilinear": lambda: Case(
        Function(lambda x, w, v: (x @ w) @ v, (WIDTH, HIDDEN), (HIDDEN, 4)),
        (wanted(ROWS, WIDTH),),
        PRODUCT + 2 * ROWS * HIDDEN * 4,
    ),
    "conv1d": lambda: Case(nn.Conv1d(3, 5, 3), (wanted(2, 3, 10),), 2 * 2 * 5 * 8 * 3 * 3),
    "conv2d": lambda: Case(nn.Conv2d(3, 5, 3, padding=1), (wanted(2, 3, 6, 6),), 2 * 2 * 5 * 36 * 3 * 9),
    "conv3d": lambda: Case(nn.Conv3d(3, 5, 2), (wanted(1, 3, 4, 4, 4),), 2 * 5 * 27 * 3 * 8),
    "grouped conv": lambda: Case(nn.Conv2d(4, 8, 3, groups=2), (wanted(2, 4, 6, 6),), 2 * 2 * 8 * 16 * 2 * 9),
    "depthwise conv": lambda: Case(nn.Conv2d(4, 4, 3, groups=4), (wanted(2, 4, 6, 6),), 2 * 2 * 4 * 16 * 9),
    "transposed conv": lambda: Case(nn.ConvTranspose2d(3, 5, 2, 2), (wanted(2, 3, 4, 4),), 2 * 2 * 3 * 16 * 5 * 4),
    "batched product": lambda: Case(
        Function(lambda x, w: torch.bmm(x, w), (3, WIDTH, HIDDEN)), (wanted(3, ROWS, WIDTH),), 3 * PRODUCT
    ),
    "einsum": lambda: Case(
        Function(lambda x, w: torch.einsum("ij,jk->ik", x, w), (WIDTH, HIDDEN)), (wanted(ROWS, WIDTH),), PRODUCT
    ),
    "attention": lambda: Case(Attention(), (heads(), heads(), heads()), PAIRS * S * S),
    "causal attention": lambda: Case(
        Attention(is_causal=True), (heads(), heads(), heads()), PAIRS * S * (S + 1) // 2
    ),
    "grouped queries": lambda: Case(Attention(enable_gqa=True), (heads(), heads(2), heads(2)), PAIRS * S * S),
    "cross attention": lambda: Case(
        Attention(), (heads(), heads(length=12), heads(length=12)), PAIRS * S * 12
    ),
    "attention by hand": lambda: Case(ByHand(), (heads(), heads(), heads()), PAIRS * S * S),
    "encoder layer": lambda: Case(
        no_dropout(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)),
        (wanted(B, S, 64),),
        2 * B * S * (4 * 64 * 64 + 2 * 64 * 128) + 2 * 2 * B * 64 * S * S,
    ),
    "lstm": lambda: Case(nn.LSTM(6, 5), (wanted(7, 2, 6),), 2 * 7 * 2 * 4 * 5 * (6 + 5), 2 * 2 * 4 * 5 * 5),
    "gru": lambda: Case(nn.GRU(6, 5), (wanted(7, 2, 6),), 2 * 7 * 2 * 3 * 5 * (6 + 5), 2 * 2 * 3 * 5 * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_model_are_those_derived_by_hand(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, forward_flop, unwanted_flop = MODELS[name]()
    count = count_flops(model, inputs)
    assert (count.forward_flop, count.backward_flop) == (forward_flop, 2 * forward_flop - unwanted_flop)
    assert count.method.startswith("meta")


JOB = """
    import sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from flopmeter import watch
    rank, kind = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"monitoring": {"peak_flop_per_s": 1e12, "report": False, "sinks": []}}
    with watch(model, optimizer, output_dir="out", config=config):
        for _ in range(12):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_on_gloo_are_counted_and_none_fails(tmp_path: Path, kind: str) -> None:
    if kind == "fsdp2" and VERSION < (2, 7):
        pytest.skip(f"torch {torch.__version__}: its FSDP2 does not run on a CPU")
    program = tmp_path / "job.py"
    program.write_text(textwrap.dedent(JOB))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(rank), kind, str(tmp_path / "store")],
            cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = load_run(tmp_path / "out")
    assert (len(found), found.header.world_size) == (12, 2)
    assert {count["model_flop"] for count in events(tmp_path / "out", "count")} == {STEP_FLOP}


HF = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
HF_TOKENS = 2 * 16
HF_CAUSAL = 2 * 4 * 64 * 2 * 16 * 17 // 2
TRANSFORMERS = {
    "Llama": (
        {**HF, "vocab_size": 96},
        2 * HF_TOKENS * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 96) + HF_CAUSAL,
    ),
    "Qwen3": (
        {**HF, "vocab_size": 96, "head_dim": 16, "num_key_value_heads": 4},
        2 * HF_TOKENS * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 96) + HF_CAUSAL,
    ),
    "Bert": (
        {**HF, "vocab_size": 96},
        2 * HF_TOKENS * 2 * (4 * 64 * 64 + 2 * 64 * 128) + 2 * 4 * 64 * 2 * 16 * 16 + 2 * 2 * 64 * 64,
    ),
    "ViT": (
        {**HF, "image_size": 32, "patch_size": 8},  # 16 patches and the token of the class
        2 * 2 * 16 * (3 * 8 * 8) * 64
        + 2 * 2 * 17 * 2 * (4 * 64 * 64 + 2 * 64 * 128)
        + 2 * 4 * 64 * 2 * 17 * 17
        + 2 * 2 * 64 * 64,
    ),
}
"""Sizes, and the FLOPs of a forward pass of two samples; Bert and ViT end in a pooler."""


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes, _ = TRANSFORMERS[name]
    kind = f"{name}ForCausalLM" if name in ("Llama", "Qwen3") else f"{name}Model"
    try:
        return getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes))
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"transformers {transformers.__version__} does not work with torch {torch.__version__}: {error}")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_is_counted_on_shapes(name: str) -> None:
    model = transformer(name).to("meta")
    batch = {"pixel_values": torch.ones(2, 3, 32, 32)} if name == "ViT" else {"input_ids": torch.ones(2, 16).long()}
    count = count_flops(model, batch, training=False)
    assert count.method.startswith("meta")
    # Transformers 4 makes the angles of rotary embeddings by a product, a ten-thousandth of a model as small as this.
    assert count.forward_flop == pytest.approx(TRANSFORMERS[name][1], rel=1e-3)


def test_the_trainer_of_transformers_is_measured(tmp_path: Path) -> None:
    model = transformer("Llama")
    from transformers import Trainer, TrainingArguments

    from flopmeter.integrations.transformers import FlopmeterCallback

    data = [{"input_ids": torch.ones(16).long(), "labels": torch.ones(16).long()} for _ in range(16)]
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=8, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    callback = FlopmeterCallback(str(tmp_path), config=settings())
    Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    forward_flop = TRANSFORMERS["Llama"][1]
    assert load_run(tmp_path).columns["perf/model_flop"][-1] == pytest.approx(3 * forward_flop, rel=1e-3)


def test_the_trainer_of_lightning_is_measured(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from flopmeter.integrations.lightning import FlopmeterCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=8, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[FlopmeterCallback(tmp_path, settings())],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, WIDTH), batch_size=ROWS))
    assert load_run(tmp_path).columns["perf/model_flop"][-1] == STEP_FLOP

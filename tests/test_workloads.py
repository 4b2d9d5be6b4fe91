"""Each step has the FLOPs and samples of its own batch, however the loop calls its model; expected values by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence

from flopmeter import load_run, watch
from flopmeter.flops.workload import Needs, WorkloadReader, resolve

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "report": False, "profile_steps": False}}
WIDTH, INNER, CLASSES = 16, 32, 4
SIZES = (8, 8, 16, 4)
"""Batch sizes: what is counted on the first must not stay for the others."""

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


class Got(NamedTuple):
    flop: list[float | None]
    samples: list[int]
    tokens: list[int]


def trained(folder: Path, model: nn.Module, losses: Sequence[Callable[[], torch.Tensor]]) -> Got:
    """One step for each loss, after a few of the first that are counted; what the record says of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = watch(model, optimizer, output_dir=folder, config=CONFIG)
    for loss in (*[losses[0]] * 5, *losses):
        loss().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.finish_training()
    run, last = load_run(folder), slice(-len(losses), None)
    samples, tokens = ([0 if x != x else round(x) for x in run.amount(name)[last]] for name in ("samples", "tokens"))
    return Got([None if x != x else x for x in run.column("perf/model_flop")[last]], samples, tokens)


class Net(nn.Module):
    """Two linears on whatever holds the features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, INNER, bias=False)
        self.head = nn.Linear(INNER, CLASSES, bias=False)

    def forward(self, labels: Any = None, features: Any = None, return_dict: bool = True) -> torch.Tensor:
        x = labels if features is None else features
        while not isinstance(x, torch.Tensor):
            x = x[0] if isinstance(x, list) else x["x"]
        out: torch.Tensor = self.head(self.inner(x))
        return out


class Usual(Net):
    def forward(self, x: Any, labels: Any = None, return_dict: bool = True) -> torch.Tensor:  # type: ignore[override]
        return super().forward(features=x)


def net_flop(rows: int) -> int:
    """Forward, and backward: the input of the first layer is data, and owed nothing."""
    return 2 * rows * (2 * WIDTH * INNER + 3 * INNER * CLASSES)


CALLS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x": lambda model, x, y: model(x),
    "x, labels=y": lambda model, x, y: model(x, labels=y),
    "x, return_dict=False": lambda model, x, y: model(x, return_dict=False),
    "{x}": lambda model, x, y: model({"x": x, "labels": y}),
    "[x]": lambda model, x, y: model([x]),
    "[[x], y]": lambda model, x, y: model([[x], y]),
    "{[{x}]}": lambda model, x, y: model({"x": [{"x": x}]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_net_is_counted_for_each_batch_however_it_is_called(tmp_path: Path, name: str) -> None:
    model = Usual()
    batches = [(torch.randn(n, WIDTH), torch.zeros(n, dtype=torch.long)) for n in SIZES]
    got = trained(tmp_path, model, [lambda b=b: CALLS[name](model, *b) for b in batches])  # type: ignore[misc]
    assert got.flop == [net_flop(n) for n in SIZES]
    assert got.samples == list(SIZES)
    assert got.tokens == [0] * len(SIZES)


@pytest.mark.parametrize("length", [None, 3])
def test_labels_that_come_first_are_not_the_input(tmp_path: Path, length: int | None) -> None:
    model, shape = Net(), (WIDTH,) if length is None else (length, WIDTH)
    got = trained(
        tmp_path,
        model,
        [lambda n=n: model(labels=torch.zeros(n, dtype=torch.long), features=torch.randn(n, *shape)) for n in SIZES],  # type: ignore[misc]
    )
    assert got.flop == [net_flop(n * (length or 1)) for n in SIZES]
    assert (got.samples, got.tokens) == (list(SIZES), [0] * len(SIZES))


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class OnOpaque(Net):
    def forward(self, graph: Opaque, labels: Any = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(features=graph.hidden)


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_batch_in_which_nothing_is_recognised_has_no_flop_instead_of_the_last_one(
    tmp_path: Path, has_labels: bool
) -> None:
    model = OnOpaque()

    def loss(n: int) -> torch.Tensor:
        labels = torch.zeros(n, dtype=torch.long) if has_labels else None
        out: torch.Tensor = model(Opaque(torch.randn(n, WIDTH)), labels=labels)
        return out

    got = trained(tmp_path, model, [lambda n=n: loss(n) for n in SIZES])  # type: ignore[misc]
    assert got.flop == [None] * len(SIZES)


class OnNothing(Net):
    def forward(self, return_dict: bool = True) -> torch.Tensor:  # type: ignore[override]
        return super().forward(features=torch.ones(8, WIDTH))


def test_a_model_that_is_given_nothing_does_the_same_work_each_time(tmp_path: Path) -> None:
    model = OnNothing()
    flop = trained(tmp_path, model, [lambda: model(return_dict=False)] * 8).flop
    assert flop[-1] == net_flop(8)
    assert set(flop) <= {None, net_flop(8)}  # before anything was counted, nothing tells


class Denoiser(nn.Module):
    """A convolution, attention from pixels to a text, a convolution: the calls of diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.queries, self.keys = nn.Linear(8, 8, bias=False), nn.Linear(12, 8, bias=False)
        self.last = nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(
        self, sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor, return_dict: bool = True
    ) -> torch.Tensor:
        image = self.first(sample)
        queries, keys = self.queries(image.flatten(2).mT)[:, None], self.keys(encoder_hidden_states)[:, None]
        out: torch.Tensor = self.last(
            image + scaled_dot_product_attention(queries, keys, keys)[:, 0].mT.reshape(image.shape)
        )
        return out


DENOISING: dict[str, Callable[..., torch.Tensor]] = {
    "all positional": lambda model, x, t, c: model(x, t, c),
    "text by name": lambda model, x, t, c: model(x, t, encoder_hidden_states=c),
    "text first": lambda model, x, t, c: model(encoder_hidden_states=c, timestep=t, sample=x),
    "a flag by name": lambda model, x, t, c: model(x, t, c, return_dict=False),
}


@pytest.mark.parametrize("name", DENOISING)
def test_a_denoiser_is_counted_by_its_image(tmp_path: Path, name: str) -> None:
    model, pixels, words = Denoiser(), 8 * 8, 5
    attention = 2 * 2 * pixels * words * 8
    one = 2 * (2 * 2 * pixels * 4 * 8 * 9 // 2 + 3 * pixels * 8 * 8 + 2 * words * 12 * 8 + 3 * pixels * 8 * 4 * 9)
    batches = [(torch.randn(n, 4, 8, 8), torch.zeros(n), torch.randn(n, words, 12)) for n in SIZES]
    got = trained(tmp_path, model, [lambda b=b: DENOISING[name](model, *b) for b in batches])  # type: ignore[misc]
    assert got.flop == pytest.approx([n * (one + 3 * attention) for n in SIZES], rel=1e-9)
    assert (got.samples, got.tokens) == (list(SIZES), [0] * len(SIZES))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1, bias=False)

    def forward(self, images: list[torch.Tensor], targets: Any = None) -> torch.Tensor:
        return torch.stack([self.body(image[None]).sum() for image in images])


def test_images_of_a_list_are_samples_each_of_its_size(tmp_path: Path) -> None:
    model = Detector()
    sides = ([8, 8], [8, 8], [8, 16, 4], [16])
    targets = {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5)}
    losses = [lambda own=own: model([torch.randn(3, n, n) for n in own], [targets] * len(own)) for own in sides]  # type: ignore[misc]
    got = trained(tmp_path, model, losses)
    assert got.flop == [sum(2 * 2 * n * n * 3 * 8 * 9 for n in own) for own in sides]  # forward, and for the weight
    assert (got.samples, got.tokens) == ([2, 2, 3, 1], [0] * 4)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, INNER, batch_first=True)

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0].data
        return out


def test_packed_sequences_are_counted_by_their_steps(tmp_path: Path) -> None:
    """Four gates; the first step of each sequence owes no gradient to a state that is zero."""
    model = Recurrent()
    batches = ([10, 8, 6], [10, 8, 6], [10, 10, 8, 8, 6, 6], [9, 7])
    losses = [
        lambda own=own: model(  # type: ignore[misc]
            pack_padded_sequence(torch.randn(len(own), max(own), WIDTH), torch.tensor(own), batch_first=True)
        )
        for own in batches
    ]
    got = trained(tmp_path, model, losses)
    gates = 4 * INNER
    expected = [2 * gates * (2 * WIDTH * sum(own) + 3 * INNER * sum(own) - INNER * len(own)) for own in batches]
    assert got.flop == pytest.approx(expected, rel=1e-9)
    assert (got.samples, got.tokens) == ([3, 3, 6, 2], [24, 24, 48, 16])


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrence_says_which_dimension_is_the_batch(tmp_path: Path, batch_first: bool) -> None:
    model = nn.LSTM(WIDTH, INNER, batch_first=batch_first)
    sizes = ((4, 10), (4, 10), (8, 10), (4, 20))
    losses = [
        lambda b=b, s=s: model(torch.randn(*((b, s) if batch_first else (s, b)), WIDTH))[0]  # type: ignore[misc]
        for b, s in sizes
    ]
    got = trained(tmp_path, model, losses)
    assert got.samples == [b for b, _ in sizes]
    assert got.tokens == [b * s for b, s in sizes]


def encoder_flop(batch: int, length: int) -> int:
    """One layer on data: queries, keys and values owe their input nothing."""
    projections, mlp = 4 * WIDTH * WIDTH, 2 * WIDTH * INNER
    return 2 * batch * length * (3 * (projections + mlp) - 3 * WIDTH * WIDTH) + 3 * 4 * WIDTH * batch * length**2


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_attends_within_each_sample(tmp_path: Path, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, INNER, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    sizes = ((4, 20), (4, 20), (20, 4), (4, 60))
    losses = [
        lambda b=b, s=s: model(torch.randn(*((b, s) if batch_first else (s, b)), WIDTH))  # type: ignore[misc]
        for b, s in sizes
    ]
    got = trained(tmp_path, model, losses)
    assert got.flop == pytest.approx([encoder_flop(b, s) for b, s in sizes], rel=1e-9)
    assert got.samples == [b for b, _ in sizes]
    assert got.tokens == [b * s for b, s in sizes]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["boolean", "added to scores"])
def test_padding_is_no_work_where_a_layer_of_torch_is_told_of_it(tmp_path: Path, batch_first: bool, kind: str) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, INNER, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    lengths = ([20, 20, 20, 20], [20, 3, 7, 9], [20, 1, 1, 1], [5, 20], [8, 8, 8, 8])

    def loss(own: list[int]) -> torch.Tensor:
        is_padding = torch.arange(20) >= torch.tensor(own)[:, None]
        mask = is_padding if kind == "boolean" else torch.zeros(is_padding.shape).masked_fill(is_padding, -torch.inf)
        rows = torch.randn(*((len(own), 20) if batch_first else (20, len(own))), WIDTH)
        out: torch.Tensor = model(rows, src_key_padding_mask=mask)
        return out.nan_to_num()

    got = trained(tmp_path, model, [lambda own=own: loss(own) for own in lengths])  # type: ignore[misc]
    assert got.flop == pytest.approx([sum(encoder_flop(1, n) for n in own) for own in lengths], rel=1e-9)
    assert (got.samples, got.tokens) == ([len(own) for own in lengths], [sum(own) for own in lengths])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
def test_source_and_target_of_a_transformer_are_counted_each_by_its_length(tmp_path: Path, batch_first: bool) -> None:
    model = nn.Transformer(WIDTH, 2, 1, 1, INNER, dropout=0.0, batch_first=batch_first)
    sizes = ((4, 20, 10), (4, 20, 10), (4, 20, 30), (4, 40, 10), (8, 20, 10))

    def loss(batch: int, source: int, target: int) -> torch.Tensor:
        shapes = [(batch, n) if batch_first else (n, batch) for n in (source, target)]
        mask = nn.Transformer.generate_square_subsequent_mask(target)
        out: torch.Tensor = model(*(torch.randn(*shape, WIDTH) for shape in shapes), tgt_mask=mask)
        return out

    def decoder_flop(batch: int, source: int, target: int) -> int:
        square, mlp = WIDTH * WIDTH, 2 * WIDTH * INNER
        rows = target * (3 * (4 * square + 2 * square + mlp) - 3 * square) + source * 3 * 2 * square
        pairs = target * (target + 1) // 2 + target * source
        return batch * (2 * rows + 3 * 4 * WIDTH * pairs)

    got = trained(tmp_path, model, [lambda size=size: loss(*size) for size in sizes])  # type: ignore[misc]
    expected = [encoder_flop(b, s) + decoder_flop(b, s, t) for b, s, t in sizes]
    assert got.flop == pytest.approx(expected, rel=2e-3)
    assert got.samples == [b for b, _, _ in sizes]


def test_channels_of_a_recording_are_no_tokens(tmp_path: Path) -> None:
    model = nn.Conv1d(3, 8, 5, padding=2, bias=False)
    got = trained(tmp_path, model, [lambda n=n: model(torch.randn(n, 3, 20)) for n in SIZES])  # type: ignore[misc]
    assert got.flop == [2 * 2 * n * 20 * 3 * 8 * 5 for n in SIZES]
    assert (got.samples, got.tokens) == (list(SIZES), [0] * len(SIZES))


class Conditional(nn.Module):
    """Looks a class up, and adds it to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(10, 8)
        self.body = nn.Conv2d(3, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.classes(y)[:, :, None, None]
        return out


class Timed(nn.Module):
    """Looks a time up, and adds it to the vector."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(10, INNER)
        self.body = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.times(t)
        return out


def test_a_table_of_classes_makes_an_image_no_text(tmp_path: Path) -> None:
    model, sides = Conditional(), ((4, 8), (4, 8), (8, 8), (4, 16))
    losses = [lambda n=n, s=s: model(torch.randn(n, 3, s, s), torch.zeros(n, dtype=torch.long)) for n, s in sides]  # type: ignore[misc]
    got = trained(tmp_path, model, losses)
    assert got.flop == [2 * 2 * n * s * s * 3 * 8 * 9 for n, s in sides]


def test_a_table_of_times_makes_a_vector_no_text(tmp_path: Path) -> None:
    model = Timed()
    losses = [lambda n=n: model(torch.randn(n, WIDTH), torch.zeros(n, dtype=torch.long)) for n in SIZES]  # type: ignore[misc]
    got = trained(tmp_path, model, losses)
    assert got.flop == [2 * 2 * n * WIDTH * INNER for n in SIZES]
    assert (got.samples, got.tokens) == (list(SIZES), [0] * len(SIZES))


LENGTHS = ([9, 9], [9, 9], [9, 4, 2], [7])


def text(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.full(mask.shape, 5), mask


def sizes_of(**more: int) -> dict[str, int]:
    return {
        "vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": 2, **more,
    }  # fmt: skip


LLAMA: dict[str, Callable[..., Any]] = {
    "ids": lambda model, ids, mask: model(ids, use_cache=False),
    "ids, labels=": lambda model, ids, mask: model(ids, labels=ids),
    "ids, mask, labels=": lambda model, ids, mask: model(ids, mask, labels=ids),
    "ids, attention_mask=": lambda model, ids, mask: model(ids, attention_mask=mask),
    "numbered": lambda model, ids, mask: model(input_ids=ids, attention_mask=mask * 3),
}


@pytest.mark.parametrize("name", LLAMA)
def test_a_language_model_may_be_given_ids_and_mask_by_position(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="builds a transformers model from its config")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes_of(num_key_value_heads=1)))
    weights = 3 * WIDTH * WIDTH + 3 * WIDTH * INNER + 50 * WIDTH  # one of two heads for keys and values

    def flop(lengths: list[int]) -> int:
        return sum(3 * 2 * weights * n + 3 * 4 * WIDTH * n * (n + 1) // 2 for n in lengths)

    batches = [text(lengths) for lengths in LENGTHS]
    got = trained(tmp_path, model, [lambda b=b: LLAMA[name](model, *b).logits for b in batches])  # type: ignore[misc]
    real = LENGTHS if name not in ("ids", "ids, labels=") else [[max(own)] * len(own) for own in LENGTHS]
    assert got.flop == pytest.approx([flop(own) for own in real], rel=1e-9)
    assert (got.samples, got.tokens) == ([2, 2, 3, 1], [sum(own) for own in real])


def test_the_positional_mask_of_an_encoder_counts_as_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="builds a transformers model from its config")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes_of()))

    def flop(lengths: list[int]) -> int:
        rows = sum(lengths) * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER) + len(lengths) * (WIDTH * WIDTH + WIDTH * 2)
        return 3 * 2 * rows + sum(3 * 4 * WIDTH * n * n for n in lengths)

    def loss(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(ids, mask, labels=torch.zeros(len(ids), dtype=torch.long)).loss
        return out

    got = trained(tmp_path, model, [lambda own=own: loss(*text(own)) for own in LENGTHS])  # type: ignore[misc]
    assert got.flop == pytest.approx([flop(own) for own in LENGTHS], rel=1e-9)
    assert got.tokens == [sum(own) for own in LENGTHS]


@pytest.mark.parametrize("padded_to", [8, 300])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_documents_that_a_mask_numbers_are_counted_once(padded_to: int, dtype: torch.dtype) -> None:
    mask = torch.zeros(2, padded_to, dtype=dtype)
    mask[0, :3], mask[0, 3:8], mask[1, :6] = 1, 2, 1
    reader = WorkloadReader(Needs())
    reader.see((), {"input_ids": torch.zeros(2, padded_to, dtype=torch.long), "attention_mask": mask})
    found = resolve(reader.take())
    assert found is not None
    assert (found.tokens, found.tokens_processed) == (8 + 6, 2 * padded_to)


@pytest.mark.parametrize("padded_to", [8, 300])
def test_a_mask_to_be_added_to_scores_has_zeros_for_tokens(padded_to: int) -> None:
    mask = torch.full((1, padded_to), float("-inf"))
    mask[0, :5] = 0.0
    reader = WorkloadReader(Needs())
    reader.see((), {"input_ids": torch.zeros(1, padded_to, dtype=torch.long), "attention_mask": mask})
    found = resolve(reader.take())
    assert found is not None
    assert found.tokens == 5

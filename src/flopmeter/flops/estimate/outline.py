"""What is the model as a whole for: does it predict tokens, fill gaps or classify, and which of its parts are heads?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from flopmeter.flops.estimate.attention import read_attention
from flopmeter.flops.estimate.leaves import Leaf, read_leaf
from flopmeter.torch_compat import Convolution

_POOLED = ("pool", "classif", "score")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What has to be known before the parts are looked at one by one."""

    heads: frozenset[int]
    """Identities of the linears that come after all layers and convolutions."""
    vocabularies: frozenset[int]
    """How many tokens the model knows: as a config says, else as its tables say (positions may be among them)."""
    predicts_tokens: bool
    """Whether a head is as wide as the vocabulary."""
    fills_gaps: bool
    """Whether a token may see what comes after it, since the class is named after masked tokens."""
    classifies: bool
    """Whether the heads see one row a sample."""


def outline_of(root: nn.Module) -> Outline:
    """Look over the whole tree once."""
    sizes: set[int] = set()
    tables: list[int] = []
    fills_gaps = False
    for module in root.modules():
        size = getattr(vars(module).get("config"), "vocab_size", None)
        if isinstance(size, int):
            sizes.add(size)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            tables.append(module.num_embeddings)
        fills_gaps = fills_gaps or "Masked" in type(module).__name__
    vocabularies = frozenset(sizes or {*tables[:1], max(tables)} if tables else ())
    heads = _heads(root)
    predicts_tokens = any(leaf.outputs in vocabularies for _, leaf in heads.values())
    return Outline(
        heads=frozenset(heads),
        vocabularies=vocabularies,
        predicts_tokens=predicts_tokens,
        fills_gaps=fills_gaps,
        classifies=not predicts_tokens and any(is_pooled(path) for path, _ in heads.values()),
    )


def is_stack(name: str, module: nn.Module) -> bool:
    """A list of layers, called one after the other."""
    if isinstance(module, nn.ModuleList):
        return "expert" not in name
    if not isinstance(module, nn.Sequential):
        return False
    classes = Counter(type(child) for child in module.children() if child._modules)
    return max(classes.values(), default=0) > 1


def is_pooled(path: str) -> bool:
    """Whether a head's name says that it sees one row a sample."""
    return any(word in path.lower() for word in _POOLED)


def _heads(root: nn.Module) -> dict[int, tuple[str, Leaf]]:
    heads: dict[int, tuple[str, Leaf]] | None = None
    for path, module, leaf, is_inside in _leaves(root, "", False):
        if is_inside or isinstance(module, Convolution):
            heads = {}
        elif heads is not None:
            heads[id(module)] = path, leaf
    return heads or {}


def _leaves(module: nn.Module, path: str, is_inside: bool) -> Iterator[tuple[str, nn.Module, Leaf, bool]]:
    """Everything that does a product, and whether it belongs to a layer. Of a layer one such part is enough."""
    leaf = read_leaf(module)
    if leaf is not None and leaf.products:
        yield path, module, leaf, is_inside
        return
    if not is_inside:
        is_inside = is_stack(path.rpartition(".")[2], module) or read_attention(module) is not None
    for name, child in module.named_children():
        for found in _leaves(child, f"{path}.{name}", is_inside):
            yield found
            if is_inside:
                return

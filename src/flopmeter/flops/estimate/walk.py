"""From the module tree to its matrix products: which rows reach each module, and what does training owe for it?

Modules are taken in the order in which they were registered, which is nearly always the order in which they run. A
module is given what the one before it made; where the width does not fit, what entered their common parent (the gate
and up projections of an MLP, say). The backward pass owes a gradient to an input only if something before it is
trained, and to a weight only if the weight is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from flopmeter.flops.estimate import structure
from flopmeter.flops.estimate.amounts import Amount, CrossPairs, Pairs, Rows
from flopmeter.flops.estimate.attention import (
    Attention,
    is_causal,
    is_cross,
    layer_type,
    patch_window_of,
    read_attention,
    window_of,
)
from flopmeter.flops.estimate.leaves import (
    Leaf,
    Product,
    dtype_of,
    has_trained,
    is_embedding,
    read_leaf,
    shape_of,
)
from flopmeter.flops.estimate.outline import is_pooled, is_stack, outline_of
from flopmeter.flops.estimate.plan import Term
from flopmeter.torch_compat import Convolution

TOKENS = Rows("tokens")
RESIZING = "Sizes after convolutions and pooling follow from their strides alone: resizing in forward code is not seen"
NO_ATTENTION = "No attention was recognised: if the model attends, its pairs are not counted"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Flow:
    """What reaches a module."""

    rows: Rows
    """How often."""
    width: int = 0
    """Channels of a row; 0 before the first module."""
    needs_grad: bool = False
    """Whether anything before it is trained, so that the backward pass has to come this far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Where in the tree a module stands."""

    path: str = ""
    """From the root, as `named_modules` has it."""
    name: str = ""
    """The last part of the path."""
    config: Any = None
    """Of the nearest module around it that has one."""
    entries: tuple[Flow, ...] = ()
    """What entered the modules around it, the nearest last."""
    owners: tuple[nn.Module, ...] = ()
    """The modules around it, the nearest last."""
    text: Rows = TOKENS
    """What a text model in here reads."""
    layer: int | None = None
    """Index in the outermost stack of layers; None outside."""
    calls: float = 1
    """Times that a row passes it: the top k of experts."""
    memory: Flow | None = None
    """What the encoder made, for a decoder to attend to."""


class Walk:
    """One pass over a model; `terms` and `left_out` are its result."""

    def __init__(self, root: nn.Module) -> None:
        self.terms: list[Term] = []
        self.left_out: dict[str, None] = {}
        self.num_unread = 0
        self._dtype = next((name for p in root.parameters() if (name := dtype_of(p))), "float32")
        self._outline = outline_of(root)
        self._seen: set[int] = set()
        self._text_flow: Flow | None = None
        is_text = self._outline.vocabularies and not structure.starts_with_values(root)
        source = structure.input_of(root) or ("tokens" if is_text else "dense")
        self._visit(root, Flow(Rows(source)), Scope())
        is_recurrent = any(isinstance(module, nn.RNNBase) for module in root.modules())
        if source == "tokens" and not is_recurrent and all(isinstance(term.amount, Rows) for term in self.terms):
            self.left_out[NO_ATTENTION] = None

    def _visit(self, module: nn.Module, flow: Flow, scope: Scope) -> Flow:
        if is_embedding(module):
            width = flow.width or (structure.embedding_width(module) if flow.rows.is_text else 0)
            return replace(flow, width=width, needs_grad=flow.needs_grad or has_trained(module))
        if id(module) in self._seen and scope.layer is None:
            return flow  # the same module under a second name; in a stack it is called a second time
        self._seen.add(id(module))
        flow, scope = _enter(module, flow, scope)
        leaf = read_leaf(module)
        wanted = structure.first_width(module) if leaf is None else leaf.inputs
        flow = _fit(flow, wanted, scope, can_join=not isinstance(module, Convolution))
        if experts := structure.stacked_experts(scope.name, module, scope.config):
            out = self._pass_experts(experts, flow, scope)
        elif leaf is not None:
            out = self._pass_leaf(module, leaf, flow, scope)
        elif (shape := read_attention(module)) is not None:
            out = self._attend(module, shape, flow, scope)
        else:
            out = self._pass_children(module, flow, scope)
        if out.rows.is_text:
            self._text_flow = out
        return out

    def _pass_children(self, module: nn.Module, flow: Flow, scope: Scope) -> Flow:
        entry = flow = replace(flow, needs_grad=flow.needs_grad or _has_trained_norm(module, scope))
        for name, child in _called_children(module, scope):
            inner = self._inside(module, name, entry, scope)
            if name == "decoder" and structure.is_encoder_decoder(module, inner.config):
                inner = replace(inner, memory=flow, text=Rows("decoder"))
                is_given = isinstance(module, nn.Transformer)  # else the decoder looks its tokens up itself
                flow = Flow(inner.text, needs_grad=entry.needs_grad if is_given else flow.needs_grad)
            first_of_all = flow.width == 0
            flow = self._visit_rerun(child, flow, inner, is_layer=scope.layer is None and inner.layer is not None)
            if first_of_all and flow.width and flow.rows.source == "dense":
                extra = structure.extra_tokens(module, flow.width)
                flow = replace(flow, rows=replace(flow.rows, extra=flow.rows.extra + extra))
        self._note_unread(module)
        return replace(flow, needs_grad=flow.needs_grad or entry.needs_grad or has_trained(module))

    def _inside(self, module: nn.Module, name: str, entry: Flow, scope: Scope) -> Scope:
        """The scope of a module's child."""
        config = vars(module).get("config") or scope.config
        layer, calls = scope.layer, scope.calls
        if layer is None and is_stack(scope.name, module):
            layer = int(name) if name.isdigit() else 0
            calls *= structure.calls_of_stack(module, config)
        if structure.is_expert_list(scope.name, module):
            calls *= self._top_k(scope)
        only_holds = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        return replace(
            scope,
            path=scope.path if name in _WRAPPERS else f"{scope.path}.{name}".lstrip("."),
            name=name,
            config=config,
            entries=scope.entries if only_holds else (*scope.entries, entry),
            owners=scope.owners if only_holds else (*scope.owners, module),
            layer=layer,
            calls=calls,
        )

    def _visit_rerun(self, module: nn.Module, flow: Flow, scope: Scope, is_layer: bool) -> Flow:
        start = len(self.terms)
        out = self._visit(module, flow, scope)
        again = structure.reruns(module, is_layer)
        if again != "nothing":
            stop = len(self.terms) - (again == "all but the last product")
            self.terms[start:stop] = [term._replace(num_reruns=1) for term in self.terms[start:stop]]
        return out

    def _pass_leaf(self, module: nn.Module, leaf: Leaf, flow: Flow, scope: Scope) -> Flow:
        rows = self._head_rows(module, leaf, flow, scope)
        stride = leaf.stride
        if flow.width == 0 and rows.source == "dense":
            stride *= leaf.inputs or 1  # the source counts single values: so many make a row
        elif flow.width == 0 and rows.source == "patches":
            stride = 1  # each patch comes cut to the size of the kernel
        elif stride != 1:
            self.left_out[RESIZING] = None
        if stride != 1:
            rows = replace(rows, per=rows.per * stride)
        needs_grad = self._add(leaf.products, rows, flow.needs_grad, scope)
        after = flow.rows if rows.source == "samples" else rows  # a head may stand before the layers in the tree
        return Flow(after, leaf.outputs or flow.width, needs_grad or leaf.is_trained)

    def _add(self, products: Iterable[Product], amount: Amount, needs_grad: bool, scope: Scope) -> bool:
        """Note products that follow each other; returns whether the last one's result depends on training."""
        for flop, is_trained, dtype in products:
            num_grads = needs_grad + is_trained
            self.terms.append(Term(scope.path, dtype or self._dtype, amount, flop * scope.calls, num_grads))
            needs_grad = needs_grad or is_trained
        return needs_grad

    def _head_rows(self, module: nn.Module, leaf: Leaf, flow: Flow, scope: Scope) -> Rows:
        """A head on top of all layers sees every token if it predicts tokens, one row a sample if it classifies."""
        if scope.layer is not None or not leaf.products:
            return flow.rows
        is_head = id(module) in self._outline.heads
        if is_head and leaf.outputs in self._outline.vocabularies and self._text_flow is not None:
            return self._text_flow.rows
        is_pooling_head = is_head and (flow.rows.source == "dense" or self._outline.classifies)
        return Rows("samples") if is_pooling_head or is_pooled(scope.path) else flow.rows

    def _pass_experts(self, experts: list[nn.Parameter], flow: Flow, scope: Scope) -> Flow:
        entry = scope.entries[-1] if scope.entries else flow
        active = self._top_k(scope)
        products = [Product(2 * active * prod(shape_of(p)[1:]), p.requires_grad, dtype_of(p)) for p in experts]
        return replace(entry, needs_grad=self._add(products, entry.rows, entry.needs_grad, scope))

    def _top_k(self, scope: Scope) -> int:
        found = structure.top_k(reversed(scope.owners[-2:]), scope.config)
        if found is None:
            self.left_out["Nothing says how many experts a token passes: one was assumed"] = None
        return found or 1

    def _attend(self, module: nn.Module, shape: Attention, flow: Flow, scope: Scope) -> Flow:
        if flow.width == 0 and flow.rows.source == "dense" and (wanted := structure.first_width(module)):
            flow = Flow(replace(flow.rows, per=flow.rows.per * wanted), wanted, flow.needs_grad)
        crosses = is_cross(scope.path, module)
        memory = scope.memory if crosses else None
        if crosses and memory is None:
            self.left_out["Attention to an encoder is not counted: the model has none"] = None
            return flow
        trained = self._project(module, shape, flow, memory or flow, scope)
        if "linear" in layer_type(module, scope.config, scope.layer):
            self.left_out["The recurrences of linear attention are not counted"] = None
        else:
            self._score(shape, self._pairs(module, flow, memory, scope), trained, scope)
        out = Flow(flow.rows, shape.value_width, flow.needs_grad or any(trained.values()))
        for name, child in _called_children(module, scope):
            if name not in shape.roles:
                out = self._visit(child, out, self._inside(module, name, flow, scope))
        return replace(out, needs_grad=out.needs_grad or has_trained(module))

    def _score(self, shape: Attention, amount: Amount, trained: dict[str, bool], scope: Scope) -> None:
        """Queries times keys, and that times values: each side that depends on training is owed a product."""
        num_score_grads = trained["q"] + trained["k"]
        num_value_grads = (num_score_grads > 0) + trained["v"]
        for width, num_grads in ((shape.score_width, num_score_grads), (shape.value_width, num_value_grads)):
            self.terms.append(Term(scope.path, self._dtype, amount, 2 * width * scope.calls, num_grads))

    def _project(self, module: nn.Module, shape: Attention, flow: Flow, memory: Flow, scope: Scope) -> dict[str, bool]:
        """Queries from the flow, keys and values from the memory; returns which of them depend on training."""
        trained = {"q": flow.needs_grad, "k": memory.needs_grad, "v": memory.needs_grad}
        if shape.has_packed_weight:
            return self._project_packed(module, flow, memory, scope)
        made = flow
        for name, role in shape.roles.items():
            child, source = getattr(module, name), flow if "q" in role else memory
            is_direct = not source.width or structure.first_width(child) == source.width
            made = self._visit(child, source if is_direct else made, self._inside(module, name, source, scope))
            for letter in role:
                trained[letter] = made.needs_grad
        return trained

    def _project_packed(self, module: nn.Module, flow: Flow, memory: Flow, scope: Scope) -> dict[str, bool]:
        packed = module._parameters.get("in_proj_weight")
        weights = [packed] * 3 if packed is not None else [module._parameters[f"{n}_proj_weight"] for n in "qkv"]
        trained = {}
        for letter, weight, source in zip("qkv", weights, (flow, memory, memory), strict=True):
            assert weight is not None
            flop = 2 * weight.numel() / (3 if packed is not None else 1)
            product = Product(flop, weight.requires_grad, dtype_of(weight))
            trained[letter] = self._add([product], source.rows, source.needs_grad, scope)
        return trained

    def _pairs(self, module: nn.Module, flow: Flow, memory: Flow | None, scope: Scope) -> Amount:
        if memory is not None:
            return CrossPairs(flow.rows, memory.rows)
        if flow.rows.source == "patches":
            return Pairs(flow.rows, patch_window=patch_window_of(scope.config, scope.layer))
        config = getattr(module, "config", None) or scope.config
        said = is_causal(module)
        if said is None:
            said = self._outline.predicts_tokens and not self._outline.fills_gaps
            guess = "causal, since the model predicts tokens" if said else "over all pairs"
            self.left_out[f"No module says whether its attention is causal: taken as {guess}"] = None
        if "chunk" in layer_type(module, config, scope.layer):
            self.left_out["Attention in chunks is counted as if over the whole sequence"] = None
        window = window_of(module, config, scope.layer) if flow.rows.is_text else 0
        return Pairs(flow.rows, causal=bool(said), window=window)

    def _note_unread(self, module: nn.Module) -> None:
        """Remember matrices of a module's own that no rule reads."""
        for name, parameter in module.named_parameters(recurse=False):
            shape = shape_of(parameter)
            if name == "A_log":
                self.left_out[f"The state recurrence of {type(module).__name__} is not counted"] = None
            elif len(shape) > 1 and shape[0] > 1 and not structure.is_position_like(name):
                self.num_unread += parameter.numel()
                self.left_out[f"What {type(module).__name__} does with its own {name} is not counted"] = None


def _enter(module: nn.Module, flow: Flow, scope: Scope) -> tuple[Flow, Scope]:
    """A vision tower starts from its own input, a language model behind it from tokens, and may attend to the tower."""
    source = structure.input_of(module)
    is_tower = structure.is_tower(scope.name, module)
    if flow.rows.is_text and (is_tower or source in ("dense", "patches")):
        return Flow(Rows("patches" if source == "patches" else "dense")), scope
    if source == "tokens" and not flow.rows.is_text and not is_tower:
        return Flow(scope.text, needs_grad=flow.needs_grad), replace(scope, memory=flow)
    return flow, scope


def _fit(flow: Flow, wanted: int, scope: Scope, can_join: bool) -> Flow:
    """The flow that has the width which a module wants."""
    if not wanted or not flow.width or wanted == flow.width:
        return flow
    for entry in reversed(scope.entries):
        if entry.width == wanted:
            is_near = entry is scope.entries[-1]
            return entry if is_near else replace(entry, needs_grad=flow.needs_grad)
    if can_join and not flow.rows.is_text and wanted % flow.width == 0:
        joined = replace(flow.rows, per=flow.rows.per * wanted / flow.width)
        return replace(flow, rows=joined, width=wanted)
    return replace(flow, width=wanted)


def _called_children(module: nn.Module, scope: Scope) -> Iterator[tuple[str, nn.Module]]:
    """The parts that a row passes: of experts one (counted top-k times), of adapters the active ones."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if structure.is_expert_list(scope.name, module):
        children = children[:1]
    if isinstance(module, nn.ModuleDict) and scope.owners:
        active = getattr(scope.owners[-1], "active_adapters", None)
        if isinstance(active, (list, tuple)):
            children = [(name, child) for name, child in children if name in active]
    yield from children


def _has_trained_norm(module: nn.Module, scope: Scope) -> bool:
    """A norm before a layer's first product makes its input depend on training, wherever it was registered."""
    if scope.layer is None or getattr(module, "norm_first", True) is False:
        return False
    return any(has_trained(m) for m in module.children() if not m._modules and read_leaf(m) is None)

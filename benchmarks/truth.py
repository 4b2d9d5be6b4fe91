"""How many FLOPs does each benchmark row really need, by hand formula over its config numbers alone?

Counters are judged against this file, so it imports nothing but the standard library. What it assumes:

 1. A multiply-add is 2 FLOP. Matrix products count (linear, convolution, QK^T, PV, experts, router, RNN gates, patch
    embedding, lm_head). Look-ups, softmax, norms, activations, biases, the optimizer and RoPE (an elementwise product
    in transformers 5.22, no longer a small matmul) are 0.
 2. `full` takes every token processed, padding included, and every query-key pair.
 3. `exact` takes the real tokens, and the pairs that the mask lets through between real tokens.
 4. What is attended apart is a sequence of its own: an image or window of n patches has n^2 pairs in both conventions.
    Documents packed into one row are not: `full` pairs all of the row, `exact` only what lies within a document.
 5. A head on one pooled position (BERT's pooler and classifier, ViT's classifier) counts once per sample in both.
 6. Backward: a product y = x W costs as much again for x's gradient where x needs one, and for W's where W is trained.
    Pixels need none; the output of an embedding needs one unless the embedding is frozen (LoRA).
 7. Attention backward is the four products dV, dP, dQ, dK, less those whose operand needs no gradient. The QK^T that
    a fused kernel runs once more is the hardware's affair.
 8. A token passes its top-k experts and the shared ones, whatever the implementation computes beside them.
 9. A convolution takes all kernel taps at every output position, also where they fall on padding; groups divide inputs.
10. Recomputation is the products that really run again. Reentrant checkpointing repeats a layer's whole forward. The
    non-reentrant kind stops once the last tensor that backward needs is back. In a Llama layer that is down_proj's
    input, saved before down_proj runs, and the residual sum after it saves nothing: so all but down_proj is repeated.
    torch.compile keeps each layer's input but not the last layer's output, which the final norm's backward needs: the
    last layer's down_proj is repeated as well.

In the formulas `c` is anything that carries a config's numbers under transformers' own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Both(NamedTuple):
    """One number under the two conventions."""

    full: int
    exact: int


class Load(NamedTuple):
    """What a batch asks of a transformer."""

    tokens: Both
    pairs: Both
    num_samples: int


class Product(NamedTuple):
    """One kind of matrix product: its forward FLOP, how often backward and recomputation cost the same again."""

    flop: Both
    num_grads: int = 2
    num_reruns: int = 0


class Count(NamedTuple):
    """The truth under one convention."""

    forward_flop: int
    backward_flop: int
    recompute_flop: int

    @property
    def model_flop(self) -> int:
        return self.forward_flop + self.backward_flop


class Truth(NamedTuple):
    """The truth of one row. Run as separate operators (no fused attention), `full` is also what is executed."""

    full: Count
    exact: Count

    @property
    def hardware_flop(self) -> int:
        return sum(self.full)


def total(products: Iterable[Product]) -> Truth:
    products = list(products)

    def count(side: int) -> Count:
        flops = [(p.flop[side], p.num_grads, p.num_reruns) for p in products]
        return Count(sum(f for f, _, _ in flops), sum(f * g for f, g, _ in flops), sum(f * r for f, _, r in flops))

    return Truth(count(0), count(1))


def causal(lengths: Sequence[int], padded_to: int, window: int | None = None) -> Load:
    """Samples of `lengths` real tokens in rows of `padded_to`; a window is how many keys are seen, oneself included."""
    reach = window or padded_to
    exact = sum(sum(min(i + 1, reach) for i in range(n)) for n in lengths)
    return _load(lengths, exact, num_rows=len(lengths), padded_to=padded_to)


def bidirectional(lengths: Sequence[int], padded_to: int) -> Load:
    return _load(lengths, sum(n * n for n in lengths), num_rows=len(lengths), padded_to=padded_to)


def packed(rows: Sequence[Sequence[int]], padded_to: int) -> Load:
    """Rows of documents laid end to end, each document causal within itself."""
    documents = [n for row in rows for n in row]
    return _load(documents, sum(n * (n + 1) // 2 for n in documents), num_rows=len(rows), padded_to=padded_to)


def _load(lengths: Sequence[int], exact_pairs: int, *, num_rows: int, padded_to: int) -> Load:
    return Load(Both(num_rows * padded_to, sum(lengths)), Both(num_rows * padded_to**2, exact_pairs), num_rows)


def linear(tokens: Both, num_inputs: int, num_outputs: int, num_grads: int = 2) -> Product:
    return Product(Both(*(2 * t * num_inputs * num_outputs for t in tokens)), num_grads)


def unpadded(num_rows: int, num_inputs: int, num_outputs: int, num_grads: int = 2) -> Product:
    """A linear or convolution whose rows are all real: pixels, patches, samples."""
    return linear(Both(num_rows, num_rows), num_inputs, num_outputs, num_grads)


def attention(pairs: Both, num_heads: int, qk_dim: int, v_dim: int, num_score_grads: int = 2) -> list[Product]:
    """QK^T and PV; `num_score_grads` is 1 where only the queries, or only the keys, need a gradient."""
    scores, values = (Both(*(2 * p * num_heads * dim for p in pairs)) for dim in (qk_dim, v_dim))
    return [Product(scores, num_score_grads), Product(values)]


def gated_mlp(tokens: Both, hidden: int, inner: int, num_grads: int = 2) -> list[Product]:
    """Gate, up, down."""
    up = linear(tokens, hidden, inner, num_grads)
    return [up, up, linear(tokens, inner, hidden, num_grads)]


def experts(tokens: Both, hidden: int, inner: int, *, num_experts: int, top_k: int) -> list[Product]:
    """The router, then every token through its top-k gated MLPs."""
    routed = Both(*(top_k * t for t in tokens))
    return [linear(tokens, hidden, num_experts), *gated_mlp(routed, hidden, inner)]


def grouped_query_attention(load: Load, c: Any) -> list[Product]:
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    projections = [linear(load.tokens, c.hidden_size, size) for size in (query, key, key)]
    scores = attention(load.pairs, c.num_attention_heads, c.head_dim, c.head_dim)
    return [*projections, *scores, linear(load.tokens, query, c.hidden_size)]


def plain_layer(load: Load, hidden: int, num_heads: int, inner: int) -> list[Product]:
    """GPT-2, BERT and ViT: full-width queries, keys, values and output, then an MLP of two."""
    square = [linear(load.tokens, hidden, hidden)] * 4
    mlp = [linear(load.tokens, hidden, inner), linear(load.tokens, inner, hidden)]
    return [*square, *attention(load.pairs, num_heads, hidden // num_heads, hidden // num_heads), *mlp]


def llama_products(load: Load, c: Any) -> list[Product]:
    """The layers in turn, each ending with down_proj, then the lm_head."""
    layer = [*grouped_query_attention(load, c), *gated_mlp(load.tokens, c.hidden_size, c.intermediate_size)]
    return [*layer * c.num_hidden_layers, linear(load.tokens, c.hidden_size, c.vocab_size)]


def llama(load: Load, c: Any, checkpointing: str | None = None) -> Truth:
    """Also Mistral. `checkpointing` is None, "reentrant", "non_reentrant" or "compiled" (the latter, compiled)."""
    *layers, lm_head = llama_products(load, c)
    if checkpointing is None:
        return total([*layers, lm_head])
    num_products = len(layers) // c.num_hidden_layers
    down_projs = range(num_products - 1, len(layers), num_products)
    skipped = {"reentrant": (), "non_reentrant": down_projs, "compiled": down_projs[:-1]}[checkpointing]
    repeated = [product._replace(num_reruns=int(i not in skipped)) for i, product in enumerate(layers)]
    return total([*repeated, lm_head])


def lora_llama(load: Load, c: Any, rank: int) -> Truth:
    """Adapters on q_proj and v_proj; all else frozen, so nothing below the first adapter needs a gradient.

    In layer 0 the input needs none, hence neither q_proj, k_proj, v_proj nor the keys do: only lora_A's weight (one
    product) and lora_B (two) are left of the projections, and the scores owe a gradient to the queries alone.
    """
    tokens, query, key = load.tokens, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

    def layer(num_input_grads: int) -> list[Product]:
        projections = [linear(tokens, c.hidden_size, size, num_input_grads) for size in (query, key, key)]
        lora_a = [linear(tokens, c.hidden_size, rank, num_input_grads + 1)] * 2
        lora_b = [linear(tokens, rank, query), linear(tokens, rank, key)]
        scores = attention(load.pairs, c.num_attention_heads, c.head_dim, c.head_dim, num_input_grads + 1)
        output = linear(tokens, query, c.hidden_size, num_grads=1)
        mlp = gated_mlp(tokens, c.hidden_size, c.intermediate_size, num_grads=1)
        return [*projections, *lora_a, *lora_b, *scores, output, *mlp]

    layers = layer(num_input_grads=0) + layer(num_input_grads=1) * (c.num_hidden_layers - 1)
    return total([*layers, linear(tokens, c.hidden_size, c.vocab_size, num_grads=1)])


def gpt2(load: Load, c: Any) -> Truth:
    layer = plain_layer(load, c.n_embd, c.n_head, 4 * c.n_embd)
    return total([*layer * c.n_layer, linear(load.tokens, c.n_embd, c.vocab_size)])


def mixtral(load: Load, c: Any) -> Truth:
    routing = {"num_experts": c.num_local_experts, "top_k": c.num_experts_per_tok}
    sparse = experts(load.tokens, c.hidden_size, c.intermediate_size, **routing)
    layer = [*grouped_query_attention(load, c), *sparse]
    return total([*layer * c.num_hidden_layers, linear(load.tokens, c.hidden_size, c.vocab_size)])


def qwen3_moe(load: Load, c: Any) -> Truth:
    """Layers named in `mlp_only_layers` are dense, the others sparse."""
    num_dense = len(c.mlp_only_layers)
    routing = {"num_experts": c.num_experts, "top_k": c.num_experts_per_tok}
    dense = gated_mlp(load.tokens, c.hidden_size, c.intermediate_size) * num_dense
    sparse = experts(load.tokens, c.hidden_size, c.moe_intermediate_size, **routing)
    mlps = [*dense, *sparse * (c.num_hidden_layers - num_dense)]
    attended = grouped_query_attention(load, c) * c.num_hidden_layers
    return total([*attended, *mlps, linear(load.tokens, c.hidden_size, c.vocab_size)])


def latent_attention(load: Load, c: Any) -> list[Product]:
    """DeepSeek's MLA as trained: latents are expanded to full heads before the scores (no weight absorption)."""
    qk_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
    shapes = [
        (c.hidden_size, c.q_lora_rank),
        (c.q_lora_rank, c.num_attention_heads * qk_dim),
        (c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim),
        (c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)),
        (c.num_attention_heads * c.v_head_dim, c.hidden_size),
    ]
    scores = attention(load.pairs, c.num_attention_heads, qk_dim, c.v_head_dim)
    return [*(linear(load.tokens, *shape) for shape in shapes), *scores]


def deepseek_v3(load: Load, c: Any) -> Truth:
    """The first layers are dense; the others add the shared experts, as one wider MLP, to the routed ones."""
    routing = {"num_experts": c.n_routed_experts, "top_k": c.num_experts_per_tok}
    dense = gated_mlp(load.tokens, c.hidden_size, c.intermediate_size)
    shared = gated_mlp(load.tokens, c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)
    sparse = [*experts(load.tokens, c.hidden_size, c.moe_intermediate_size, **routing), *shared]
    mlps = dense * c.first_k_dense_replace + sparse * (c.num_hidden_layers - c.first_k_dense_replace)
    attended = latent_attention(load, c) * c.num_hidden_layers
    return total([*attended, *mlps, linear(load.tokens, c.hidden_size, c.vocab_size)])


def sparse_attention(load: Load, chosen: int, length: int, c: Any) -> list[Product]:
    """DeepSeek's sparse attention (arXiv:2512.02556 section 2.1): latent attention to the keys that an indexer chose.

    The indexer's own products are small: a dot product for each of its heads and each open pair, and their weighted
    sum. It chooses without a gradient, so nothing of it has a backward pass. Exactly, query i has min(i, chosen) keys
    to attend to, and i open ones to choose among; in full, all of them.
    """
    exact = load.num_samples * sum(min(i, chosen) for i in range(1, length + 1))
    width = c.index_n_heads * c.index_head_dim
    shapes = [(c.q_lora_rank, width), (c.hidden_size, c.index_head_dim), (c.hidden_size, c.index_n_heads)]
    pairs = [Product(Both(*(2 * p * size for p in load.pairs)), num_grads=0) for size in (width, c.index_n_heads)]
    indexer = [*(linear(load.tokens, *shape, num_grads=0) for shape in shapes), *pairs]
    return [*indexer, *latent_attention(load._replace(pairs=Both(load.pairs.full, exact)), c)]


def deepseek_v32(load: Load, length: int, c: Any) -> Truth:
    """DeepSeek-V3 with sparse attention; also GLM-5."""
    tokens, width = load.tokens, c.hidden_size
    routing = {"num_experts": c.n_routed_experts, "top_k": c.num_experts_per_tok}
    dense = gated_mlp(tokens, width, c.intermediate_size)
    shared = gated_mlp(tokens, width, c.moe_intermediate_size * c.n_shared_experts)
    sparse = [*experts(tokens, width, c.moe_intermediate_size, **routing), *shared]
    mlps = dense * c.first_k_dense_replace + sparse * (c.num_hidden_layers - c.first_k_dense_replace)
    attended = sparse_attention(load, c.index_topk, length, c) * c.num_hidden_layers
    return total([*attended, *mlps, linear(tokens, width, c.vocab_size)])


def gated_delta_net(num_samples: int, length: int, c: Any, chunk: int = 64) -> list[Product]:
    """Linear attention by the gated delta rule (arXiv:2412.06464) in chunks, as transformers' own code has it.

    A solve of a triangular system of n rows for k columns is n^2 k FLOP (LAPACK Working Note 41); its backward is
    another solve and a product. The first state is a constant, and nobody reads the one after the last chunk.
    """
    tokens, heads = num_samples * length, c.linear_num_value_heads
    key, value = c.linear_num_key_heads * c.linear_key_head_dim, heads * c.linear_value_head_dim
    qk, v = c.linear_key_head_dim, c.linear_value_head_dim
    taps, num_chunks = c.linear_conv_kernel_dim, length // chunk
    matrices = num_samples * heads

    def each(rows: int, inner: int, columns: int, num_grads: int = 2, times: int = 1) -> Product:
        return unpadded(matrices * times * rows, inner, columns, num_grads)

    solves = [2 * matrices * num_chunks * chunk * chunk * columns // 2 for columns in (v, qk)]
    products = [
        unpadded(tokens, c.hidden_size, 2 * key + 2 * value),
        unpadded(tokens, c.hidden_size, 2 * heads),
        unpadded(num_samples * (length + taps - 1), taps, 2 * key + value),  # depthwise, and its end is cut off
        each(chunk, qk, chunk, times=2 * num_chunks),  # keys by keys, queries by keys
        *(Product(Both(flop, flop), num_grads=3) for flop in solves),
        each(chunk, chunk, v, times=num_chunks),
        unpadded(tokens, value, c.hidden_size),
    ]
    for i in range(num_chunks):
        products += [each(chunk, qk, v, num_grads=2 if i else 1)] * 2  # the state read by keys and by queries
        products += [each(qk, chunk, v, num_grads=2 if i < num_chunks - 1 else 0)]
    return products


def qwen3_next(load: Load, length: int, c: Any) -> Truth:
    """Three gated delta nets to each attention, whose queries come with gates; experts beside a gated shared one."""
    tokens, width, query = load.tokens, c.hidden_size, c.num_attention_heads * c.head_dim
    full = [*grouped_query_attention(load, c), linear(tokens, width, query)]
    delta = gated_delta_net(load.num_samples, length, c)
    mixers = [(full if (i + 1) % 4 == 0 else delta) for i in range(c.num_hidden_layers)]
    routing = {"num_experts": c.num_experts, "top_k": c.num_experts_per_tok}
    mlp = [
        *experts(tokens, width, c.moe_intermediate_size, **routing),
        *gated_mlp(tokens, width, c.shared_expert_intermediate_size),
        linear(tokens, width, 1),
    ]
    mixed = [product for mixer in mixers for product in mixer]
    return total([*mixed, *mlp * c.num_hidden_layers, linear(tokens, width, c.vocab_size)])


def mtp_gpt(lengths: Sequence[int], length: int, c: Any) -> Truth:
    """A GPT, and a module that sees all tokens but the first: a join of two states, a layer, the same head."""
    load, ahead = causal(lengths, length), causal([n - 1 for n in lengths], length - 1)
    layers = [*plain_layer(load, c.n_embd, c.n_head, 4 * c.n_embd)] * c.n_layer
    module = [linear(ahead.tokens, 2 * c.n_embd, c.n_embd), *plain_layer(ahead, c.n_embd, c.n_head, 4 * c.n_embd)]
    heads = [linear(part.tokens, c.n_embd, c.vocab_size) for part in (load, ahead)]
    return total([*layers, *module, *heads])


def dit(num_images: int, num_patches: int, c: Any) -> Truth:
    """Noise and time are data: the layers that read them owe no gradient to their input."""
    load, width = bidirectional([num_patches] * num_images, num_patches), c.hidden_size
    pixels = c.num_channels * c.patch_size**2
    block = [unpadded(num_images, width, 6 * width), *plain_layer(load, width, c.num_attention_heads, 4 * width)]
    return total([
        unpadded(num_images * num_patches, pixels, width, num_grads=1),
        unpadded(num_images, c.time_size, width, num_grads=1),
        unpadded(num_images, width, width),
        *block * c.num_hidden_layers,
        unpadded(num_images, width, 2 * width),
        unpadded(num_images * num_patches, width, pixels),
    ])  # fmt: skip


def quantized(num_rows: int, num_blocks: int, width: int, inner: int, rank: int) -> Truth:
    """Frozen weights pass a gradient on and get none; adapters have both; every block runs once more."""
    block = [
        product._replace(num_reruns=1)
        for inputs, outputs in ((width, inner), (inner, width))
        for product in (
            unpadded(num_rows, inputs, outputs, num_grads=1),
            unpadded(num_rows, inputs, rank),
            unpadded(num_rows, rank, outputs),
        )
    ]
    return total(block * num_blocks)


def unpadding(lengths: Sequence[int], c: Any) -> Truth:
    """Padding is gone before the first product. In one row, samples could attend to each other, and do not."""
    real = sum(lengths)
    load = Load(Both(real, real), Both(real * real, sum(n * n for n in lengths)), len(lengths))
    layer = plain_layer(load, c.hidden_size, c.num_attention_heads, c.intermediate_size)
    return total([*layer * c.num_hidden_layers, unpadded(real, c.hidden_size, c.num_labels)])


def llava(load: Load, text: Any, vision: Any) -> Truth:
    """CLIP's tower, whose last layer's result is not used (it has no gradient), two layers, and a Llama behind."""
    patches = (vision.image_size // vision.patch_size) ** 2
    images = bidirectional([patches + 1] * load.num_samples, patches + 1)
    layer = plain_layer(images, vision.hidden_size, vision.num_attention_heads, vision.intermediate_size)
    unused = [product._replace(num_grads=0) for product in layer]
    num_patches, pixels = load.num_samples * patches, 3 * vision.patch_size**2
    tower = [unpadded(num_patches, pixels, vision.hidden_size, 1), *layer * (vision.num_hidden_layers - 1), *unused]
    bridge = [unpadded(num_patches, size, text.hidden_size) for size in (vision.hidden_size, text.hidden_size)]
    return total([*tower, *bridge, *llama_products(load, text)])


Grid = tuple[int, int, int]
"""An image in patches: frames, rows, columns."""


def window_lengths(grid: Grid, merge: int, window: int) -> list[int]:
    """Patches in each attention window of an image; `window` counts merged cells, the last one of a side may be cut."""

    def sides(num_patches: int) -> list[int]:
        num_cells = num_patches // merge
        return [min(window, num_cells - start) * merge for start in range(0, num_cells, window)]

    frames, rows, columns = grid
    return [height * width for height in sides(rows) for width in sides(columns)] * frames


def qwen2_5_vision(grids: Sequence[Grid], c: Any) -> list[Product]:
    """Blocks attend within windows, those in `fullatt_block_indexes` within a frame; the merger joins merge^2."""
    frames = [rows * columns for times, rows, columns in grids for _ in range(times)]
    window = c.window_size // c.patch_size // c.spatial_merge_size
    windows = [n for grid in grids for n in window_lengths(grid, c.spatial_merge_size, window)]
    num_patches, merge, width = sum(frames), c.spatial_merge_size**2, c.hidden_size

    num_taps = c.in_channels * c.temporal_patch_size * c.patch_size**2
    products = [unpadded(num_patches, num_taps, width, num_grads=1)]
    for block in range(c.depth):
        num_pairs = sum(n * n for n in (frames if block in c.fullatt_block_indexes else windows))
        products += [unpadded(num_patches, width, 3 * width), unpadded(num_patches, width, width)]
        products += attention(Both(num_pairs, num_pairs), c.num_heads, width // c.num_heads, width // c.num_heads)
        products += gated_mlp(Both(num_patches, num_patches), width, c.intermediate_size)
    merger = [(merge * width, merge * width), (merge * width, c.out_hidden_size)]
    return [*products, *(unpadded(num_patches // merge, *shape) for shape in merger)]


def qwen2_5_vl(load: Load, grids: Sequence[Grid], text: Any, vision: Any) -> Truth:
    """A Llama-shaped decoder behind the vision tower; image tokens are among the load's tokens."""
    return total([*qwen2_5_vision(grids, vision), *llama_products(load, text)])


def bert(load: Load, c: Any) -> Truth:
    """With the pooler and a classifier on each sample's first token."""
    layer = plain_layer(load, c.hidden_size, c.num_attention_heads, c.intermediate_size)
    heads = [unpadded(load.num_samples, c.hidden_size, size) for size in (c.hidden_size, c.num_labels)]
    return total([*layer * c.num_hidden_layers, *heads])


def vit(num_images: int, c: Any) -> Truth:
    """Patches and one class token per image; the classifier reads the class token."""
    num_patches = (c.image_size // c.patch_size) ** 2
    load = bidirectional([num_patches + 1] * num_images, num_patches + 1)
    embedding = unpadded(num_images * num_patches, c.num_channels * c.patch_size**2, c.hidden_size, num_grads=1)
    layer = plain_layer(load, c.hidden_size, c.num_attention_heads, c.intermediate_size)
    return total([embedding, *layer * c.num_hidden_layers, unpadded(num_images, c.hidden_size, c.num_labels)])


class Conv(NamedTuple):
    """A convolution by what its count needs."""

    inputs: int
    outputs: int
    taps: int
    positions: int
    """Output positions; of a transposed convolution, the input positions."""
    groups: int = 1


def conv_net(num_images: int, convs: Sequence[Conv], num_labels: int) -> Truth:
    """Convolutions, a mean over positions, a linear head; the pixels need no gradient."""
    products = [
        unpadded(num_images * conv.positions, conv.inputs // conv.groups * conv.taps, conv.outputs, 2 if index else 1)
        for index, conv in enumerate(convs)
    ]
    return total([*products, unpadded(num_images, convs[-1].outputs, num_labels)])


def lstm(num_samples: int, length: int, c: Any) -> Truth:
    """Embedding as wide as the state, four gates per layer, a head on every step.

    The first state is a constant: the recurrent product of step 0 trains its weight but owes no gradient to the state.
    """
    num_tokens, gates = num_samples * length, 4 * c.hidden_size
    layer = [
        unpadded(num_tokens, c.hidden_size, gates),
        unpadded(num_samples, c.hidden_size, gates, num_grads=1),
        unpadded(num_tokens - num_samples, c.hidden_size, gates),
    ]
    return total([*layer * c.num_layers, unpadded(num_tokens, c.hidden_size, c.vocab_size)])


def attention_forward(load: Load, hidden: int, num_heads: int) -> Truth:
    """One attention block without training: projections, scores, output."""
    projections = [linear(load.tokens, hidden, hidden)] * 4
    scores = attention(load.pairs, num_heads, hidden // num_heads, hidden // num_heads)
    return total(product._replace(num_grads=0) for product in [*projections, *scores])


def gradient_penalty(num_samples: int, widths: Sequence[int]) -> Truth:
    """An MLP critic with smooth activations, whose loss holds the norm of d(out)/dx; x is a leaf that asks for it.

    Per layer z = h W, and in the first backward pass u = (grad of z) W^T: one product, no weight gradient. Backward
    then runs through u (its two operands) and through z (its two operands): five in all. The last layer has four:
    the first backward pass starts from a constant one, to which no gradient is owed.
    """
    *hidden, last = (unpadded(num_samples, *shape, num_grads=5) for shape in pairwise(widths))
    return total([*hidden, last._replace(num_grads=4)])

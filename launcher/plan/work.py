"""What a token costs in each layer on one rank: products, attention, bytes that pass through memory.

D width, H query heads, K key/value heads, E head width, F = d_ff, V vocabulary, S sequence length, tp ranks.
Everything is a function of the settings: no weights, no tensors.
"""

from dataclasses import dataclass

from megamodel.accounting import mean_keys
from megamodel.attention import GroupedAttention
from megamodel.config import LayerSettings, Model
from parallel.mesh import Group
from parallel.tensor import VocabularyShard


@dataclass(frozen=True)
class Product:
    """y (rows, n) = x (rows, k) W of one rank; `rows` for each token, `copies` matrices that are read."""

    k: float
    n: float
    rows: float = 1.0
    copies: int = 1

    @property
    def flops(self) -> float:
        """Of one token's forward pass; a multiplication and an addition count two."""
        return 2.0 * self.rows * self.k * self.n

    @property
    def moved(self) -> float:
        """Numbers of one token read and written, besides the weights."""
        return self.rows * (self.k + self.n)

    @property
    def weights(self) -> float:
        return self.copies * self.k * self.n


@dataclass(frozen=True)
class LayerWork:
    """One layer's forward pass on one rank, for each token.

    attention_flops: of causal attention (half of the square); scores: numbers of the score matrix, whole
    square, in memory only without a fused kernel; inner, outer: numbers that pointwise work reads and writes
    inside the tensor-parallel region, and outside, where sequence parallelism splits them.
    """

    products: tuple[Product, ...]
    attention_flops: float
    scores: float
    inner: float
    outer: float

    @property
    def product_flops(self) -> float:
        return sum(product.flops for product in self.products)


def block_work(model: Model, own: LayerSettings, *, length: int, tp: int) -> LayerWork:
    """A block. Pointwise passes: two norms and two sums over D, the rotation, the activation."""
    attention, width = own.attention, model.d_model
    heads = attention.n_heads / tp
    products = [*_attention_products(model, own, tp), *_feedforward_products(model, own, tp)]
    keys = mean_keys(length, attention.window)
    flops = 2.0 * heads * (attention.query_width + attention.value_width) * keys
    rotated = 2 * (heads + _kv_heads(own, tp)) * attention.query_width
    inner_width = _inner_width(model, own) / tp
    activated = (3 if model.feedforward.gated else 2) * inner_width
    return LayerWork(
        products=tuple(products),
        attention_flops=flops,
        scores=heads * length,
        inner=rotated + activated,
        outer=10.0 * width,
    )


def head_work(model: Model, *, tp: int) -> LayerWork:
    """Last norm, product with the vocabulary, loss: the logits are passed over five times in fp32."""
    rows = VocabularyShard(model.vocab_size, _group(tp)).true_rows
    return LayerWork((Product(model.d_model, rows),), 0.0, 0.0, inner=10.0 * rows, outer=2.0 * model.d_model)


def embedding_work(model: Model) -> LayerWork:
    """A look-up: read and written once."""
    return LayerWork((), 0.0, 0.0, 0.0, outer=2.0 * model.d_model)


def attention_elements(model: Model, own: LayerSettings, tp: int) -> float:
    return sum(p.k * p.n for p in _attention_products(model, own, tp))


def _group(tp: int) -> Group:
    return Group(tuple(range(tp)), 0, None)


def _kv_heads(own: LayerSettings, tp: int) -> float:
    return max(own.attention.n_kv_heads / tp, 1.0)


def _attention_products(model: Model, own: LayerSettings, tp: int) -> list[Product]:
    attention, width = own.attention, model.d_model
    output = attention.n_heads * attention.value_width / tp
    if isinstance(attention, GroupedAttention.Config):
        ingoing = (attention.n_heads / tp + 2 * _kv_heads(own, tp)) * attention.head_width
        return [Product(width, ingoing), Product(output, width)]
    rest = attention.matrix_elements(width) / tp - output * width
    return [Product(width, rest / width), Product(output, width)]


def _feedforward_products(model: Model, own: LayerSettings, tp: int) -> list[Product]:
    form, width = model.feedforward, model.d_model
    if own.experts is None:
        inner = form.d_ff / tp
        return [Product(width, inner * (form.matrices - 1)), Product(inner, width)]
    experts = own.experts
    local = max(experts.n_experts // tp, 1)
    rows = experts.top_k / tp  # a rank has whole experts, and their share of the tokens
    found = [
        Product(width, experts.n_experts),
        Product(width, experts.d_ff * (form.matrices - 1), rows, local),
        Product(experts.d_ff, width, rows, local),
    ]
    if experts.shared_d_ff:
        inner = experts.shared_d_ff / tp
        found += [Product(width, inner * (form.matrices - 1)), Product(inner, width)]
    return found


def _inner_width(model: Model, own: LayerSettings) -> float:
    if own.experts is None:
        return model.feedforward.d_ff
    return own.experts.top_k * own.experts.d_ff + own.experts.shared_d_ff

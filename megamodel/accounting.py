"""What a model has and what a token costs, from its settings alone.

D width, L layers, H query heads, K key/value heads, E head width, F = d_ff, V vocabulary, S sequence length.
"""

from dataclasses import dataclass

import torch

from megamodel.config import Model
from parallel.piece import pieces_of
from parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token's forward pass, a multiplication and an addition counting two.

    projections: q, k, v and output matrices; attention: scores and weighted values; feedforward; head: the
    product with the vocabulary. The embedding is a look-up; norms, activations and softmax are left out.
    """

    projections: float
    attention: float
    feedforward: float
    head: float

    @property
    def forward(self) -> float:
        return self.projections + self.attention + self.feedforward + self.head

    @property
    def training(self) -> float:
        """Forward and backward, where each product has two. Recomputation is no useful work: not counted."""
        return 3 * self.forward


def block_matrices(model: Model, layer: int = 0) -> tuple[int, int]:
    """Matrix elements that a token is multiplied with in one block: (attention, feed-forward).

    Of a mixture of experts those of the chosen, the shared ones and the router.
    """
    own, form, width = model.layer(layer), model.feedforward, model.d_model
    attention = own.attention.matrix_elements(width)
    if own.experts is None:
        return attention, width * form.matrices * form.d_ff
    experts = own.experts
    inner = experts.top_k * experts.d_ff + experts.shared_d_ff
    gate = 1 if experts.shared_gate and experts.shared_d_ff else 0
    return attention, width * (form.matrices * inner + experts.n_experts + gate)


def mean_keys(sequence_length: int, window: int | None) -> float:
    """Keys that a query sees on average: the area under the diagonal, cut at the window.

    S / 2 without a window; w (1 - w / 2S) with w < S. The boundaries of isolated documents are not counted.
    """
    width = sequence_length if window is None else min(window, sequence_length)
    return width * (1 - width / (2 * sequence_length))


def flops_per_token(model: Model, sequence_length: int) -> Flops:
    """FLOPs of one token in a sequence of S:

    forward = sum over layers of 2 (attention + feed-forward elements) + 2 H (query + value width) keys, and
    2 V D; keys = `mean_keys` of the layer's window; training = 3 forward. Grouped attention has 2 D (H + K) E
    elements, a feed-forward m D F, m = 3 when gated, else 2. Sparse patterns count as full attention.
    """
    projections = attention = feedforward = 0.0
    for number in range(model.n_layers):
        own = model.layer(number).attention
        in_attention, in_feedforward = block_matrices(model, number)
        projections += 2.0 * in_attention
        feedforward += 2.0 * in_feedforward
        keys = mean_keys(sequence_length, own.window)
        attention += 2.0 * own.n_heads * (own.query_width + own.value_width) * keys
    return Flops(projections, attention, feedforward, head=2.0 * model.vocab_size * model.d_model)


def cache_bytes(model: Model, *, rows: int, length: int, number_bytes: int) -> int:
    """Bytes that generation remembers: sum over layers of B min(T, w) c bytes, c = 2 K E, or MLA's latent."""
    entries = 0
    for own in model.layers:
        window = own.attention.window
        kept = length if window is None else min(length, window)
        entries += kept * own.attention.cached_width
    return rows * entries * number_bytes


def parameter_count(model: Model) -> int:
    """Parameters of the model: no vocabulary padding, tied embeddings once, no selection biases.

    Counted on the layers themselves, without memory; layers with the same settings once.
    """
    from megamodel.model import layers  # the model counts its own costs with this file

    total, blocks = 0, 0
    counted: dict[str, int] = {}
    seen: set[str] = set()
    with torch.device("meta"):
        for part in layers(model, seed=0, documents=False, parallel=TensorParallel()):
            if part.tied and part.apply is not None:
                continue
            own = model.layer(blocks) if part.is_block else None
            blocks += part.is_block
            key = f"block of {own}" if own is not None and not model.shares_over_layers else f"layer {blocks}"
            if key not in counted or own is None or model.shares_over_layers:
                counted[key] = _learned(part.build(), seen)
            total += counted[key]
    return total


def _learned(module: torch.nn.Module, seen: set[str]) -> int:
    """Elements of the trained logical tensors of a module that were not seen before."""
    trained = [p for p in module.parameters() if p.requires_grad]
    new = {piece.name: piece.numel for p in trained for piece in pieces_of(p) if piece.name not in seen}
    seen.update(new)
    return sum(new.values())

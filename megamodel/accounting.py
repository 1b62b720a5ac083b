"""What a model has and what a token costs, from its settings alone.

D width, L layers, H query heads, K key/value heads, E head width, F = d_ff, V vocabulary, S sequence length.
"""

from dataclasses import dataclass

from megamodel.config import Model

NORM_VECTORS = {"rmsnorm": 1, "layernorm": 2}  # learnt vectors of width D


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


def block_matrices(model: Model) -> tuple[int, int]:
    """Weights in the matrices of one block: (attention, feed-forward)."""
    attention, feedforward = model.attention, model.feedforward
    projections = 2 * (attention.n_heads + attention.n_kv_heads) * attention.head_width
    products = 3 if feedforward.gated else 2
    return model.d_model * projections, model.d_model * products * feedforward.d_ff


def mean_keys(sequence_length: int, window: int | None) -> float:
    """Keys that a query sees on average: the area under the diagonal, cut at the window.

    S / 2 without a window; w (1 - w / 2S) with w < S. The boundaries of isolated documents are not counted.
    """
    width = sequence_length if window is None else min(window, sequence_length)
    return width * (1 - width / (2 * sequence_length))


def flops_per_token(model: Model, sequence_length: int) -> Flops:
    """FLOPs of one token in a sequence of S:

    forward = 2 L (2 D (H + K) E + m D F) + 4 L H E keys + 2 V D, with m = 3 matrices when gated, else 2, and
    keys = `mean_keys`; training = 3 forward.
    """
    projections, feedforward = block_matrices(model)
    width = model.attention.n_heads * model.attention.head_width
    keys = mean_keys(sequence_length, model.attention.window)
    return Flops(
        projections=2.0 * model.n_layers * projections,
        attention=4.0 * model.n_layers * width * keys,
        feedforward=2.0 * model.n_layers * feedforward,
        head=2.0 * model.vocab_size * model.d_model,
    )


def parameter_count(model: Model) -> int:
    """Parameters of the model: no vocabulary padding, tied embeddings once."""
    norm = NORM_VECTORS[model.norm.kind] * model.d_model
    block = sum(block_matrices(model)) + 2 * norm
    vocabularies = 1 if model.tie_embeddings else 2
    return model.n_layers * block + norm + vocabularies * model.vocab_size * model.d_model

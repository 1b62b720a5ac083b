"""What autograd keeps of a forward pass, in bytes for each token of one rank. One small table an axis.

D width, H query heads, K key/value heads, E head width, F = d_ff, S sequence length, b bytes of a number; h,
k and f are this rank's shares. The tables follow the code of megamodel line by line; a test holds them
against what autograd saves. `kept` in a comment names what a number stands for.
"""

from dataclasses import dataclass

from launcher.plan.layout import Layout
from megamodel.activation import ActivationName
from megamodel.attend import QUERIES
from megamodel.attention import GroupedAttention
from megamodel.block import LAYOUTS
from megamodel.config import LayerSettings, Model
from megamodel.norm import Norm
from megamodel.position import Rope

# Tensors of width f kept by act(up) of a plain feed-forward, besides its output that the next product keeps.
PLAIN_KEPT: dict[ActivationName, int] = {
    "relu": 0,  # its output says where it was negative
    "identity": 0,
    "sigmoid": 0,
    "relu2": 1,
    "gelu": 1,
    "gelu_tanh": 1,
    "silu": 1,
    "elu": 1,
    "selu": 1,
}
GATED_KEPT = 4  # gate and up in one tensor, act(gate), their product
CLAMPED_KEPT = 7  # and the clamped branches, the sigmoid
INDEX_BYTES = 8  # of a token, a target, a position


@dataclass(frozen=True)
class Kept:
    """Bytes of one token. split: what sequence parallelism divides by tp."""

    whole: float = 0.0
    split: float = 0.0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.whole + other.whole, self.split + other.split)

    def on_rank(self, layout: Layout) -> float:
        return self.whole + self.split / (layout.tp if layout.sequence_parallel else 1)


def norm_kept(norm: Norm, width: float, b: int, *, input_known: bool = False) -> float:
    """kept: the input in fp32 (in fp32 itself the stream, which others may hold), x_hat before the gain, and
    one or two statistics a row."""
    statistics = 4 if norm.kind == "rmsnorm" else 8
    given = 0 if input_known and b == 4 else 4 * width
    hat = (b if norm.rounds_first else 4) * width if norm.gain else 0.0
    return given + hat + statistics


def attention_kept(model: Model, own: LayerSettings, length: int, layout: Layout, documents: bool) -> float:
    attention, b, tp, widens = own.attention, layout.number_bytes, layout.tp, layout.widens
    heads = attention.n_heads / tp
    if not isinstance(attention, GroupedAttention.Config):
        # Latent attention, roughly: compressed and expanded q, k, v, their rotated copies, the output.
        q, v = heads * attention.query_width, heads * attention.value_width
        return b * (3 * q + 2 * q + 2 * v + 2 * attention.cached_width) + 4 * heads
    keys, width = max(attention.n_kv_heads / tp, 1), attention.head_width
    is_fused, normed = not unfused(model, own), attention.qk_norm.scope != "none"
    product = b * (heads + 2 * keys) * width
    kept = product if is_fused or normed else 0.0  # of q, k and v, whole
    if normed:
        for count in (heads, keys):
            rows = count if attention.qk_norm.scope != "projection" else 1
            kept += norm_kept(attention.qk_norm.norm, count * width / rows, b, input_known=True) * rows
    kept += product if attention.clip is not None else 0.0
    turned = isinstance(own.position, Rope.Config)
    if isinstance(own.position, Rope.Config):
        kept += b * (heads + keys) * width if is_fused and not widens else 0.0  # rotated q and k
        kept += 4 * int(own.position.fraction * width)  # cosines and sines in fp32
    if not widens:
        return kept + scores_kept(model, own, length, b, heads, documents)
    # q, k and v in fp32 in the place of the product that nobody reads any more; the output in both.
    kept += 4 * (heads + 2 * keys) * width - (product if turned and is_fused and not normed else 0.0)
    return kept + b * heads * width + scores_kept(model, own, length, 4, heads, documents)


def unfused(model: Model, own: LayerSettings) -> bool:
    """Whether the scores go through memory: what no fused kernel computes."""
    capped, sinks = own.attention.softcap is not None, getattr(own.attention, "sinks", False)
    return capped or sinks or model.dropout.attention > 0


def scores_kept(
    model: Model, own: LayerSettings, length: int, b: int, heads: float, documents: bool
) -> float:
    """kept: the output and a sum a head. What is beyond torch's own attention keeps its scores where there is
    one block of queries, and makes them again where there are several; masks of windows; a bias."""
    attention, several = own.attention, length > QUERIES
    output = b * heads * attention.value_width
    joined = output if several else 0.0  # the blocks' outputs, and all of them in one
    if unfused(model, own):
        if several:
            return joined + output
        capped, dropped = attention.softcap is not None, model.dropout.attention > 0
        scores = 4.0 + (b if b < 4 or dropped else 0)  # the softmax, and as the product reads it
        scores += 4 * capped + dropped
        keys = heads * getattr(attention, "n_kv_heads", attention.n_heads) / attention.n_heads
        copies = b * (heads * attention.query_width + keys * (attention.query_width + attention.value_width))
        return output + copies + heads * length * scores + length  # and the mask
    if own.position.kind in ("alibi", "buckets"):
        summand = length * (b + 4) * heads if several else length * b * heads
        return output + 4 * heads + summand
    if attention.sparse == "none" and (attention.window is None or attention.window >= length):
        return output + 4 * heads + (output if documents else 0.0)  # each document's, and all in one
    return output + joined + 4 * heads + b * mean_block_keys(attention.window, length)


def mean_block_keys(window: int | None, length: int) -> float:
    """Keys in the mask of a query's block, on average over the queries of a row."""
    reach = length if window is None else window - 1
    blocks = [(first, min(first + QUERIES, length)) for first in range(0, length, QUERIES)]
    return sum((stop - max(first - reach, 0)) * (stop - first) for first, stop in blocks) / length


def feedforward_kept(model: Model, own: LayerSettings, b: int, tp: int) -> float:
    """kept: see the tables; of a mixture of experts the tokens that a rank's experts see, on average."""
    form = model.feedforward
    inner = PLAIN_KEPT[form.activation] + 1
    if form.gated:
        inner = GATED_KEPT if form.clamp is None else CLAMPED_KEPT
    if own.experts is None:
        return b * inner * form.d_ff / tp
    experts = own.experts
    rows = experts.top_k / tp
    routed = rows * (b * inner * experts.d_ff + b * 2 * model.d_model + 2 * INDEX_BYTES)
    return routed + b * inner * experts.shared_d_ff / tp + 3 * 4 * experts.n_experts


def block_kept(model: Model, own: LayerSettings, length: int, layout: Layout, *, documents: bool) -> Kept:
    """All of a block: its sublayers, the norms where they stand, and the inputs of its products."""
    b, form, width = layout.number_bytes, LAYOUTS[model.layout], model.d_model
    inner = attention_kept(model, own, length, layout, documents)
    inner += feedforward_kept(model, own, b, layout.tp)
    attended, fed = inputs_split(own)
    inputs = [attended and fed] if form.shared else [attended, fed]
    gathered = b * width * inputs.count(False)
    norms = form.norms * norm_kept(model.norm, width, b)
    if form.parallel and not form.shared:
        norms -= 4 * width if b == 4 else 0  # both read one stream
    return Kept(whole=inner + gathered, split=norms + b * width * inputs.count(True))


def inputs_split(own: LayerSettings) -> tuple[bool, bool]:
    """Whether only a rank's own tokens are kept of what attention and feed-forward read, and gathered again
    in backward: where one product alone reads it."""
    return isinstance(own.attention, GroupedAttention.Config), own.experts is None


def recomputed_kept(kept: Kept, model: Model, own: LayerSettings, layout: Layout) -> Kept:
    """What stays until backward: all; the input of the block; or, of an attention that is made again, its
    input beside the rest of the block."""
    b, form, width = layout.number_bytes, LAYOUTS[model.layout], model.d_model
    if layout.recompute == "block":
        return Kept(split=b * width)
    if layout.recompute != "attention":
        return kept
    rest = feedforward_kept(model, own, b, layout.tp)
    norms = (0 if form.shared else form.norms / 2) * norm_kept(model.norm, width, b)
    fed = Kept(split=b * width) if inputs_split(own)[1] else Kept(whole=b * width)
    return Kept(whole=rest, split=norms + b * width) + fed


def head_kept(model: Model, layout: Layout) -> Kept:
    """Last norm, input of the head's product, what the loss keeps of a row; the logits are counted apart."""
    b, width = layout.number_bytes, model.d_model
    norm = norm_kept(model.norm, width, b) if model.has_final_norm else 0.0
    return Kept(whole=b * width + 2 * INDEX_BYTES + 6, split=norm)

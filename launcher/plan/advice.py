"""Comments on a model's shape, by what published models agree on, and what serving it will cost.

D width, L layers, H query heads, K key/value heads, E head width, F = d_ff, T context, B rows at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.hardware import Machine
from launcher.plan.layout import NUMBER_BYTES, Precision
from megamodel.accounting import cache_bytes, parameter_count
from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.moe import Routed
from megamodel.optim import Optim

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, "Chinchilla": least computation for a loss
TOKENS_CAVEAT = (
    "Hoffmann et al. 2022; least computation for a loss. Models meant to be served are trained far beyond: "
    "Llama 3 8B on 15T tokens, 1,900 a parameter"
)


@dataclass(frozen=True)
class Comment:
    """One rule, what the model has, and whether it keeps it."""

    rule: str
    value: float
    usual: str
    kept: bool
    evidence: str


def comments(model: Model, optim: Optim) -> list[Comment]:
    """Every rule of the consensus that applies to the model."""
    return [*_widths(model), *_heads(model), *_practice(model, optim), *_experts(model)]


def _widths(model: Model) -> Iterator[Comment]:
    form, width = model.feedforward, model.d_model
    yield _within(
        "width / layers",
        width / model.n_layers,
        (100, 200),
        "GPT-3, Llama and PaLM lie between 100 and 200, mostly at 128 (Kaplan et al. 2020: flat there)",
    )
    if any(own.experts is None for own in model.layers):
        usual, kind = (8 / 3, "gated") if form.gated else (4.0, "plain")
        yield _within(
            "d_ff / width",
            form.d_ff / width,
            (1.0, 10.0),
            f"{usual:.3g} is the consensus for {kind} layers, 1 to 10 is safe; T5 11B had 64 and its version "
            "1.1 went back to 2.5",
        )


def _heads(model: Model) -> Iterator[Comment]:
    attention = model.attention
    yield _within(
        "heads x head width / width",
        attention.n_heads * attention.query_width / model.d_model,
        (0.5, 2.0),
        "nearly 1 in most models; T5 11B had 16, Gemma 2 9B has 1.14",
    )
    if isinstance(attention, GroupedAttention.Config):
        yield _within(
            "key/value heads / heads",
            attention.n_kv_heads / attention.n_heads,
            (1 / 8, 1 / 4),
            "H/8 to H/4: the cache shrinks as much at next to no loss (Ainslie et al. 2023)",
        )


def _practice(model: Model, optim: Optim) -> Iterator[Comment]:
    yield _within(
        "vocabulary",
        model.vocab_size,
        (30_000, 260_000),
        "30k to 50k for one language, 100k to 250k for many and code",
    )
    dropout = max(model.dropout.embedding, model.dropout.attention, model.dropout.residual)
    yield _within(
        "dropout", dropout, (0.0, 0.0), "0 in pretraining on data seen once (PaLM, Llama and since)"
    )
    decay = optim.weight_decay
    yield _within("weight decay", decay, (0.05, 0.2), "0.1 in GPT-3, Llama and most since")


def _experts(model: Model) -> Iterator[Comment]:
    if isinstance(model.experts, Routed):
        yield _within(
            "active / all experts",
            model.experts.top_k / model.experts.n_experts,
            (0.03, 0.125),
            "DeepSeek V3 0.031, Qwen3-30B 0.0625, OLMoE and gpt-oss-20b 0.125, Mixtral 0.25",
        )


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _within(rule: str, value: float, span: tuple[float, float], evidence: str) -> Comment:
    low, high = span
    usual = f"{low:,.4g}" if low == high else f"{number(low)} to {number(high)}"
    return Comment(rule, value, usual, low - 1e-9 <= value <= high + 1e-9, evidence)


def prefill_intensity(*, width: int, heads: int, length: int, rows: int, fused: bool) -> float:
    """Operations per number moved of an attention block with its projections, in training or prefill.

    1 / (H T / D^2 + 1 / (B T)) with the scores in memory (1 / E where T is about D), 1 / (1 / D + 1 / (B T))
    with a fused kernel.
    """
    first = 1 / width if fused else heads * length / width**2
    return 1 / (first + 1 / (rows * length))


def decode_intensity(model: Model, *, length: int, rows: int) -> float:
    """The same while one token at a time is written: 1 / (cache + 1 / B); 1 / D more is left out.

    cache, the mean over the layers: T K / (D H), which is T c / (2 D H E) with c = 2 K E numbers remembered
    of a token; T c / (2 D^2) of MLA's latent c. A window w leaves min(T, w) for T.
    """
    width, terms = model.d_model, []
    for own in model.layers:
        attention = own.attention
        kept = length if attention.window is None else min(length, attention.window)
        if isinstance(attention, GroupedAttention.Config):
            terms.append(kept * attention.n_kv_heads / (width * attention.n_heads))
        else:
            terms.append(kept * attention.cached_width / (2 * width**2))
    return 1 / (sum(terms) / len(terms) + 1 / rows)


def bottleneck(intensity: float, machine: Machine, precision: Precision) -> str:
    """compute or memory: which of the two binds at so many operations a number."""
    balance = machine.flops(precision) / machine.memory_bytes_per_second
    return "compute" if intensity / NUMBER_BYTES[precision] > balance else "memory"


@dataclass(frozen=True)
class Serving:
    """What a token of context costs later. Cache of one row; intensities in operations per number moved."""

    rows: int
    length: int
    cache_bytes_16_bit: int
    cache_bytes_of_token: int
    prefill_intensity: float
    prefill_bound_by: str
    decode_intensity: float
    decode_bound_by: str
    balance: float  # of the machine, operations per 16-bit number


def serving(model: Model, machine: Machine, *, length: int, rows: int) -> Serving:
    attention = model.attention
    prefill = prefill_intensity(
        width=model.d_model, heads=attention.n_heads, length=length, rows=rows, fused=True
    )
    decode = decode_intensity(model, length=length, rows=rows)
    return Serving(
        rows=rows,
        length=length,
        cache_bytes_16_bit=cache_bytes(model, rows=rows, length=length, number_bytes=2),
        cache_bytes_of_token=cache_bytes(model, rows=1, length=1, number_bytes=2),
        prefill_intensity=prefill,
        prefill_bound_by=bottleneck(prefill, machine, "bf16"),
        decode_intensity=decode,
        decode_bound_by=bottleneck(decode, machine, "bf16"),
        balance=2 * machine.bf16_flops / machine.memory_bytes_per_second,
    )


def active_parameters(model: Model) -> int:
    """Parameters without the experts that a token is not sent to."""
    total = parameter_count(model)
    form, width = model.feedforward, model.d_model
    for own in model.layers:
        if own.experts is not None:
            idle = own.experts.n_experts - own.experts.top_k
            biases = (form.matrices - 1) * own.experts.d_ff + width if form.bias else 0
            total -= idle * (form.matrices * width * own.experts.d_ff + biases)
    return total


def budget_tokens(model: Model) -> int:
    """Tokens of the least computation for a loss."""
    return TOKENS_PER_PARAMETER * active_parameters(model)

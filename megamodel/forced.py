"""Forms that a configuration forces on a model that could never use them: said before any work."""

from collections.abc import Iterator

from conf.typed import Problem
from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.kernels.config import Kernels
from megamodel.kernels.products import FLOAT8_MULTIPLE
from megamodel.moe import Routed
from megamodel.position import OWN, Alibi

GROUPED_MULTIPLE = 8  # rows of grouped products start at multiples of 16 bytes
FLEX_WIDTH = 16  # the narrowest head of flex_attention on a GPU
BIASED = (Alibi.Config, *OWN)  # positions that are added to the scores


def forced_problems(kernels: Kernels, model: Model, *, tp: int = 1) -> Iterator[Problem]:
    """What kernels forces and no layer of the model could use. Choosing by itself never comes to that."""
    reasons = {
        "attention": {"flex": not_in_flex, "sdpa": not_in_sdpa}.get(kernels.attention),
        "experts": not_in_groups if kernels.experts == "grouped" else None,
    }
    for name, reason in reasons.items():
        why = None if reason is None else reason(model)
        if why is not None:
            path = f"kernels.{name}"
            form = getattr(kernels, name)
            yield Problem(path, f"{path}={form} is not possible for this model: {why}; use {path}=auto")
    why = not_in_8_bit(model, tp) if kernels.products == "float8" else None
    if why is not None:
        yield Problem(
            "kernels.products",
            f"kernels.products=float8 multiplies what is a multiple of {FLOAT8_MULTIPLE} wide on each rank: "
            f"{why}; change it or use kernels.products=auto",
        )


def not_in_flex(model: Model) -> str | None:
    """Why flex_attention can compute no layer in training."""
    if all(isinstance(layer.position, BIASED) for layer in model.layers):
        kinds = " and ".join(sorted({layer.position.kind for layer in model.layers}))
        return f"positions of kind {kinds} are added to the scores, which flex_attention has no form of"
    if model.dropout.attention:
        return f"model.dropout.attention ({model.dropout.attention}) is unknown to flex_attention"
    width = min(model.attention.query_width, model.attention.value_width)
    if width < FLEX_WIDTH:
        return f"its heads are {width} wide, and flex_attention needs {FLEX_WIDTH}"
    return None


def not_in_sdpa(model: Model) -> str | None:
    """Why torch's own attention can compute no layer in training."""
    attention = model.attention
    found = {
        f"model.attention.softcap ({attention.softcap})": attention.softcap is not None,
        "model.attention.sinks (true)": isinstance(attention, GroupedAttention.Config) and attention.sinks,
        f"model.dropout.attention ({model.dropout.attention})": model.dropout.attention > 0,
    }
    names = [name for name, there in found.items() if there]
    return f"torch's own attention has no form of {', '.join(names)}" if names else None


def not_in_groups(model: Model) -> str | None:
    """Why grouped products cannot compute the experts; of a model without any they are never asked."""
    if not isinstance(model.experts, Routed):
        return None
    sizes = {"model.d_model": model.d_model, "model.experts.d_ff": model.experts.d_ff}
    odd = [f"{path} ({size})" for path, size in sizes.items() if size % GROUPED_MULTIPLE]
    return f"{' and '.join(odd)} must be a multiple of {GROUPED_MULTIPLE}" if odd else None


def not_in_8_bit(model: Model, tp: int) -> str | None:
    """Which widths keep the products of the dense layers in 16 bit; experts are never in 8 bit."""
    odd = [f"model.d_model is {model.d_model}"] if model.d_model % FLOAT8_MULTIPLE else []
    widths = {}
    if any(layer.experts is None for layer in model.layers):
        widths["model.feedforward.d_ff"] = model.feedforward.d_ff
    if isinstance(model.experts, Routed) and model.experts.shared_d_ff:
        widths["model.experts.shared_d_ff"] = model.experts.shared_d_ff
    # What tp does not divide at all is another problem's.
    odd += [
        f"{path} is {size}" + (f" over parallel.tp={tp}" if tp > 1 else "")
        for path, size in widths.items()
        if size % tp == 0 and size // tp % FLOAT8_MULTIPLE
    ]
    return " and ".join(odd) or None


def tokens_problem(kernels: Kernels, micro_batch: int, length: int) -> str | None:
    """The number of tokens is a side of the 8-bit product that makes a weight's gradient."""
    if kernels.products != "float8" or micro_batch * length % FLOAT8_MULTIPLE == 0:
        return None
    return (
        f"kernels.products=float8 needs micro-batches of a multiple of {FLOAT8_MULTIPLE} tokens, not of "
        f"train.micro_batch ({micro_batch}) x train.sequence_length ({length}); change one of them or use "
        "kernels.products=auto"
    )

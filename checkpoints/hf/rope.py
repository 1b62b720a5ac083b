"""Rotary settings between a config.json, with old names or new, and model.position."""

from collections.abc import Mapping
from typing import Any

from checkpoints.hf.fields import Fields
from megamodel import rope_scaling as scalings
from megamodel.position import Rope

KNOWN = {  # fields of one set of rope parameters, by type
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor"},
}
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
OLD_TYPES = {"su": "longrope", "mrope": "mrope"}


def rope_parameters(fields: Fields) -> dict[str, Any]:
    """One dictionary of what stands in rope_parameters, or under the old names beside it."""
    given = fields.take("rope_parameters", None) or {}
    old = fields.take("rope_scaling", None) or {}
    found = {**given, **old}
    theta = fields.take("rope_theta", None)
    theta = fields.take("rotary_emb_base", None) if theta is None else theta
    if theta is not None:
        found.setdefault("rope_theta", theta)
    for name in ("partial_rotary_factor", "rotary_pct", "rope_pct"):
        value = fields.take(name, None) if name in fields.raw else None
        if value is not None:
            found.setdefault("partial_rotary_factor", value)
    return found


def read_rope(
    parameters: Mapping[str, Any],
    *,
    theta: float,
    fraction: float = 1.0,
    pairs: str = "half",
    longest: int | None,
    original: int | None = None,
    nested: bool = False,
) -> dict[str, Any]:
    """model.position of one set of rope parameters. theta, fraction: defaults of the class.

    longest: max_position_embeddings; original: a field outside of the parameters that goes before them.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    kind = OLD_TYPES.get(kind, kind)
    if kind not in KNOWN:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported, only {', '.join(KNOWN)}")
    unknown = sorted(set(parameters) - KNOWN[kind] - ALWAYS)
    if unknown:
        raise ValueError(f"config.json: {', '.join(unknown)} of the {kind} rope parameters is not understood")
    length = original or parameters.get("original_max_position_embeddings") or longest
    position = {
        "kind": "rope",
        "base": float(parameters.get("rope_theta") or theta),
        "fraction": float(parameters.get("partial_rotary_factor") or fraction),
        "pairs": pairs,
    }
    if kind == "default":
        return position
    if kind == "dynamic":
        length = longest
    position["scaling"] = _scaling(kind, parameters, length, longest, nested)
    return position


def _scaling(
    kind: str, parameters: Mapping[str, Any], length: int | None, longest: int | None, nested: bool
) -> dict[str, Any]:
    factor = parameters.get("factor")
    if factor is None:
        assert longest is not None and length is not None
        factor = longest / length
    scaling: dict[str, Any] = {"kind": kind, "factor": float(factor)}
    if kind != "linear":
        scaling["original_length"] = length
    if kind == "yarn":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            scaling[name] = parameters.get(name)
        scaling["beta_fast"] = float(parameters.get("beta_fast") or 32)
        scaling["beta_slow"] = float(parameters.get("beta_slow") or 1)
        # transformers looks for truncate beside the layer types, where it never stands.
        scaling["truncate"] = True if nested else parameters.get("truncate", True)
    if kind == "llama3":
        scaling["low"] = float(parameters["low_freq_factor"])
        scaling["high"] = float(parameters["high_freq_factor"])
    if kind == "longrope":
        scaling["short"], scaling["long"] = parameters["short_factor"], parameters["long_factor"]
        scaling["attention_factor"] = parameters.get("attention_factor")
    return scaling


def write_rope(position: Rope.Config, *, partial: bool = True) -> dict[str, Any]:
    """The rope_parameters of model.position. partial: whether the family knows partial_rotary_factor."""
    scaling = position.scaling
    found: dict[str, Any] = {"rope_theta": position.base, "rope_type": "default"}
    if partial:
        found["partial_rotary_factor"] = position.fraction
    if isinstance(scaling, scalings.Unscaled):
        return found
    if isinstance(scaling, scalings.NtkScaling):
        raise ValueError(
            "model.position.scaling.kind=ntk has no name in transformers; raise the base instead"
        )
    found |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if not isinstance(scaling, scalings.LinearScaling | scalings.DynamicScaling):
        found["original_max_position_embeddings"] = scaling.original_length
    if isinstance(scaling, scalings.YarnScaling):
        optional = {n: getattr(scaling, n) for n in ("attention_factor", "mscale", "mscale_all_dim")}
        found |= {name: value for name, value in optional.items() if value is not None}
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        found["truncate"] = scaling.truncate
    if isinstance(scaling, scalings.Llama3Scaling):
        found |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if isinstance(scaling, scalings.LongRopeScaling):
        found |= {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
        if scaling.attention_factor is not None:
            found["attention_factor"] = scaling.attention_factor
    return found


def longest_length(position: Any) -> int | None:
    """max_position_embeddings as far as the positions say it."""
    scaling = getattr(position, "scaling", None)
    if isinstance(scaling, scalings.DynamicScaling):
        return scaling.original_length
    if isinstance(scaling, scalings.YarnScaling | scalings.Llama3Scaling | scalings.LongRopeScaling):
        return int(scaling.original_length * scaling.factor)
    return getattr(position, "max_positions", None)

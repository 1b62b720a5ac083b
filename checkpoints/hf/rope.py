"""Rotary settings between a config.json, with old names or new, and model.position."""

from collections.abc import Mapping
from dataclasses import dataclass
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
BASES = ("rope_theta", "rotary_emb_base")
SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")


@dataclass(frozen=True)
class RopeForm:
    """How a family turns. theta, fraction, absent: of the class, where config.json is silent.

    partial: whether the class rotates a part of a head where partial_rotary_factor says so; of the others
    many leave it unread. base, share: the fields beside rope_parameters that the class reads.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    pairs: str = "half"
    partial: bool = False
    base: str = "rope_theta"
    share: str = "partial_rotary_factor"
    absent: Mapping[str, Any] | None = None  # rope_parameters of the class


def rope_parameters(fields: Fields, form: RopeForm) -> dict[str, Any]:
    """One dictionary of rope_parameters, or of rope_scaling in its place, with what stands beside it.

    As in transformers, what stands inside goes before what stands beside. A field beside it that the class
    does not read is an error unless it says the same.
    """
    given, old = _mapping(fields, "rope_parameters"), _mapping(fields, "rope_scaling")
    found = dict(old or (form.absent or {} if given is None else given))
    for key, names, own, default in (
        ("rope_theta", BASES, form.base, form.theta),
        ("partial_rotary_factor", SHARES, form.share, form.fraction),
    ):
        beside = fields.take(own, default)
        found.setdefault(key, beside)
        for name in names:
            fields.agree(name, found[key], key)
    if found["partial_rotary_factor"] is None and not form.partial:
        found["partial_rotary_factor"] = 1.0
    if found["partial_rotary_factor"] != 1 and not form.partial:
        raise ValueError(
            f"config.json: partial_rotary_factor = {found['partial_rotary_factor']!r} is not supported for "
            f"{fields.family}, whose class in transformers rotates whole heads; only 1.0"
        )
    return found


def _mapping(fields: Fields, name: str) -> dict[str, Any] | None:
    value = fields.take(name, None)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"config.json: {name} = {value!r} is no JSON object")
    return value


def by_layer_type(
    fields: Fields, *, theta: float, local_theta: float, local_base: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rope parameters of global and of local layers, where the class keeps them by type of layer.

    local_base: the field beside them that is the local base. rope_theta and rope_scaling beside them are of
    the global layers alone, and rope_parameters without types of layers are not read at all.
    """
    given, old = _mapping(fields, "rope_parameters"), _mapping(fields, "rope_scaling")
    types = ("full_attention", "sliding_attention")
    strange = sorted(k for k, v in (given or {}).items() if k not in types or not isinstance(v, dict | None))
    if strange:
        raise ValueError(
            f"config.json: rope_parameters of {fields.family} have the keys {' and '.join(types)}, each with "
            f"an object; transformers does not read {', '.join(strange)} here"
        )
    plain: dict[str, Any] = {"rope_type": "default"}
    outer, inner = (plain | ((given or {}).get(name) or {}) for name in types)
    if old is not None:
        if "type" in old and "rope_type" not in old:
            raise ValueError(
                f"config.json: rope_scaling of {fields.family} needs rope_type; transformers does not read "
                "its type here"
            )
        outer |= old
    if "rope_theta" in fields.raw:
        outer.setdefault("rope_theta", fields.take("rope_theta"))
    if local_base is not None and local_base in fields.raw:
        inner.setdefault("rope_theta", fields.take(local_base))
    outer.setdefault("rope_theta", theta)
    inner.setdefault("rope_theta", local_theta)
    fields.taken.update(name for name in ("rope_theta", local_base) if name)
    for name in SHARES:
        fields.agree(name, 1.0, "partial_rotary_factor")
    for parameters in (outer, inner):
        if parameters.setdefault("partial_rotary_factor", 1.0) not in (1, None):
            raise ValueError(f"config.json: partial_rotary_factor of {fields.family} can only be 1.0")
        parameters["partial_rotary_factor"] = 1.0
    return outer, inner


def read_rope(
    parameters: Mapping[str, Any],
    *,
    pairs: str = "half",
    longest: int | None,
    original: int | None = None,
    nested: bool = False,
) -> dict[str, Any]:
    """model.position of one complete set of rope parameters.

    longest: max_position_embeddings; original: a field outside of the parameters that goes before them.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KNOWN:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported, only {', '.join(KNOWN)}")
    unknown = sorted(set(parameters) - KNOWN[kind] - ALWAYS)
    if unknown:
        raise ValueError(f"config.json: {', '.join(unknown)} of the {kind} rope parameters is not understood")
    position = {
        "kind": "rope",
        "base": _number(parameters, "rope_theta", kind),
        "fraction": _number(parameters, "partial_rotary_factor", kind),
        "pairs": pairs,
    }
    if kind == "default":
        return position
    if kind == "dynamic":
        length = longest
    else:
        length = original or parameters.get("original_max_position_embeddings") or longest
    position["scaling"] = _scaling(kind, parameters, length, longest, nested)
    return position


def _number(parameters: Mapping[str, Any], name: str, kind: str) -> float:
    """A number above 0; ValueError names what is missing or none."""
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        said = f"is {value!r}" if name in parameters else "is missing"
        raise ValueError(
            f"config.json: {name} of the {kind} rope parameters {said}; it must be a number above 0"
        )
    return float(value)


def _factors(parameters: Mapping[str, Any], name: str, kind: str) -> list[float]:
    value = parameters.get(name)
    if not isinstance(value, list) or not value:
        said = f"is {value!r}" if name in parameters else "is missing"
        raise ValueError(
            f"config.json: {name} of the {kind} rope parameters {said}; it must be a list of numbers"
        )
    return [_number({name: factor}, name, kind) for factor in value]


def _factor(kind: str, parameters: Mapping[str, Any], length: int | None, longest: int | None) -> float:
    """The factor; YaRN and LongRoPE take the ratio of the lengths where it is null."""
    if parameters.get("factor") is not None or kind not in ("yarn", "longrope"):
        return _number(parameters, "factor", kind)
    if longest is None or length is None:
        raise ValueError(
            f"config.json: the {kind} rope parameters have no factor, and without max_position_embeddings it "
            "cannot be guessed"
        )
    return longest / length


def _scaling(
    kind: str, parameters: Mapping[str, Any], length: int | None, longest: int | None, nested: bool
) -> dict[str, Any]:
    scaling: dict[str, Any] = {"kind": kind, "factor": _factor(kind, parameters, length, longest)}
    if kind != "linear":
        if length is None:
            raise ValueError(
                f"config.json: the {kind} rope parameters need max_position_embeddings, which is missing"
            )
        scaling["original_length"] = length
    if kind == "yarn":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            scaling[name] = parameters.get(name)
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            given = parameters.get(name)
            scaling[name] = _number(parameters, name, kind) if given else usual
        # transformers looks for truncate beside the layer types, where it never stands.
        scaling["truncate"] = True if nested else parameters.get("truncate", True)
    if kind == "llama3":
        scaling["low"] = _number(parameters, "low_freq_factor", kind)
        scaling["high"] = _number(parameters, "high_freq_factor", kind)
    if kind == "longrope":
        scaling["short"] = _factors(parameters, "short_factor", kind)
        scaling["long"] = _factors(parameters, "long_factor", kind)
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

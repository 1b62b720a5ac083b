"""What one family of transformers is: a table of fields and a table of tensors, read in both directions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from checkpoints.hf.fields import Fields, get, put
from checkpoints.hf.rope import RopeForm, longest_length, read_rope, rope_parameters, write_rope
from conf.schema import plain
from conf.typed import InvalidConfiguration, parse
from megamodel.config import Model
from megamodel.position import Rope

ACTIVATIONS = {  # their names -> ours
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "linear": "identity",
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Family:
    """One family. fields: theirs -> path in the model; constants: path -> what all its models have.

    only: fields that other values would need more for. defaults: of the class, where config.json is silent.
    read and write: what is not one to one. windows: the window of each layer.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    tensors: Callable[[Model], dict[str, Any]]  # theirs -> ours, see checkpoints.hf.tensors.rules
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str | None = "hidden_act"
    kv_heads: str | None = "num_key_value_heads"
    head_dim: bool = True  # whether the class knows head_dim
    rope: RopeForm | None = None
    longest: str | None = "max_position_embeddings"
    windows: Callable[[Fields, int], list[int | None]] | None = None
    write_windows: Callable[[list[int | None], dict[str, Any]], None] | None = None
    read: Callable[[Fields, dict[str, Any]], None] | None = None
    write: Callable[[Model, dict[str, Any]], None] | None = None
    silent: tuple[str, ...] = ()  # fields that have no effect on the logits in transformers
    agree: Mapping[str, str] = field(default_factory=dict)  # unread there -> the read field that it repeats
    aliases: Mapping[str, str] = field(default_factory=dict)  # attribute_map of the class
    prefix: str = ""  # of names, which old files leave out
    ignored: tuple[str, ...] = ()  # regular expressions of tensors that are not learned

    def model(self, config: Mapping[str, Any]) -> Model:
        """The settings of a config.json; ValueError names what is not understood."""
        fields = Fields(self.model_type, config, self.defaults, self.aliases)
        try:
            return self._model(fields)
        except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise ValueError(
                f"config.json of a {self.model_type} model has a value of the wrong kind, {fields.last} or "
                f"one beside it: {type(error).__name__}: {error}"
            ) from error

    def _model(self, fields: Fields) -> Model:
        raw: dict[str, Any] = {}
        for path, value in self.constants.items():
            put(raw, path, value)
        for name, path in self.fields.items():
            put(raw, path, fields.take(name))
        for name, allowed in self.only.items():
            fields.only(name, allowed)
        fields.taken.update(self.silent)
        if self.activation is not None:
            put(raw, "feedforward.activation", _activation(fields.take(self.activation)))
        if raw["attention"].get("kind", "grouped") == "grouped":
            _heads(self, fields, raw)
        longest = fields.take(self.longest, None) if self.longest else None
        if self.rope is not None:
            raw["position"] = read_rope(
                rope_parameters(fields, self.rope), pairs=self.rope.pairs, longest=longest
            )
        if self.read is not None:
            self.read(fields, raw)
        if self.windows is not None:
            _by_layer(raw, self.windows(fields, raw["n_layers"]))
        for name, read in self.agree.items():
            fields.agree(name, fields.take(read, None), read)
        fields.finish()
        try:
            return parse(Model, raw)
        except InvalidConfiguration as error:
            raise ValueError(f"config.json does not describe a model that there is: {error}") from error

    def config(self, model: Model, *, context: int | None = None) -> dict[str, Any]:
        """The config.json of the settings; ValueError when the family cannot say all of them."""
        config: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for name, path in self.fields.items():
            config[name] = _jsonable(get(model, path))
        for name, allowed in self.only.items():
            if name in self.defaults and self.defaults[name] not in allowed:
                config[name] = allowed[0]
        if self.activation is not None:
            names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
            config[self.activation] = names[model.feedforward.activation]
        if self.kv_heads is not None:
            config[self.kv_heads] = model.attention.n_kv_heads
        if self.head_dim:
            config["head_dim"] = model.attention.query_width
        if self.longest:
            config[self.longest] = context or longest_length(model.position) or 4096
        if self.rope is not None and isinstance(model.position, Rope.Config):
            config["rope_parameters"] = write_rope(model.position, partial=self.rope.partial)
            if isinstance(longest_length(model.position), int) and model.position.scaling.kind == "dynamic":
                config[self.longest or ""] = longest_length(model.position)
        if self.write_windows is not None:
            self.write_windows([layer.attention.window for layer in model.layers], config)
        if self.write is not None:
            self.write(model, config)
        self._check(model, config)
        return config

    def _check(self, model: Model, config: dict[str, Any]) -> None:
        """Reading it again must give the same model: nothing is lost in silence."""
        again = self.model(config)
        differences = sorted(_different(canonical(model), canonical(again)))
        if differences:
            raise ValueError(
                f"a {self.model_type} model of transformers cannot have this architecture: "
                f"{'; '.join(differences)}"
            )


def _jsonable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: the activation {name!r} is not supported, only {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _heads(family: Family, fields: Fields, raw: dict[str, Any]) -> None:
    """Key/value heads and head width, with what they default to."""
    for path in ("d_model", "n_layers", "attention.n_heads"):
        value = reduce(dict.__getitem__, path.split("."), raw)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = next((theirs for theirs, ours in family.fields.items() if ours == path), path)
            raise ValueError(f"config.json: {name} = {value!r} must be a whole number of at least 1")
    heads = raw["attention"]["n_heads"]
    kv = fields.take(family.kv_heads, None) if family.kv_heads else None
    raw["attention"].setdefault("n_kv_heads", heads if kv is None else kv)
    width = fields.take("head_dim", None) if family.head_dim else None
    if width is None:
        if raw["d_model"] % heads:
            raise ValueError(f"config.json: hidden size {raw['d_model']} is no multiple of {heads} heads")
        width = raw["d_model"] // heads
    raw["attention"]["head_width"] = width


def _by_layer(raw: dict[str, Any], windows: list[int | None]) -> None:
    """Windows, and the positions that are listed by layer or given by type of layer."""
    positions = raw.pop("positions", [None] * len(windows))
    own = (raw.pop("local_position", None), raw.pop("global_position", None))
    for i, window in enumerate(windows):
        position = own[window is None]
        if position is not None and position != raw["position"]:
            positions[i] = position
    layered(raw, windows, positions)


def layered(raw: dict[str, Any], windows: list[int | None], positions: list[Any]) -> None:
    """Windows and positions (None: raw's) of each layer as attention.window, or as kinds and a pattern."""
    layers = list(zip(windows, positions, strict=True))
    distinct = [pair for i, pair in enumerate(layers) if pair not in layers[:i]]
    if len(distinct) == 1:
        raw["attention"]["window"] = distinct[0][0]
        if distinct[0][1] is not None:
            raw["position"] = distinct[0][1]
        return
    names: list[str] = []
    for window, _ in distinct:
        name = "global" if window is None else "local"
        names.append(name if name not in names else f"{name}{len(names)}")
    raw["kinds"] = {
        name: {"window": window, "position": position}
        for name, (window, position) in zip(names, distinct, strict=True)
    }
    kinds = [names[distinct.index(pair)] for pair in layers]
    period = next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    raw["pattern"] = kinds[:period]


def layer_types(fields: Fields, n_layers: int, window: int | None) -> list[int | None] | None:
    """The window of each layer where config.json lists the layers' types; None where it does not.

    window: of the sliding layers; None where the class has none, by sliding_window or use_sliding_window.
    """
    types = fields.take("layer_types", None)
    if types is None:
        return None
    unknown = set(types) - {LOCAL, GLOBAL} if isinstance(types, list) else ()
    if not isinstance(types, list) or unknown or len(types) != n_layers:
        raise ValueError(f"config.json: layer_types {types} must be {n_layers} of {LOCAL} or {GLOBAL}")
    if LOCAL in types and window is None:
        if fields.raw.get("sliding_window") is None:
            raise ValueError("config.json: layer_types has sliding layers, but sliding_window is null")
        raise ValueError("config.json: layer_types has sliding layers, but use_sliding_window is false")
    return [window if kind == LOCAL else None for kind in types]


def types_of(windows: list[int | None]) -> list[str]:
    """The inverse of `layer_types`."""
    return [GLOBAL if window is None else LOCAL for window in windows]


def one_window(windows: list[int | None]) -> int | None:
    """The window of all layers that have one; ValueError when there are two."""
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"transformers has one window for all layers, this model has {sorted(sizes)}")
    return next(iter(sizes), None)


TRAINING_ONLY = ("dropout", "initial", "z_loss")
EXPERTS_TRAINING = ("balance_loss", "balance", "router_z_loss", "selection_bias_rate")


def canonical(model: Model) -> dict[str, Any]:
    """All that decides about the logits, as plain values that are equal when the function is."""
    found = plain(model)
    for name in (*TRAINING_ONLY, "pattern", "kinds", "attention", "position"):
        del found[name]
    for name in EXPERTS_TRAINING:
        found["experts"].pop(name, None)
    found["norm"] |= {"bias": model.norm.has_bias, "rounding": model.norm.rounds_first}
    absolute = model.position.kind in ("learned", "sinusoidal")
    found["absolute"] = plain(model.position) if absolute else None
    found["layers"] = []
    for layer in model.layers:
        own = {"attention": plain(layer.attention), "dense": layer.experts is None}
        own["position"] = {"kind": "none"} if absolute else plain(layer.position)
        if layer.attention.scale is None:
            own["attention"]["scale"] = layer.attention.query_width**-0.5
        found["layers"].append(own)
    return found


def _different(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two plain trees differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        missing = object()
        keys = [*a, *(key for key in b if key not in a)]
        return [
            line
            for key in keys
            for line in _different(a.get(key, missing), b.get(key, missing), f"{path}.{key}".lstrip("."))
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            line for i, pair in enumerate(zip(a, b, strict=True)) for line in _different(*pair, f"{path}.{i}")
        ]
    if a == b:
        return []
    if isinstance(a, int | float) and isinstance(b, int | float) and math.isclose(a, b, rel_tol=1e-9):
        return []
    return [f"{path} is {a} here and would become {b}"]

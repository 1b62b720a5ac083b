"""Families that descend from Llama: RMSNorm, gated feed-forward, rotary positions."""

from typing import Any

from checkpoints.hf.families.names import (
    ATTENTION,
    DENSE,
    DOUBLE,
    ENDS,
    GATE_AND_UP,
    GATED,
    OUTPUT,
    PRE,
    QK_NORM,
    RMS,
    TIED,
    USUAL,
    table,
)
from checkpoints.hf.family import LOCAL, Family, layer_types, one_window, types_of
from checkpoints.hf.fields import Fields, put
from checkpoints.hf.rope import RopeForm, by_layer_type, longest_length, read_rope, write_rope
from megamodel.config import Model
from megamodel.position import Position, Rope


def both_biases(fields: Fields, raw: dict[str, Any]) -> None:
    """attention_bias stands for q, k, v and the output."""
    bias = fields.take("attention_bias", False)
    raw["attention"] |= {"bias": bias, "output_bias": bias}


def write_both_biases(model: Model, config: dict[str, Any]) -> None:
    config["attention_bias"] = model.attention.bias  # type: ignore[union-attr]


def same_window(default: int | None) -> Any:
    """sliding_window on every layer."""

    def read(fields: Fields, n_layers: int) -> list[int | None]:
        return [fields.take("sliding_window", default)] * n_layers

    return read


def write_same_window(windows: list[int | None], config: dict[str, Any]) -> None:
    config["sliding_window"] = one_window(windows)


def qwen_windows(fields: Fields, n_layers: int) -> list[int | None]:
    """Layers from max_window_layers on, if any at all, unless layer_types says which."""
    window = fields.take("sliding_window", 4096)
    window = window if fields.take("use_sliding_window", False) else None
    first = fields.take("max_window_layers", 28)
    listed = layer_types(fields, n_layers, window)
    return listed or [window if window is not None and i >= first else None for i in range(n_layers)]


def write_typed_windows(windows: list[int | None], config: dict[str, Any]) -> None:
    """The types of the layers and their one window."""
    window = one_window(windows)
    config |= {"sliding_window": window, "layer_types": types_of(windows)}
    config["use_sliding_window"] = window is not None


PERIODS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")


def patterned(period: int, *, default: int = 4096, named: bool = False) -> Any:
    """Every period-th layer global, the others local, unless layer_types says which.

    named: whether the class reads sliding_window_pattern. Where types of layers are listed it reads no
    period at all, and what its own files repeat there is left alone.
    """

    def read(fields: Fields, n_layers: int) -> list[int | None]:
        window = fields.take("sliding_window", default)
        listed = layer_types(fields, n_layers, window)
        if listed is not None and named:
            fields.taken.update(PERIODS)
        every = fields.count("sliding_window_pattern", period) if named and listed is None else period
        for name in PERIODS:
            fields.agree(name, every, "the period of global layers")
        return listed or [window if (i + 1) % every else None for i in range(n_layers)]

    return read


def write_layer_types(windows: list[int | None], config: dict[str, Any]) -> None:
    """The types of the layers and their one window, for classes that need one even if no layer slides."""
    config |= {"sliding_window": one_window(windows) or 4096, "layer_types": types_of(windows)}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={**DENSE, **RMS, "mlp_bias": "feedforward.bias"},
    defaults={**USUAL, "rms_norm_eps": 1e-6, "mlp_bias": False},
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(),
    read=both_biases,
    write=write_both_biases,
    only={"is_llama_config": (True,), "rope_interleaved": (False,)},  # in SmolLM2's files, read by nobody
    ignored=(r".*rotary_emb\.inv_freq",),
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**USUAL, "rms_norm_eps": 1e-6, "num_key_value_heads": 8},
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(),
    windows=same_window(4096),
    write_windows=write_same_window,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**USUAL, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    constants={"attention.bias": True},
    only={"use_mrope": (False,)},  # in Qwen2.5's files, read by nobody
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(),
    windows=qwen_windows,
    write_windows=write_typed_windows,
)


def _qwen3(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    put(raw, "attention.qk_norm", {"scope": "head", "norm": {"eps": raw["norm"]["eps"]}})


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**USUAL, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
    tensors=table(ENDS, ATTENTION, QK_NORM, GATED, PRE),
    rope=RopeForm(),
    windows=qwen_windows,
    write_windows=write_typed_windows,
    read=_qwen3,
    write=write_both_biases,
)
GEMMA_NORM = {"norm.offset": 1.0, "norm.rounding": "after_gain"}


def _gemma(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    fields.only("use_bidirectional_attention", (None, False))
    put(raw, "embedding.scale", raw["d_model"] ** 0.5)


def _gemma1(fields: Fields, raw: dict[str, Any]) -> None:
    _gemma(fields, raw)
    fields.only("hidden_activation", (None, "gelu_pytorch_tanh"))
    if raw["feedforward"]["activation"] == "gelu":  # the first release said so and meant its tanh form
        put(raw, "feedforward.activation", "gelu_tanh")


def _gemma_scaled(fields: Fields, raw: dict[str, Any]) -> None:
    _gemma(fields, raw)
    put(raw, "attention.scale", fields.take("query_pre_attn_scalar", 256) ** -0.5)


def _write_scaled(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    scale = model.attention.scale
    scalar = model.attention.query_width if scale is None else scale**-2
    config["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar


GEMMA_USUAL = {
    **TIED,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
}
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**GEMMA_USUAL, "num_key_value_heads": 16},
    constants=GEMMA_NORM,
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(),
    read=_gemma1,
    write=write_both_biases,
)


def _gemma2(fields: Fields, raw: dict[str, Any]) -> None:
    _gemma_scaled(fields, raw)
    put(raw, "attention.softcap", fields.take("attn_logit_softcapping", 50.0))
    put(raw, "logits.softcap", fields.take("final_logit_softcapping", 30.0))


def _write_gemma2(model: Model, config: dict[str, Any]) -> None:
    _write_scaled(model, config)
    config["attn_logit_softcapping"] = model.attention.softcap
    config["final_logit_softcapping"] = model.logits.softcap


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**GEMMA_USUAL, "num_key_value_heads": 4},
    constants={**GEMMA_NORM, "layout": "double"},
    only={"hidden_act": ("gelu_pytorch_tanh",)},
    agree={"sliding_window_size": "sliding_window"},  # in Gemma 2's first files, beside it
    tensors=table(ENDS, ATTENTION, GATED, DOUBLE),
    activation="hidden_activation",
    rope=RopeForm(),
    windows=patterned(2),
    write_windows=write_layer_types,
    read=_gemma2,
    write=_write_gemma2,
)


def read_by_layer_type(
    fields: Fields, raw: dict[str, Any], *, theta: float, local_theta: float, local_base: str | None = None
) -> None:
    """Rotary positions by type of layer."""
    longest = fields.take("max_position_embeddings", None)
    sets = by_layer_type(fields, theta=theta, local_theta=local_theta, local_base=local_base)
    for name, parameters in zip(("position", "local_position"), sets, strict=True):
        raw[name] = read_rope(parameters, longest=longest, nested=True)


def write_by_layer_type(model: Model, config: dict[str, Any]) -> None:
    """The rotary parameters of local and global layers."""
    found: dict[str, Any] = {}
    for layer in model.layers:
        if not isinstance(layer.position, Rope.Config):
            raise ValueError("a layer without rotary positions has no place in this family")
        name = "full_attention" if layer.attention.window is None else LOCAL
        values = write_rope(layer.position, partial=False)
        if found.setdefault(name, values) != values:
            raise ValueError(f"{name} layers have different positions, which this family cannot say")
    for name in ("full_attention", LOCAL):
        found.setdefault(name, next(iter(found.values())))
    config["rope_parameters"] = found
    lengths = {layer.position.scaling.kind: longest_length(layer.position) for layer in model.layers}  # type: ignore[union-attr]
    longest = lengths.get("dynamic") or max([n for n in lengths.values() if n], default=None)
    config["max_position_embeddings"] = longest or config["max_position_embeddings"]


def _gemma3(fields: Fields, raw: dict[str, Any]) -> None:
    _gemma_scaled(fields, raw)
    fields.take("attn_logit_softcapping", None)  # transformers has it, and never uses it
    put(raw, "logits.softcap", fields.take("final_logit_softcapping", None))
    norm = {"eps": raw["norm"]["eps"], "offset": 1.0, "rounding": "after_gain"}
    put(raw, "attention.qk_norm", {"scope": "head", "norm": norm})
    read_by_layer_type(fields, raw, theta=1e6, local_theta=1e4, local_base="rope_local_base_freq")


def _write_gemma3(model: Model, config: dict[str, Any]) -> None:
    _write_scaled(model, config)
    config["final_logit_softcapping"] = model.logits.softcap
    write_by_layer_type(model, config)


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**GEMMA_USUAL, "num_key_value_heads": 4},
    constants={**GEMMA_NORM, "layout": "double"},
    tensors=table(ENDS, ATTENTION, QK_NORM, GATED, DOUBLE),
    activation="hidden_activation",
    windows=patterned(6, named=True),
    write_windows=write_layer_types,
    read=_gemma3,
    write=_write_gemma3,
)


def _olmo2(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    norm = {"eps": raw["norm"]["eps"], "rounding": "after_gain"}
    put(raw, "attention.qk_norm", {"scope": "projection", "norm": norm})


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**USUAL, "rms_norm_eps": 1e-5},
    constants={"layout": "output", "norm.rounding": "after_gain"},
    tensors=table(ENDS, ATTENTION, QK_NORM, GATED, OUTPUT),
    rope=RopeForm(),
    read=_olmo2,
    write=write_both_biases,
)


def _olmo3(fields: Fields, raw: dict[str, Any]) -> None:
    _olmo2(fields, raw)
    read_by_layer_type(fields, raw, theta=5e5, local_theta=5e5)


def _write_olmo3(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    write_by_layer_type(model, config)


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fields={**DENSE, **RMS},
    defaults={**USUAL, "rms_norm_eps": 1e-5},
    constants={"layout": "output", "norm.rounding": "after_gain"},
    tensors=table(ENDS, ATTENTION, QK_NORM, GATED, OUTPUT),
    windows=patterned(4),
    write_windows=write_layer_types,
    read=_olmo3,
    write=_write_olmo3,
)


def _rotated(fields: Fields, n_layers: int) -> list[Any]:
    """Which layers of a SmolLM3 turn: those listed, or all but every no_rope_layer_interval-th."""
    every = fields.count("no_rope_layer_interval", 4)
    listed = fields.take("no_rope_layers", None)
    rotated = [(i + 1) % every != 0 for i in range(n_layers)] if listed is None else listed
    if not isinstance(rotated, list) or len(rotated) != n_layers:
        raise ValueError(
            f"config.json: no_rope_layers = {rotated!r} must be a list of {n_layers}, one a layer"
        )
    return rotated


def _smollm3(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    raw["positions"] = [None if turns else {"kind": "none"} for turns in _rotated(fields, raw["n_layers"])]


def _smollm3_windows(fields: Fields, n_layers: int) -> list[int | None]:
    """Windows on the layers that do not turn, if any at all, unless layer_types says which."""
    window = fields.take("sliding_window", None)
    window = window if fields.take("use_sliding_window", False) else None
    listed = layer_types(fields, n_layers, window)
    return listed or [None if turns else window for turns in _rotated(fields, n_layers)]


def _write_smollm3(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    positions = [layer.position for layer in model.layers]
    config["no_rope_layers"] = [int(not isinstance(p, Position.Config)) for p in positions]
    turned = next((p for p in positions if isinstance(p, Rope.Config)), None)
    if turned is not None:
        config["rope_parameters"] = write_rope(turned, partial=False)


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields={**DENSE, **RMS, "mlp_bias": "feedforward.bias"},
    defaults={**TIED, "rms_norm_eps": 1e-6, "mlp_bias": False, "num_key_value_heads": 4},
    silent=("max_window_layers",),  # in SmolLM3's files; its class goes by layer_types alone
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(theta=2e6),
    windows=_smollm3_windows,
    write_windows=write_typed_windows,
    read=_smollm3,
    write=_write_smollm3,
)


def _granite(fields: Fields, raw: dict[str, Any]) -> None:
    both_biases(fields, raw)
    put(raw, "logits.scale", 1.0 / fields.take("logits_scaling", 1.0))


def _write_granite(model: Model, config: dict[str, Any]) -> None:
    write_both_biases(model, config)
    config["logits_scaling"] = 1.0 / model.logits.scale
    if model.attention.scale is None:
        config["attention_multiplier"] = model.attention.query_width**-0.5


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields={
        **DENSE,
        **RMS,
        "mlp_bias": "feedforward.bias",
        "embedding_multiplier": "embedding.scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
    },
    defaults={
        **USUAL,
        "rms_norm_eps": 1e-6,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    tensors=table(ENDS, ATTENTION, GATED, PRE),
    rope=RopeForm(),
    read=_granite,
    write=_write_granite,
)
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields={**DENSE, **RMS, "attention_bias": "attention.bias"},
    defaults={
        **USUAL,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
    },
    constants={"layout": "double"},
    tensors=table(
        ENDS,
        ATTENTION,
        GATE_AND_UP,
        {
            "model.layers.{i}.input_layernorm.*": "blocks.{i}.attention_norm.*",
            "model.layers.{i}.post_self_attn_layernorm.*": "blocks.{i}.attention_output_norm.*",
            "model.layers.{i}.post_attention_layernorm.*": "blocks.{i}.feedforward_norm.*",
            "model.layers.{i}.post_mlp_layernorm.*": "blocks.{i}.feedforward_output_norm.*",
        },
    ),
    rope=RopeForm(fraction=0.5, pairs="interleaved", partial=True),
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, OLMO2, OLMO3, SMOLLM3, GRANITE, GLM4)

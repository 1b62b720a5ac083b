"""What a CPU runs against definitions in fp64: norms, rotations, activations, and every gradient of them.

B batch, S sequence length, H heads, E head width.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conf.typed import parse
from megamodel.feedforward import FeedForward
from megamodel.kernels import reference
from megamodel.norm import ProjectionNorm
from parallel.mesh import SINGLE
from parallel.tensor import Heads, TensorParallel
from tests.megamodel.kernels import exact, plain
from tests.megamodel.kernels.agreement import BF16, DTYPES, FP32, agree, close, leaf, norm_options
from tests.megamodel.kernels.plain import Turn, documents, draw, limit, vectors

# Norms ------------------------------------------------------------------------------------------------------

FORMS = pytest.mark.parametrize(
    ("kind", "offset", "rounds_first", "gain", "bias"),
    [
        ("rmsnorm", 0.0, True, True, False),
        ("rmsnorm", 1.0, False, True, False),
        ("rmsnorm", 0.0, True, True, True),
        ("rmsnorm", 0.0, True, False, False),
        ("rmsnorm", 0.0, False, False, True),
        ("layernorm", 0.0, False, True, True),
        ("layernorm", 1.0, True, True, True),
        ("layernorm", 0.0, False, True, False),
        ("layernorm", 0.0, False, False, False),
    ],
    ids="rms-gain gemma rms-both rms-bare rms-bias layer-both layernorm1p layer-gain layer-bare".split(),
)


def parameters(width: int, dtype: torch.dtype, gain: bool, bias: bool) -> list[nn.Parameter | None]:
    drawn = zip(vectors(width, dtype), (gain, bias), strict=True)
    return [nn.Parameter(vector) if vector is not None and wanted else None for vector, wanted in drawn]


@DTYPES
@FORMS
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (1, 127), (3, 17), (17, 4097), (127, 20), (127, 127), (4097, 96), (0, 17)]
)
def test_norm(
    rows: int, width: int, kind: str, offset: float, rounds_first: bool, gain: bool, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Three roundings of bf16: x_hat, its product with the gain, the sum with the bias.

    With one component d x_hat / dx = eps / (x^2 + eps)^1.5 is a difference of numbers near 1 if eps is small.
    """
    options = norm_options(kind, offset, rounds_first)
    if width == 1:
        options["eps"] = 1.0
    inputs = (leaf(draw(rows, width, dtype=dtype)), *parameters(width, dtype, gain, bias))
    agree(plain.norm, reference.norm, inputs, limit(dtype, 3), **options)


@DTYPES
@FORMS
@pytest.mark.parametrize(("heads", "width"), [(3, 20), (5, 96)])
def test_norm_with_a_gain_for_each_head(
    heads: int, width: int, kind: str, offset: float, rounds_first: bool, gain: bool, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    options = norm_options(kind, offset, rounds_first)
    product = draw(2, 3, 2 * heads, width, dtype=dtype)
    inputs = (leaf(product[:, :, 1 : heads + 1]), *parameters(heads * width, dtype, gain, bias))
    agree(plain.norm, reference.norm, inputs, limit(dtype, 3), **options)


@DTYPES
@FORMS
@pytest.mark.parametrize(("heads", "width"), [(1, 20), (3, 96)])
def test_one_norm_over_all_heads(
    heads: int, width: int, kind: str, offset: float, rounds_first: bool, gain: bool, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    options = norm_options(kind, offset, rounds_first)

    def over_all(x: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None, **options: Any) -> Tensor:
        norm = ProjectionNorm(plain.norm_settings(**options), "norm", Heads(heads, width), SINGLE)
        norm.weight, norm.bias = weight, bias
        return norm(x)

    def definition(x: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any) -> Tensor:
        return reference.norm(x.flatten(-2), weight, bias, **options).unflatten(-1, (heads, width))

    x = leaf(draw(2, 17, 2 * heads, width, dtype=dtype)[:, :, heads:])
    inputs = (x, *parameters(heads * width, dtype, gain, bias))
    agree(over_all, definition, inputs, limit(dtype, 3), **options)


@DTYPES
@FORMS
@pytest.mark.parametrize(("rows", "width"), [(1, 17), (127, 96), (3, 4097), (4097, 20), (0, 17)])
def test_added(
    rows: int, width: int, kind: str, offset: float, rounds_first: bool, gain: bool, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """x is a slice; its sums with the residual are exact in bf16, so that the norms have one input.

    Their gradient is rounded once more than that of a norm: as the sum of both results' gradients.
    """
    options = norm_options(kind, offset, rounds_first)
    x = leaf(draw(rows, 2 * width + 8, dtype=dtype, step=1 / 16)[:, 3 : width + 3])
    residual = leaf(draw(rows, width, dtype=dtype, step=1 / 16))
    inputs = (x, residual, *parameters(width, dtype, gain, bias))
    agree(plain.add_norm, reference.add_norm, inputs, limit(dtype, 4), **options)


@pytest.mark.parametrize("rounds_first", [True, False])
def test_an_fp32_gain_on_a_bf16_stream(rounds_first: bool) -> None:
    inputs = (leaf(draw(9, 33, dtype=BF16)), *parameters(33, FP32, True, True))
    agree(plain.norm, reference.norm, inputs, limit(BF16, 3), **norm_options("rmsnorm", 0.0, rounds_first))


# Rotation ---------------------------------------------------------------------------------------------------

PAIRS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])


@DTYPES
@PAIRS
@pytest.mark.parametrize(
    ("batch", "length", "heads", "width", "fraction"),
    [(1, 1, 3, 20, 1.0), (2, 3, 17, 20, 0.5), (2, 17, 1, 96, 1.0), (3, 127, 2, 96, 0.25),
     (1, 4097, 1, 20, 1.0), (1, 0, 3, 20, 0.5), (0, 3, 3, 20, 1.0)],
)  # fmt: skip
def test_rotate(
    batch: int, length: int, heads: int, width: int, fraction: float, interleaved: bool, dtype: torch.dtype
) -> None:
    """Queries and keys are heads of one product; upstream: heads before tokens, as attention has them."""
    turn = Turn(*documents(batch, length), width, fraction, interleaved)
    product = draw(batch, length, heads + 4, width, dtype=dtype)
    q, k = leaf(product[:, :, 1 : heads + 1]), leaf(product[:, :, heads + 1 : heads + 3])

    def upstream(y: Tensor) -> Tensor:
        return draw(batch, y.shape[2], length, width, dtype=y.dtype).transpose(1, 2)

    agree(turn.ours, turn.definition, (q, k), limit(dtype, 1), upstream)
    rotated = round(fraction * width)
    for x, y in zip((q, k), turn.ours(q, k), strict=True):
        assert torch.equal(y[..., rotated:], x[..., rotated:])


SHORT, LONG = [1.0, 1.1, 1.5, 2.0, 3.0], [1.0, 2.0, 4.0, 5.0, 8.0]
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 64, "beta_fast": 4.0, "beta_slow": 0.2}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 64, "low": 1.0, "high": 4.0}
LONGROPE = {"kind": "longrope", "factor": 4.0, "original_length": 64, "short": SHORT, "long": LONG}
SCALINGS: dict[str, tuple[dict[str, Any], exact.Frequencies, float]] = {
    "none": ({"kind": "none"}, exact.linear(1.0), 1.0),
    "linear": ({"kind": "linear", "factor": 3.0}, exact.linear(3.0), 1.0),
    "ntk": ({"kind": "ntk", "factor": 3.0}, exact.ntk(3.0), 1.0),
    "dynamic": ({"kind": "dynamic", "factor": 3.0, "original_length": 40}, exact.dynamic(3.0, 40), 1.0),
    "yarn": (YARN, exact.yarn(4.0, 64, 4.0, 0.2, truncate=True), 1.138629436111989),  # 0.1 ln 4 + 1
    "llama3": (LLAMA3, exact.llama3(8.0, 64, 1.0, 4.0), 1.0),
    "longrope": (LONGROPE, exact.longrope(SHORT, LONG, 64), (4 / 3) ** 0.5),  # 1 + ln 4 / ln 64
}


@DTYPES
@PAIRS
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling(scaling: str, interleaved: bool, dtype: torch.dtype) -> None:
    """Documents of 90, 30 and 60 tokens, on both sides of the original lengths."""
    turn = Turn(*documents(2, 90), 20, 0.5, interleaved, *SCALINGS[scaling])
    x = leaf(draw(2, 90, 3, 20, dtype=dtype))
    agree(turn.ours, turn.definition, (x,), limit(dtype, 1))


def test_tables_that_grow_and_a_model_in_bf16() -> None:
    """One rotation, trained on 3 tokens and then 90, cast to bf16, and asked for a token far beyond."""
    rope = Turn(*documents(1, 3), 20, 1.0, True).rope()
    for cast, length, last in ((FP32, 3, 2), (FP32, 90, 89), (BF16, 17, 16), (BF16, 1, 2000)):
        rope.to(cast).train(last < 2000)
        positions = torch.arange(last + 1 - length, last + 1)[None]
        turn = Turn(positions, torch.ones_like(positions), 20, 1.0, True)
        x = draw(1, length, 3, 20)
        close(rope.turn(x, positions), turn.definition(x.double())[0], 1e-5)


@DTYPES
@PAIRS
@FORMS
@pytest.mark.parametrize(
    ("batch", "length", "heads", "width", "fraction"),
    [(1, 1, 3, 20, 1.0), (2, 17, 3, 20, 0.5), (1, 127, 1, 96, 0.25), (1, 0, 3, 20, 0.5)],
)
def test_norm_and_rotation(
    batch: int, length: int, heads: int, width: int, fraction: float, interleaved: bool,
    kind: str, offset: float, rounds_first: bool, gain: bool, bias: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """As attention does one after the other; a rounding for the turned in addition to those of the norm."""
    turn = Turn(*documents(batch, length), width, fraction, interleaved)
    options = norm_options(kind, offset, rounds_first)

    def ours(x: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None) -> tuple[Tensor, ...]:
        return turn.ours(plain.norm(x, weight, bias, **options))

    def definition(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return turn.definition(reference.norm(x, weight, bias, **options))

    x = leaf(draw(batch, length, heads + 4, width, dtype=dtype)[:, :, 1 : heads + 1])
    agree(ours, definition, (x, *parameters(width, dtype, gain, bias)), limit(dtype, 4))


# Activations ------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("activation", exact.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (127, 96), (17, 4097), (4097, 3), (0, 17)])
def test_gate_and_activate(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    """Both are slices of one product, as the layer makes them; act(gate) is rounded, and its product.

    torch derives a sigmoid from its rounded y: y (1 - y) <= 1/4 is off by up to 2^-9, two roundings more.
    """
    up, gate = (leaf(t) for t in (3 * draw(rows, 2 * width, dtype=dtype)).chunk(2, -1))
    within = limit(dtype, 4 if activation == "sigmoid" else 2)
    agree(plain.gate, exact.gated, (gate, up), within, activation=activation)
    agree(plain.activate, exact.activate, (gate,), within, activation=activation)


@DTYPES
@pytest.mark.parametrize(("clamp", "alpha"), [(7.0, 1.702), (2.0, 1.0)])
@pytest.mark.parametrize(("rows", "width"), [(1, 20), (17, 127), (0, 17)])
def test_the_clamped_gate(rows: int, width: int, clamp: float, alpha: float, dtype: torch.dtype) -> None:
    """Gates beyond the clamp, on it, and below; five values in a row are rounded."""
    gate, up = leaf(8 * draw(rows, width, dtype=dtype)), leaf(8 * draw(width, rows, dtype=dtype).T.flip(0))
    with torch.no_grad():
        gate[:1, :3], up[:1, :3] = torch.tensor([1, 1, -1]) * clamp, torch.tensor([1, -1, 1]) * clamp
    agree(plain.clamped, exact.clamped, (gate, up), limit(dtype, 5), clamp=clamp, alpha=alpha)


@pytest.mark.parametrize("activation", ["elu", "selu"])
def test_small_negative_numbers_keep_their_digits(activation: str) -> None:
    x = -torch.logspace(-6, 1, 64)
    expected = exact.activate(x.double(), activation=activation)
    torch.testing.assert_close(plain.activate(x, activation=activation).double(), expected, rtol=1e-6, atol=0)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "gated", "clamped"),
    [("silu", True, False), ("relu2", False, False), ("silu", True, True)],
    ids=["gated", "plain", "clamped"],
)
@pytest.mark.parametrize(("batch", "length", "width"), [(1, 1, 20), (2, 17, 96), (1, 0, 20)])
def test_the_layer(
    batch: int, length: int, width: int, activation: str, gated: bool, clamped: bool, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Gate above up in one matrix. In bf16 the inner products, act(gate), its product and y are rounded.

    Nothing is cut in bf16: where a rounding decides whether, a gradient is there or is not.
    """
    clamp = (1.0 if dtype == FP32 else 9.0) if clamped else None
    form = {"activation": activation, "gated": gated, "bias": bias, "clamp": clamp}
    settings = parse(FeedForward.Config, {**form, "d_ff": 2 * width})
    layer = FeedForward("f", settings, width, std=1.0, output_std=1.0, parallel=TensorParallel())
    names = [name for name, _ in layer.named_parameters()]
    weights = [leaf(draw(*p.shape, dtype=dtype) / width**0.5) for p in layer.parameters()]

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    def definition(x: Tensor, *weights: Tensor) -> Tensor:
        w = dict(zip(names, weights, strict=True))
        inner = x @ w["inner.weight"].T + w.get("inner.bias", 0)
        if not settings.gated:
            y = exact.activate(inner, activation=settings.activation)
        elif settings.clamp is None:
            y = exact.gated(*inner.tensor_split(2, -1), activation=settings.activation)
        else:
            y = exact.clamped(*inner.tensor_split(2, -1), clamp=settings.clamp, alpha=settings.alpha)
        return y @ w["down.weight"].T + w.get("down.bias", 0)

    x = leaf(draw(batch, 2 * length, width, dtype=dtype)[:, ::2])
    agree(ours, definition, (x, *weights), limit(dtype, 4))

"""The definitions against torch's own functions, formulas by hand, and finite differences, in fp64.

B batch, S sequence length, H heads, E head width.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamodel.data.batch import IGNORE
from megamodel.kernels import reference
from megamodel.norm import STANDARDISED, Norm, Normalise, scaled
from tests.megamodel.kernels import exact

PLAIN = {"eps": 1e-3, "offset": 0.0, "rounds_first": False}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_norms_are_torchs() -> None:
    x, weight, bias = draw(5, 7), draw(7, seed=1), draw(7, seed=2)
    ours = reference.norm(x, weight, bias, kind="layernorm", **PLAIN)
    torch.testing.assert_close(ours, F.layer_norm(x, (7,), weight, bias, 1e-3), rtol=1e-12, atol=1e-12)
    ours = reference.norm(x, weight, None, kind="rmsnorm", **PLAIN)
    torch.testing.assert_close(ours, F.rms_norm(x, (7,), weight, 1e-3), rtol=1e-12, atol=1e-12)


def test_a_norm_by_hand() -> None:
    """x = (1, 7): mean 4, variance 9, mean square 25."""
    x = torch.tensor([[1.0, 7.0]], dtype=torch.float64)
    plain = {"eps": 0.0, "rounds_first": True}
    layer = reference.norm(x, torch.tensor([2.0, 3.0]), torch.tensor([10.0, 20.0]), kind="layernorm",
                           offset=1.0, **plain)  # fmt: skip
    assert layer.tolist() == [[10.0 - 3.0, 20.0 + 4.0]]
    rms = reference.norm(x, None, None, kind="rmsnorm", offset=0.0, **plain)
    torch.testing.assert_close(rms, torch.tensor([[0.2, 1.4]], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("kind", "offset", "rounding"), [
    ("rmsnorm", 0.0, None), ("rmsnorm", 1.0, "after_gain"), ("layernorm", 0.0, None),
    ("layernorm", 1.0, "before_gain"),
])  # fmt: skip
def test_norms_are_the_models(
    dtype: torch.dtype, heads: int, kind: str, offset: float, rounding: str
) -> None:
    """Where values are rounded too: in bf16 another order of rounding changes a quarter of the elements."""
    settings = Norm(kind=kind, offset=offset, rounding=rounding)
    x = draw(64, heads, 40, dtype=dtype)
    weight = torch.nn.Parameter(draw(heads * 40, seed=1, dtype=dtype))
    bias = torch.nn.Parameter(draw(heads * 40, seed=2, dtype=dtype)) if settings.has_bias else None
    options = {"kind": kind, "eps": settings.eps, "offset": offset, "rounds_first": settings.rounds_first}
    ours = reference.norm(x, weight, bias, **options)
    standard = STANDARDISED[kind](x.float(), settings.eps)
    models = scaled(settings, standard, weight, bias, dtype)
    if heads == 1:
        torch.testing.assert_close(models, Normalise(settings, weight, bias)(x))
    assert ours.dtype == models.dtype == dtype
    torch.testing.assert_close(ours, models, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    if dtype == torch.bfloat16:
        assert (ours == models).double().mean() > 0.999
        moved = reference.norm(x, weight, bias, **options | {"rounds_first": not settings.rounds_first})
        assert (moved == models).double().mean() < 0.9


def test_add_norm_is_the_sum_and_its_norm() -> None:
    x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    total, y = reference.add_norm(x, residual, None, None, kind="rmsnorm", eps=0.0, offset=0.0,
                                  rounds_first=True)  # fmt: skip
    assert total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(y, torch.tensor([[3.0, 4.0]]) / math.sqrt(12.5))


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    x, angles = draw(2, 5, 3, 10), draw(2, 5, 3, seed=1)
    turned = reference.rotate(x, angles.cos(), angles.sin(), interleaved=interleaved)
    assert torch.equal(turned[..., 6:], x[..., 6:])

    def pairs(t: Tensor) -> Tensor:
        return torch.complex(*((t[..., 0:6:2], t[..., 1:6:2]) if interleaved else (t[..., :3], t[..., 3:6])))

    unit = torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(pairs(turned), pairs(x) * unit[:, :, None], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_is_rounded_once(interleaved: bool, dtype: torch.dtype) -> None:
    """In bf16 too: what is turned in fp32 and rounded is what is turned in fp64 and rounded."""
    x, turn = draw(2, 5, 3, 20, dtype=dtype), draw(2, 5, 5, seed=1)
    cos, sin = 1.3 * turn.cos(), 1.3 * turn.sin()
    ours = reference.rotate(x, cos.float(), sin.float(), interleaved=interleaved)
    expected = exact.turned(x.double(), turn, 1.3, interleaved=interleaved).to(dtype)
    assert ours.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(ours, expected)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_norm_and_rotation_are_one_after_the_other() -> None:
    """A head (3, 4) becomes (0.6, 0.8) sqrt(2), which a quarter turn makes (-0.8, 0.6) sqrt(2)."""
    x = torch.tensor([3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 2)
    cos, sin = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    out = reference.norm_rotate(
        x, None, None, cos, sin, kind="rmsnorm", interleaved=True, **PLAIN | {"eps": 0.0}
    )
    expected = torch.tensor([-0.8, 0.6], dtype=torch.float64) * math.sqrt(2)
    torch.testing.assert_close(out.flatten(), expected)


FORMULAS = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * math.expm1(x)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_by_their_formulas(name: str) -> None:
    points = [-6.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 4.0]
    x = torch.tensor(points, dtype=torch.float64)
    expected = torch.tensor([FORMULAS[name](p) for p in points], dtype=torch.float64)
    torch.testing.assert_close(reference.activate(x, activation=name), expected, rtol=1e-12, atol=1e-15)
    gated = reference.gate(x, x + 2, activation=name)
    torch.testing.assert_close(gated, expected * (x + 2), rtol=1e-12, atol=1e-15)


def test_the_clamped_gate_by_hand() -> None:
    """(u + 1) g sigmoid(alpha g) with g cut at 7 above only and u at 7 on both sides."""
    gate, up = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 9.0, -9.0], [0.5, -8.0, 8.0]))
    swish = [g / (1 + math.exp(-1.5 * g)) for g in (1.0, 7.0, -9.0)]
    expected = torch.tensor([1.5 * swish[0], -6 * swish[1], 8 * swish[2]], dtype=torch.float64)
    ours = reference.gate(gate, up, activation="silu", clamp=7.0, alpha=1.5)
    torch.testing.assert_close(ours, expected)


def whole(logits: Tensor, targets: Tensor, parts: list[int]) -> tuple[Tensor, Tensor]:
    """(cross-entropy, log Z) from the parts of a vocabulary, joined as ranks join them."""
    pieces, start = [], 0
    for part in logits.split(parts, dim=1):
        pieces.append(reference.entropy(part, targets, start=start))
        start += part.shape[1]
    largest = torch.stack([p[0] for p in pieces]).amax(0)
    total = sum(p[1] * (p[0] - largest).exp() for p in pieces)
    log_z = largest + total.log()
    return log_z - sum(p[2] for p in pieces), log_z


@pytest.mark.parametrize("parts", [[13], [5, 8], [12, 1, 0]])
def test_joined_parts_are_torchs_cross_entropy(parts: list[int]) -> None:
    logits, targets = draw(6, 13) * 5, torch.tensor([0, 4, 5, 12, 7, IGNORE])
    loss, log_z = whole(logits, targets, parts)
    expected = F.cross_entropy(logits[:5], targets[:5], reduction="none")
    torch.testing.assert_close(loss[:5], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_z, logits.logsumexp(1), rtol=1e-12, atol=1e-12)


def test_a_row_without_a_logit_gives_nothing() -> None:
    largest, total, picked = reference.entropy(torch.full((1, 3), -torch.inf), torch.tensor([9]), start=0)
    assert (largest.item(), total.item(), picked.item()) == (-math.inf, 0.0, 0.0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("parts", [[13], [5, 8]])
def test_the_gradient_is_autograds(softcap: float | None, parts: list[int]) -> None:
    raw = (draw(6, 13) * 3).requires_grad_()
    targets = torch.tensor([0, 4, 5, 12, IGNORE, 7])
    c_loss, c_z = draw(6, seed=1), draw(6, seed=2)
    logits = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    loss = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)
    log_z = logits.logsumexp(1)
    valid = targets != IGNORE
    expected, = torch.autograd.grad((c_loss * loss + c_z * log_z)[valid].sum(), raw)  # fmt: skip
    start, found = 0, []
    for part in logits.detach().split(parts, dim=1):
        found.append(
            reference.entropy_gradient(
                part, targets, log_z.detach(), c_loss, c_z, start=start, softcap=softcap
            )
        )
        start += part.shape[1]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-12)


def test_ignored_rows_have_no_gradient_whatever_they_hold() -> None:
    logits = torch.tensor([[math.nan, math.inf], [0.0, 0.0]])
    grad = reference.entropy_gradient(
        logits, torch.tensor([IGNORE, 1]), torch.tensor([math.nan, math.log(2)]),
        torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 0.0]), start=0, softcap=None,
    )  # fmt: skip
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0], [0.5, -0.5]]))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients_are_finite_differences(kind: str, interleaved: bool) -> None:
    x, weight, bias = (t.requires_grad_() for t in (draw(1, 2, 2, 6), draw(12, seed=1), draw(12, seed=2)))
    cos, sin = draw(1, 2, 2, seed=3), draw(1, 2, 2, seed=4)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return reference.norm_rotate(x, weight, bias, cos, sin, kind=kind, interleaved=interleaved, **PLAIN)

    assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_keep_the_dtype_and_statistics_do_not(dtype: torch.dtype) -> None:
    x = draw(3, 8, dtype=dtype)
    for result in (
        reference.norm(x, None, None, kind="layernorm", **PLAIN),
        reference.gate(x, x, activation="silu"),
        reference.activate(x, activation="gelu"),
    ):
        assert result.dtype == dtype
    statistics = reference.entropy(x, torch.zeros(3, dtype=torch.int64), start=0)
    assert {s.dtype for s in statistics} == {torch.float64 if dtype == torch.float64 else torch.float32}
    same = (x.new_zeros(3),) * 3
    grad = reference.entropy_gradient(x, torch.zeros(3, dtype=torch.int64), *same, start=0, softcap=None)
    assert grad.dtype == dtype

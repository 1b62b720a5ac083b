"""Positions, masks, norms and layouts against their formulas, and documents alone against packed ones."""

from typing import Any

import pytest
import torch

from conf.typed import parse
from megamodel.activation import gating
from megamodel.attend import Seen
from megamodel.config import Model
from megamodel.model import Transformer
from megamodel.norm import Norm, build_norm
from megamodel.position import Buckets, Site, alibi_slopes, build_absolute, build_position
from megamodel.rope_scaling import NtkScaling, frequencies
from parallel.piece import pieces_of
from parallel.tensor import TensorParallel
from tests.megamodel.test_generate import ATTENTIONS, POSITIONS, build


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", ["GQA", "MLA"])
@pytest.mark.parametrize("window", ["all", "pattern", "strided"])
@torch.no_grad()
def test_isolated_documents_equal_documents_alone(attention: str, position: str, window: str) -> None:
    """Of 8 and 12 tokens: for those that vary with the length, that of the document counts."""
    alone = build(attention, position, window)
    packed = Transformer(alone.settings, seed=4, documents=True).eval()
    tokens = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(5))
    together = packed(tokens, torch.cat((torch.arange(8), torch.arange(12)))[None])
    torch.testing.assert_close(together[:, :8], alone(tokens[:, :8]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[:, 8:], alone(tokens[:, 8:]), rtol=1e-4, atol=1e-5)


def test_alibi_slopes() -> None:
    """8 heads: 1/2 .. 1/256; 6: those of 4, then every second of 8."""
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_positions_of_no_token(position: str, training: bool) -> None:
    attention = {"n_heads": 2, "n_kv_heads": 2, "head_width": 8}
    settings = parse(Model, {"attention": attention, "position": POSITIONS[position]}).position
    site = Site("x", 2, 8, 16, 1.0, TensorParallel())
    none, q = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0, 2, 8)
    encoding = build_position(settings, site).train(training)
    assert encoding.turn(q, none, none).shape == q.shape
    bias = encoding.bias(q, q, none, none, 1.0)
    assert bias is None or bias.shape[2:] == (0, 0)
    assert build_absolute(settings, site).train(training).embed(q.flatten(2), none).shape == (3, 0, 16)


def test_buckets_are_exact_then_logarithmic() -> None:
    """32 buckets, 128 at most: 0 .. 15 are their own; 16 + floor(16 ln(d / 16) / ln 8) beyond."""
    site = Site("x", 2, 8, 16, 1.0, TensorParallel())
    bucket = Buckets(parse(Buckets.Config, {}), site).bucket
    distances = torch.tensor([0, 1, 15, 16, 20, 32, 64, 127, 128, 1000])
    assert bucket(distances).tolist() == [0, 1, 15, 16, 17, 21, 26, 31, 31, 31]


def seen_by(mask: torch.Tensor, query: int) -> list[int]:
    return torch.where(mask[0, 0, query])[0].tolist()


def test_sparse_patterns_by_hand() -> None:
    places = torch.arange(12)[None]
    strided = Seen(sparse="strided", stride=4).mask(places, places)
    assert seen_by(strided, 11) == [3, 7, 8, 9, 10, 11]
    fixed = Seen(sparse="fixed", stride=4, summary=1).mask(places, places)
    assert seen_by(fixed, 10) == [3, 7, 8, 9, 10]
    window = Seen(window=3).mask(places, places)
    assert seen_by(window, 11) == [9, 10, 11] and seen_by(window, 1) == [0, 1]


def test_the_ntk_base_stretches_the_slowest_pair_by_the_factor() -> None:
    scaled, factor = frequencies(parse(NtkScaling, {"factor": 4.0}), 10000.0, 16)
    plain = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    assert factor == 1.0
    assert scaled[0].item() == 1.0
    assert scaled[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-6)


def test_a_clamped_gate_by_hand() -> None:
    """g = min(9, 7) = 7, u = clamp(-9) = -7: (-7 + 1) 7 sigmoid(1.702 x 7)."""
    gate = gating("silu", clamp=7.0, alpha=1.702)
    expected = -42 * torch.sigmoid(torch.tensor(1.702 * 7))
    torch.testing.assert_close(gate(torch.tensor(9.0), torch.tensor(-9.0)), expected)
    torch.testing.assert_close(
        gate(torch.tensor(-9.0), torch.tensor(0.0)), -9 * torch.sigmoid(torch.tensor(-9 * 1.702))
    )


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_by_their_formulas(kind: str, offset: float) -> None:
    norm = build_norm(
        parse(Norm, {"kind": kind, "offset": offset, "eps": 0.1, "bias": True}), "n", 6, TensorParallel()
    )
    generator = torch.Generator().manual_seed(2)
    for parameter in norm.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    x = torch.randn(4, 6, generator=generator)
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(norm(x), expected * (offset + norm.weight) + norm.bias)


def test_where_a_bf16_norm_is_rounded() -> None:
    """x_hat = 1.0039..: rounded first it loses what the gain would have kept."""
    x = torch.tensor([[1.5, 0.7, 0.2, -0.9]], dtype=torch.bfloat16)
    exact = x.double() / (x.double().square().mean() + 1e-5).sqrt()
    gain = torch.tensor([1.2031, 0.8, 1.7, 0.33]).bfloat16()
    for rounding, expected in (
        ("before_gain", exact.bfloat16() * gain),
        ("after_gain", (exact * gain.double()).bfloat16()),
    ):
        norm = build_norm(parse(Norm, {"rounding": rounding}), "n", 4, TensorParallel())
        norm.weight.data = gain
        torch.testing.assert_close(norm(x), expected, rtol=0, atol=0)


def names(layout: str) -> set[str]:
    model = Transformer(
        parse(Model, {"layout": layout, "n_layers": 1, "d_model": 16, "attention": {"head_width": 4}}),
        initial=False,
    )
    found = {piece.name for p in model.parameters() for piece in pieces_of(p)}
    return {name.removeprefix("blocks.0.").removesuffix(".weight") for name in found if "norm" in name}


def test_the_norms_of_each_layout() -> None:
    before = {"attention_norm", "feedforward_norm"}
    after = {"attention_output_norm", "feedforward_output_norm"}
    assert names("pre") == before | {"final_norm"}
    assert names("post") == {"attention_sum_norm", "feedforward_sum_norm"}
    assert names("double") == before | after | {"final_norm"}
    assert names("output") == after | {"final_norm"}
    assert names("parallel_shared") == {"attention_norm", "final_norm"}
    assert names("parallel_two") == before | {"final_norm"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ["local"]}, "model.kinds has none"),
        ({"kinds": {"x": {}}}, "does not use"),
        (
            {"kinds": {"x": {}}, "pattern": ["x"], "attention": {"window": 4}},
            r"model\.attention\.window \(4\) has no effect",
        ),
        (
            {"kinds": {"x": {"position": {"kind": "learned"}}}, "pattern": ["x"]},
            "added to the embedding",
        ),
        ({"attention": {"head_width": 7}}, "choose an even number"),
        (
            {"attention": {"head_width": 2}, "position": {"scaling": {"kind": "ntk", "factor": 2.0}}},
            "stretches all but the fastest pair, and only one is rotated",
        ),
        ({"experts": {"kind": "routed", "dense_layers": [9]}}, "not among the 6 layers"),
        ({"norm": {"gain": False, "offset": 1.0}}, "needs norm.gain"),
        ({"feedforward": {"clamp": 7.0, "activation": "relu"}}, "activation=silu"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(Model, changes)


def test_every_attention_of_these_tests_is_another() -> None:
    assert len({str(settings) for settings in ATTENTIONS.values()}) == 4

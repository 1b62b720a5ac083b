"""Keyed dropout: the right share, another mask for each key, slices of one logical mask."""

import torch

from megamodel.dropout import Clock, KeyedDropout


def site(p: float = 0.3, *, layer: int = 0, step: int = 1) -> KeyedDropout:
    clock = Clock()
    clock.set(step)
    return KeyedDropout(p, seed=5, layer=layer, site="residual", clock=clock)


def test_the_share_of_zeros_and_the_mean_are_right() -> None:
    x = torch.ones(4, 256, 512)
    y = site()(x, torch.arange(4))
    share = (y == 0).double().mean().item()
    # 524,288 draws: the standard deviation of the share is 0.0006.
    assert abs(share - 0.3) < 0.004
    assert y.unique().tolist() == [0.0, torch.tensor(1 / 0.7).item()]
    rows = (y == 0).double().mean((1, 2))
    columns = (y == 0).double().mean((0, 1))
    assert (rows - 0.3).abs().max() < 0.01 and (columns - 0.3).abs().max() < 0.09


def test_masks_differ_by_step_sample_and_layer_and_are_uncorrelated() -> None:
    x = torch.ones(1, 64, 64)
    samples = torch.tensor([7])
    base = site()(x, samples) == 0
    for other in (
        site(step=2)(x, samples) == 0,
        site(layer=1)(x, samples) == 0,
        site()(x, torch.tensor([8])) == 0,
    ):
        # Independent masks agree on 0.3^2 + 0.7^2 = 0.58 of the places.
        assert abs((base == other).double().mean().item() - 0.58) < 0.04
    assert torch.equal(base, site()(x, samples) == 0)


def test_a_rank_that_holds_a_part_of_the_sequence_draws_that_part_of_the_mask() -> None:
    x = torch.ones(2, 16, 8)
    samples = torch.tensor([3, 900])
    whole = site()(x, samples)
    parts = [site()(x[:, i : i + 4], samples, first_token=i) for i in range(0, 16, 4)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_evaluation_and_zero_probability_are_the_identity() -> None:
    x = torch.randn(2, 3, 4)
    assert site(0.0)(x, torch.arange(2)) is x
    assert site().eval()(x, torch.arange(2)) is x

"""Mixtures of experts against dense loops and constants worked out by hand."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conf.typed import parse
from megamodel.auxiliary import Auxiliary
from megamodel.feedforward import FeedForward
from megamodel.init import initialise
from megamodel.moe import Experts, MixtureOfExperts, Routed, balance_per_sequence, pooled_balance
from parallel.mesh import Group
from parallel.tensor import TensorParallel


def build(auxiliary: Auxiliary | None = None, **changes: object) -> MixtureOfExperts:
    settings = parse(Routed, {"n_experts": 6, "top_k": 2, "d_ff": 10, **changes})
    module = MixtureOfExperts(
        "moe",
        settings,
        parse(FeedForward.Config, {"d_ff": 10}),
        8,
        layer=0,
        std=1.0,
        output_std=1.0,
        shared_std=1.0,
        auxiliary=auxiliary or Auxiliary(),
        parallel=TensorParallel(),
    )
    return initialise(module, seed=3)  # type: ignore[return-value]


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_dropless_equals_a_dense_loop_over_all_experts(score: str, renormalise: bool) -> None:
    module = build(score=score, renormalise=renormalise, weight_scale=1.5).double()
    x = random(2, 5, 8).double()
    # Scores are fp32 by definition; everything after them is compared in fp64.
    _, chosen, weights = module.router(x.reshape(-1, 8))
    logits = x.reshape(-1, 8).float() @ module.router.linear.weight.float().T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    top = scores.topk(2, dim=-1)
    expected_weights = top.values / top.values.sum(-1, keepdim=True) if renormalise else top.values
    torch.testing.assert_close(weights, expected_weights * 1.5, rtol=1e-5, atol=1e-6)
    dense = torch.zeros(10, 6).scatter(1, chosen, weights).double()
    expected = torch.zeros(10, 8).double()
    for e in range(6):
        gate, up = (x.reshape(-1, 8) @ module.experts.inner[e].T).chunk(2, dim=-1)
        expected += dense[:, e, None] * ((F.silu(gate) * up) @ module.experts.down[e].T)
    torch.testing.assert_close(module(x).view(-1, 8), expected, rtol=1e-10, atol=1e-10)


def test_an_even_router_has_its_known_constant() -> None:
    """Every expert equally often and equally likely: 1 per sequence; transformers' pooled form gives k."""
    probabilities = torch.full((3, 6, 6), 1 / 6)
    chosen = torch.tensor([[0, 1], [2, 3], [4, 5]] * 2).expand(3, 6, 2)
    torch.testing.assert_close(balance_per_sequence(probabilities, chosen), torch.ones(3))
    torch.testing.assert_close(
        pooled_balance(probabilities.flatten(0, 1), chosen.reshape(-1, 2)), torch.tensor(2.0)
    )


def test_a_collapsed_router_costs_n_over_k() -> None:
    """All tokens to one expert with certainty: n f P = n, top-1."""
    probabilities = torch.zeros(1, 4, 6)
    probabilities[..., 2] = 1
    chosen = torch.full((1, 4, 1), 2)
    torch.testing.assert_close(balance_per_sequence(probabilities, chosen), torch.tensor([6.0]))


def losses(x: Tensor, micro_batch: int, weight: float) -> tuple[list[float], Tensor]:
    """The sums of a step, and the router's gradient, with the rows in micro-batches of this size."""
    auxiliary = Auxiliary()
    module = build(auxiliary, balance_loss=weight, router_z_loss=weight / 10)
    auxiliary.begin(sequences=x.shape[0])
    for rows in x.split(micro_batch):
        (module(rows) * 0).sum().backward()
        module.report()
    gradient = module.router.linear.weight.grad
    assert gradient is not None
    return auxiliary.sums().tolist(), gradient


def test_the_balance_loss_is_the_same_for_any_split() -> None:
    x = random(6, 7, 8)
    whole, gradient = losses(x, 6, 0.1)
    assert whole[0] > 0.1 and whole[1] > 0 and gradient.abs().max() > 1e-4
    for size in (1, 2, 3):
        sums, other = losses(x, size, 0.1)
        assert sums == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-7)


def test_the_gradient_of_the_losses_is_that_of_their_definition() -> None:
    x = random(6, 7, 8)
    _, gradient = losses(x, 2, 0.1)
    module = build()
    logits = F.linear(x, module.router.linear.weight)
    balance = balance_per_sequence(logits.softmax(-1), logits.topk(2, dim=-1).indices)
    z = logits.logsumexp(-1).square().mean(1)
    (0.1 * balance + 0.01 * z).mean().backward()
    expected = module.router.linear.weight.grad
    assert expected is not None
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_a_selection_bias_evens_the_load_without_a_loss() -> None:
    auxiliary = Auxiliary()
    module = build(auxiliary, score="sigmoid", selection_bias=True, selection_bias_rate=0.02)
    module.router.linear.weight.data[0] = 3.0  # an expert that positive inputs prefer
    x = random(16, 32, 8) + 0.5

    def spread() -> float:
        _, chosen, _ = module.router(x.reshape(-1, 8))
        load = torch.bincount(chosen.reshape(-1), minlength=6).float()
        return float(load.max() / load.mean())

    assert spread() > 1.8
    for _ in range(150):
        auxiliary.begin(sequences=16)
        module(x)
        module.report()
        auxiliary.applied()
    assert spread() < 1.15
    assert module.router.selection_bias is not None and module.router.selection_bias.grad is None


def test_only_the_best_groups_are_chosen_from() -> None:
    """Groups {0,1}, {2,3}, {4,5}: the best two by the sum of their two best, then the best two experts."""
    module = build(groups=3, kept_groups=1, group_score="top2")
    rank = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2]])
    assert module.router._limited(rank).topk(2).indices.sort().values.tolist() == [[2, 3]]
    best = build(groups=3, kept_groups=1, group_score="max")
    assert best.router._limited(rank).topk(2).indices.sort().values.tolist() == [[0, 1]]


def test_a_capacity_drops_the_later_tokens_in_training_only() -> None:
    """4 tokens, all to experts 0 and 1, capacity ceil(0.75 x 4 x 2 / 6) = 1: only the first is served."""
    module = build(capacity_factor=0.75)
    x = random(1, 1, 8).expand(1, 4, 8)
    served = module(x).abs().sum(-1)[0]
    assert served[0] > 0 and served[1:].max() == 0
    assert module.eval()(x).abs().sum(-1)[0].min() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 7}, "top_k"),
        ({"groups": 4}, "groups"),
        ({"groups": 6, "kept_groups": 1}, "fewer experts than top_k"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"balance_loss": -1.0}, "balance_loss"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(Routed, {"n_experts": 6, "top_k": 2, **changes})


class _Dirty(torch.autograd.Function):
    """A grouped product as a GPU makes it: rows of no group hold anything, here NaN, in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stops = [0, *offs.tolist()]
        y = x.new_full((x.shape[0], weight.shape[-1]), float("nan"))
        for e, (a, b) in enumerate(itertools.pairwise(ctx.stops)):
            y[a:b] = x[a:b] @ weight[e]
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.full_like(x, float("nan")), torch.zeros_like(weight)
        for e, (a, b) in enumerate(itertools.pairwise(ctx.stops)):
            of_x[a:b] = grad[a:b] @ weight[e].T
            of_weight[e] = x[a:b].T @ grad[a:b]
        return of_x, of_weight, None


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["sorted", "grouped"])
def test_the_forms_of_experts_where_some_tokens_are_others(
    form: Any, bias: bool, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two ranks, tokens of the first's experts, and weights of 0: values and all gradients."""
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: _Dirty.apply(x, w, offs))
    inner = parse(FeedForward.Config, {"d_ff": 16, "bias": bias, "gated": gated})
    settings = parse(Routed, {"n_experts": 6, "top_k": 3, "d_ff": 16})
    parallel = TensorParallel(Group((0, 1), 1, None))
    made = Experts("e", settings, inner, 8, std=1.0, output_std=1.0, parallel=parallel)
    module = initialise(made, seed=3).double()  # type: ignore[union-attr]
    source = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source).double()
    chosen = torch.stack([torch.randperm(6, generator=source)[:3] for _ in range(11)])
    found = []
    for used in ("loop", form):
        module.form = used
        x, weights = random(11, 8).double().requires_grad_(), random(11, 3, seed=2).double()
        weights[::4, 0] = 0  # beyond an expert's capacity
        weights.requires_grad_()
        y = module(x, chosen, weights)
        gradients = torch.autograd.grad((y * random(11, 8, seed=4)).sum(), [x, weights, *module.parameters()])
        found.append([y.detach(), *gradients])
    for index, (a, b) in enumerate(zip(*found, strict=True)):
        if index == 2:  # of a weight that is 0 only the loop sees nothing
            a, b = (g.masked_fill(weights.detach() == 0, 0.0) for g in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

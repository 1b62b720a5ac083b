"""Mixture of experts: a router sends each token to k of n feed-forward layers.

B batch, S sequence length, T = B S tokens, D width, F width of an expert, n experts, k chosen a token.
"""

import math
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.typed import config, setting, union
from megamodel.activation import ACTIVATIONS, gating
from megamodel.auxiliary import Auxiliary, attach
from megamodel.feedforward import FeedForward
from parallel.lookup import rows_of
from parallel.piece import Fill, Piece, tag
from parallel.tensor import InnerLinear, Product, TensorParallel, replicated


@config
class Dense:
    """No experts: every layer has the dense feed-forward."""

    kind: Literal["none"] = setting("none", on_resume="must_equal", help="no experts")


@config
class Routed:
    """Token-choice routing to experts of the form of model.feedforward."""

    kind: Literal["routed"] = setting("routed", on_resume="must_equal", help="token-choice experts")
    n_experts: int = setting(8, on_resume="must_equal", help="routed experts")
    top_k: int = setting(2, on_resume="must_equal", help="experts a token")
    d_ff: int = setting(256, on_resume="must_equal", help="inner width of an expert")
    score: Literal["softmax", "sigmoid"] = setting(
        "softmax", on_resume="must_equal", help="of the router's logits, over all experts"
    )
    renormalise: bool = setting(
        True, on_resume="must_equal", help="weights of the chosen add up to 1 (softmax: over the chosen)"
    )
    weight_scale: float = setting(1.0, on_resume="must_equal", help="factor on the weights")
    groups: int = setting(1, on_resume="must_equal", help="experts stand in so many groups")
    kept_groups: int = setting(1, on_resume="must_equal", help="groups that a token may choose from")
    group_score: Literal["max", "top2"] = setting(
        "max", on_resume="must_equal", help="a group's score: its best expert, or the sum of its two best"
    )
    router_bias: bool = setting(False, on_resume="must_equal", help="bias of the router's logits")
    selection_bias: bool = setting(
        False, on_resume="must_equal", help="a bias that only selects, moved towards an even load"
    )
    selection_bias_rate: float = setting(
        1e-3, on_resume="free", help="its step an update, by the sign of the load's error; 0: fixed"
    )
    shared_d_ff: int = setting(0, on_resume="must_equal", help="width of the experts all tokens see; 0: none")
    shared_gate: bool = setting(
        False, on_resume="must_equal", help="multiply them by sigmoid(x w), a number a token"
    )
    capacity_factor: float | None = setting(
        None,
        on_resume="must_equal",
        help="in training an expert takes this x tokens k / n of a micro-batch; null: all",
    )
    balance_loss: float = setting(0.0, on_resume="free", help="weight of n sum f P per sequence; 1 is even")
    balance: Literal["sequence", "micro_batch"] = setting(
        "sequence", on_resume="free", help="over what f and P are taken; a micro_batch depends on the split"
    )
    router_z_loss: float = setting(0.0, on_resume="free", help="weight of the mean (logsumexp of logits)^2")
    dense_layers: list[int] = setting(
        factory=list, on_resume="must_equal", help="layers, from 0, that keep the dense feed-forward"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(
                f"model.experts.top_k ({self.top_k}) must be from 1 to n_experts ({self.n_experts})"
            )
        if self.d_ff < 1 or self.shared_d_ff < 0:
            raise ValueError(
                f"model.experts.d_ff ({self.d_ff}) must be at least 1, shared_d_ff ({self.shared_d_ff}) 0"
            )
        if self.n_experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(
                f"model.experts.groups ({self.groups}) must divide n_experts ({self.n_experts}), and "
                f"kept_groups ({self.kept_groups}) be from 1 to groups"
            )
        if self.kept_groups * (self.n_experts // self.groups) < self.top_k:
            raise ValueError(
                f"model.experts: {self.kept_groups} groups of {self.n_experts // self.groups} have fewer "
                f"experts than top_k ({self.top_k}); use more kept_groups"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"model.experts.capacity_factor ({self.capacity_factor}) must be above 0")
        if min(self.balance_loss, self.router_z_loss, self.selection_bias_rate) < 0:
            raise ValueError("model.experts: balance_loss, router_z_loss, selection_bias_rate: 0 or more")


ExpertsConfig = Annotated[Dense | Routed, union("kind")]


def balance_per_sequence(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """n sum_e f_e P_e of each sequence, (B,); an even router gives 1.

    probabilities (B, S, n), chosen (B, S, k): f_e = assignments_e / (S k), P_e = mean probability.
    """
    n, (rows, length, k) = probabilities.shape[-1], chosen.shape
    hits = probabilities.new_zeros(rows, n)
    hits.scatter_add_(1, chosen.reshape(rows, -1), hits.new_ones(rows, length * k))
    return n * (hits / (length * k) * probabilities.mean(1)).sum(-1)


def pooled_balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """transformers' form: over all layers' tokens (T, n), (T, k) at once; an even router gives k."""
    tokens, n = probabilities.shape
    hits = torch.bincount(chosen.reshape(-1), minlength=n).to(probabilities.dtype)
    return n * (hits / tokens * probabilities.mean(0)).sum()


class Router(nn.Module):
    """x (T, D) -> which experts and with what weights. Scores in fp32; the same on every tp rank."""

    def __init__(
        self, name: str, settings: Routed, d_model: int, *, std: float, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.settings = settings
        self.linear = InnerLinear(
            name, d_model, settings.n_experts, std=std, parallel=parallel, bias=settings.router_bias
        )
        self.selection_bias = None
        if settings.selection_bias:
            zero = Fill(0.0, 0.0)
            self.selection_bias = replicated(f"{name}.selection_bias", settings.n_experts, zero, parallel)
            self.selection_bias.requires_grad_(False)  # moved by `balance`, never by a gradient

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits (T, n), chosen (T, k), weights (T, k)), the first and the last in fp32."""
        s, linear = self.settings, self.linear
        bias = None if linear.bias is None else linear.bias.float()
        logits = F.linear(x.float(), linear.weight.float(), bias)
        scores = logits.softmax(-1) if s.score == "softmax" else logits.sigmoid()
        rank = scores.detach() if self.selection_bias is None else scores.detach() + self.selection_bias
        chosen = self._limited(rank).topk(s.top_k, dim=-1).indices
        if s.renormalise and s.score == "softmax":
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = scores.gather(-1, chosen)
            if s.renormalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, chosen, weights * s.weight_scale

    def _limited(self, rank: Tensor) -> Tensor:
        """The ranking with the experts outside the best groups taken out."""
        s = self.settings
        if s.kept_groups == s.groups:
            return rank
        grouped = rank.unflatten(-1, (s.groups, -1))
        best = grouped.amax(-1) if s.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(s.kept_groups, dim=-1).indices, True)
        return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


class Experts(nn.Module):
    """The weights of this rank's experts: whole experts, n / tp on each rank.

    form: loop, each expert in turn; sorted, tokens in the order of their experts; grouped, so and in torch's
    grouped products.
    """

    def __init__(
        self,
        name: str,
        settings: Routed,
        form: FeedForward.Config,
        d_model: int,
        *,
        std: float,
        output_std: float,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        n, width, group = settings.n_experts, settings.d_ff, parallel.group
        if n % group.size:
            raise ValueError(f"model.experts.n_experts ({n}) must be divisible by parallel.tp ({group.size})")
        self.product: Product = F.linear
        self.form: Literal["loop", "sorted", "grouped"] = "sorted"
        self.count = n // group.size
        self.first = group.rank * self.count
        self.shape = form
        self.gated, self.activation = form.gated, ACTIVATIONS[form.activation]
        self.gate = gating(form.activation, clamp=form.clamp, alpha=form.alpha)
        names = ("gate", "up") if form.gated else ("up",)
        rows = len(names) * width
        self.inner = nn.Parameter(torch.empty(self.count, rows, d_model))
        self.down = nn.Parameter(torch.empty(self.count, d_model, width))
        self.inner_bias = nn.Parameter(torch.empty(self.count * rows)) if form.bias else None
        self.down_bias = nn.Parameter(torch.empty(self.count * d_model)) if form.bias else None

        def pieces(names: tuple[str, ...], kind: str, shape: tuple[int, ...]) -> list[Piece]:
            """One logical tensor for each expert and name, as they lie one after another."""
            found, at, size = [], 0, math.prod(shape)
            for expert in range(self.first, self.first + self.count):
                for part in names:
                    found.append(Piece(f"{name}.{expert}.{part}.{kind}", shape, (0,) * len(shape), shape, at))
                    at += size
            return found

        tag(self.inner, pieces(names, "weight", (width, d_model)), Fill(0.0, std))
        tag(self.down, pieces(("down",), "weight", (d_model, width)), Fill(0.0, output_std))
        if self.inner_bias is not None and self.down_bias is not None:
            tag(self.inner_bias, pieces(names, "bias", (width,)), Fill(0.0, 0.0))
            tag(self.down_bias, pieces(("down",), "bias", (d_model,)), Fill(0.0, 0.0))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x (T, D), chosen (T, k), weights (T, k) (0: not taken) -> sum over this rank's experts (T, D)."""
        if self.form == "loop":
            return self._loop(x, chosen, weights)
        return self._sorted(x, chosen, weights)

    def _loop(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The definition: each expert looks for its tokens."""
        out = torch.zeros_like(x)
        taken = weights != 0
        for i in range(self.count):
            token, slot = torch.where((chosen == self.first + i) & taken)
            y = self._expert(i, x[token]) * weights[token, slot].to(x.dtype).unsqueeze(-1)
            out = out.index_add(0, token, y)
        return out

    def _sorted(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All assignments in the order of their experts, what is not ours at the end: one gather, products of
        whole groups, one sum. Nothing waits for a number of a GPU's."""
        local = chosen - self.first
        ours = (local >= 0) & (local < self.count) & (weights != 0)
        number = torch.where(ours, local, self.count).flatten()
        order = number.argsort(stable=True)
        token, expert = order // chosen.shape[1], number[order]
        # Not by bincount, which asks a GPU for the smallest and the largest number.
        ends = torch.searchsorted(expert, torch.arange(self.count, device=x.device), right=True)
        y = self._groups(x.index_select(0, token), expert, ends)
        y = torch.where((expert < self.count).unsqueeze(-1), y, 0.0)
        y = y * torch.where(ours, weights, 0.0).flatten()[order].to(x.dtype).unsqueeze(-1)
        # Back into the order of the tokens: a sum over k, in the same order each time.
        return torch.zeros_like(y).index_copy(0, order, y).view(*chosen.shape, y.shape[-1]).sum(1)

    def _groups(self, x: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        """x (n, D) in the order of `expert` (n), which end at `ends` -> (n, D); others' rows: anything."""
        if self.form == "sorted":
            stops = [0, *ends.tolist(), x.shape[0]]
            parts = x.split([stop - start for start, stop in pairwise(stops)])
            return torch.cat([*(self._expert(i, part) for i, part in enumerate(parts[:-1])), parts[-1]])
        # A grouped product writes only the rows of its groups, backward too: the others hold anything, and
        # `where` lets nothing of it through, in either direction.
        mine, row = (expert < self.count).unsqueeze(-1), expert.clamp(max=self.count - 1)
        ends = ends.to(torch.int32)
        h = F.grouped_mm(torch.where(mine, x, 0.0), self.inner.transpose(-1, -2), offs=ends)
        if self.inner_bias is not None:
            h = h + rows_of(row, self.inner_bias.view(self.count, -1))
        h = torch.where(mine, h, 0.0)
        h = self.gate(*h.chunk(2, dim=-1)) if self.gated else self.activation(h)
        y = F.grouped_mm(torch.where(mine, h, 0.0), self.down.transpose(-1, -2), offs=ends)
        return y if self.down_bias is None else y + rows_of(row, self.down_bias.view(self.count, -1))

    @property
    def fits_groups(self) -> bool:
        """Whether rows of all operands start at multiples of 16 bytes, which grouped products ask for."""
        return all(size % 8 == 0 for size in (*self.inner.shape[1:], *self.down.shape[1:]))

    def _expert(self, i: int, x: Tensor) -> Tensor:
        inner_bias = None if self.inner_bias is None else self.inner_bias.view(self.count, -1)[i]
        down_bias = None if self.down_bias is None else self.down_bias.view(self.count, -1)[i]
        h = self.product(x, self.inner[i], inner_bias)
        h = self.gate(*h.chunk(2, dim=-1)) if self.gated else self.activation(h)
        return self.product(h, self.down[i], down_bias)


class MixtureOfExperts(nn.Module):
    """sum over the chosen of weight_e E_e(x), plus the shared experts: x (B, S, D) -> like x."""

    def __init__(
        self,
        name: str,
        settings: Routed,
        form: FeedForward.Config,
        d_model: int,
        *,
        layer: int,
        std: float,
        output_std: float,
        shared_std: float,
        auxiliary: Auxiliary,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.settings, self.layer, self.auxiliary, self.parallel = settings, layer, auxiliary, parallel
        self.router = Router(f"{name}.router", settings, d_model, std=std, parallel=parallel)
        self.experts = Experts(
            f"{name}.experts", settings, form, d_model, std=std, output_std=output_std, parallel=parallel
        )
        self.shared = self.shared_gate = None
        if settings.shared_d_ff:
            wide = form.of_width(settings.shared_d_ff)
            self.shared = FeedForward(
                f"{name}.shared", wide, d_model, std=std, output_std=shared_std, parallel=parallel
            )
        if settings.shared_d_ff and settings.shared_gate:
            self.shared_gate = replicated(
                f"{name}.shared_gate.weight", (1, d_model), Fill(0.0, std), parallel
            )
        self.seen: tuple[Tensor, Tensor] | None = None  # losses and loads of the last forward

    def forward(self, x: Tensor) -> Tensor:
        whole = self.parallel.enter(x)
        rows, length, width = whole.shape
        logits, chosen, weights = self.router(whole.reshape(-1, width))
        if self.settings.capacity_factor is not None and self.training:
            weights = weights * self._within_capacity(chosen)
        if self.training and torch.is_grad_enabled():
            whole = self._with_losses(whole, logits.view(rows, length, -1), chosen.view(rows, length, -1))
        y = self.experts(whole.reshape(-1, width), chosen, weights)
        y = self.parallel.leave(y.view(rows, length, width))
        if self.shared is None:
            return y
        if self.shared_gate is None:
            return y + self.shared(x)
        return y + F.linear(x, self.shared_gate).sigmoid() * self.shared(x)

    def _within_capacity(self, chosen: Tensor) -> Tensor:
        """(T, k) of 0 and 1: each expert takes its first tokens, in their order, up to its capacity."""
        s = self.settings
        assert s.capacity_factor is not None
        capacity = math.ceil(s.capacity_factor * chosen.shape[0] * s.top_k / s.n_experts)
        hits = F.one_hot(chosen.reshape(-1), s.n_experts)
        before = (hits.cumsum(0) - hits).gather(-1, chosen.reshape(-1, 1)).view_as(chosen)
        return (before < capacity).float()

    def _with_losses(self, x: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
        """x with the gradients of the losses attached; each tp rank brings its share of them."""
        s = self.settings
        balance = z = logits.new_zeros(())
        if s.balance_loss:
            scores = logits.softmax(-1) if s.score == "softmax" else logits.sigmoid()
            shares = scores / scores.sum(-1, keepdim=True)
            if s.balance == "sequence":
                balance = balance_per_sequence(shares, chosen).sum() * s.balance_loss
            else:
                pooled = balance_per_sequence(shares.flatten(0, 1)[None], chosen.flatten(0, 1)[None])
                balance = pooled.sum() * shares.shape[0] * s.balance_loss
        if s.router_z_loss:
            z = logits.logsumexp(-1).square().mean(1).sum() * s.router_z_loss
        where = chosen.reshape(-1)
        load = where.new_zeros(s.n_experts).scatter_add_(0, where, torch.ones_like(where))
        self.seen = (torch.stack((balance, z)).detach(), load)
        if not (s.balance_loss or s.router_z_loss):
            return x
        return attach(x, (balance + z) / self.parallel.group.size, self.auxiliary.weight)

    def report(self) -> None:
        """Hand what the last forward saw to the step's sums; once, not again under recomputation."""
        if self.seen is not None:
            losses, load = self.seen
            self.auxiliary.record(losses)
            if self.router.selection_bias is not None:
                self.auxiliary.count(self.layer, self, load)
            self.seen = None

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        """Move the selection bias: up where an expert had less than the mean load, down where more."""
        bias = self.router.selection_bias
        assert bias is not None
        bias += self.settings.selection_bias_rate * torch.sign(load.mean() - load).to(bias)

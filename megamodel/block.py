"""One decoder block; its layout is a table entry, not a branch.

B batch, S sequence length (S / tp between the regions under sequence parallelism), D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamodel.attention import GroupedAttention, Place
from megamodel.auxiliary import Auxiliary
from megamodel.cache import Cache
from megamodel.config import LayerSettings, Model
from megamodel.dropout import Clock, KeyedDropout
from megamodel.feedforward import FeedForward
from megamodel.kernels.compiler import compiled
from megamodel.latent import LatentAttention
from megamodel.moe import MixtureOfExperts
from megamodel.norm import Normalise, build_norm
from megamodel.position import Position
from parallel.tensor import ColumnLinear, TensorParallel

Stream = tuple[Tensor, Tensor, Tensor]  # (x, positions, samples): all that crosses a stage border
Recompute = Literal["none", "block", "attention"]
ATTENTIONS = {"grouped": GroupedAttention, "latent": LatentAttention}


@dataclass(frozen=True)
class Layout:
    """Where the norms stand around a sublayer f, and whether both read the same stream.

    before: f(N x); after: N f(x); of_sum: N(x + f(x)). parallel: y = x + A(N x) + F(N x), with one norm that
    both share, or two.
    """

    before: bool = False
    after: bool = False
    of_sum: bool = False
    parallel: bool = False
    shared: bool = False

    @property
    def norms(self) -> int:
        """Norms of a block."""
        return (self.before + self.after + self.of_sum) * (1 if self.shared else 2)


LAYOUTS: dict[str, Layout] = {
    "pre": Layout(before=True),
    "post": Layout(of_sum=True),
    "double": Layout(before=True, after=True),
    "output": Layout(after=True),
    "parallel_shared": Layout(before=True, parallel=True, shared=True),
    "parallel_two": Layout(before=True, parallel=True),
}


class Sublayer(nn.Module):
    """f with its norms and what is done to its output before the sum."""

    def __init__(
        self,
        name: str,
        settings: Model,
        inner: nn.Module,
        dropout: KeyedDropout,
        parallel: TensorParallel,
        *,
        reads_normed: bool = False,
    ) -> None:
        super().__init__()
        layout = LAYOUTS[settings.layout]

        def norm(present: bool, suffix: str) -> nn.Module:
            if not present:
                return nn.Identity()
            return build_norm(settings.norm, f"{name}{suffix}", settings.d_model, parallel)

        self.before = norm(layout.before and not reads_normed, "_norm")
        self.inner = inner
        self.after = norm(layout.after, "_output_norm")
        self.of_sum = norm(layout.of_sum, "_sum_norm")
        self.scale = settings.residual_scale
        self.dropout = dropout
        self.parallel = parallel

    def branch(self, x: Tensor, samples: Tensor, *inputs: Any) -> Tensor:
        """The summand of an input that is normed already."""
        y = self.after(self.inner(x, *inputs))
        if self.scale != 1:
            y = y * self.scale
        first = self.parallel.group.rank * y.shape[1] if self.parallel.sequence else 0
        return self.dropout(y, samples, first_token=first)

    def forward(self, x: Tensor, samples: Tensor, *inputs: Any) -> Tensor:
        return self.of_sum(x + self.branch(self.before(x), samples, *inputs))


class Block(nn.Module):
    """Attention and feed-forward around the residual stream: (x, positions, samples) -> the same."""

    def __init__(
        self,
        settings: Model,
        layer: int,
        *,
        position: Position,
        documents: bool,
        seed: int,
        clock: Clock,
        recompute: Recompute,
        parallel: TensorParallel,
        auxiliary: Auxiliary,
    ) -> None:
        super().__init__()
        self.run: Callable[..., Tensor] = self._run
        self.joint = joint_projection(settings, layer, parallel)
        name, own = f"blocks.{layer}", settings.layer(layer)
        dropout, std = settings.dropout, standard_deviation(settings)

        def keyed(p: float, site: str) -> KeyedDropout:
            return KeyedDropout(p, seed=seed, layer=layer, site=site, clock=clock)

        self.recompute, self.parallel = recompute, parallel
        self.regime, self.prepare = position.regime, position.prepare
        inner = own.attention.n_heads * own.attention.value_width
        place = Place(
            name=f"{name}.attention",
            layer=layer,
            d_model=settings.d_model,
            position=position,
            std=std(settings.d_model),
            output_std=std(inner) * output_scale(settings),
            documents=documents,
            dropout=keyed(dropout.attention, "attention"),
            parallel=parallel,
            projected=self.joint is not None,
        )
        attention = ATTENTIONS[own.attention.kind](own.attention, place)  # type: ignore[arg-type]
        joint = self.joint is not None
        feedforward = _feedforward(f"{name}.feedforward", settings, own, layer, auxiliary, parallel, joint)
        layout = LAYOUTS[settings.layout]
        self.is_parallel, self.is_shared = layout.parallel, layout.shared
        self.attend = Sublayer(
            f"{name}.attention",
            settings,
            attention,
            keyed(dropout.residual, "attention_output"),
            parallel,
        )
        self.feed = Sublayer(
            f"{name}.feedforward",
            settings,
            feedforward,
            keyed(dropout.residual, "feedforward_output"),
            parallel,
            reads_normed=layout.shared,
        )

        plain_sum = isinstance(self.attend.of_sum, nn.Identity)
        self.joins = not self.is_parallel and plain_sum and isinstance(self.feed.before, Normalise)

    @property
    def attention(self) -> nn.Module:
        return self.attend.inner

    @property
    def feedforward(self) -> nn.Module:
        return self.feed.inner

    def compile_block(self) -> None:
        """Have training run what torch.compile makes of this block."""
        if isinstance(self.feedforward, MixtureOfExperts):
            # Which tokens go where is in the data, and its losses leave the graph on the side.
            self.feedforward.forward = torch.compiler.disable(self.feedforward.forward)  # type: ignore[method-assign]
        self.run = compiled(self._run)

    def _joined(
        self, x: Tensor, positions: Tensor, samples: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """(the stream after the attention, what the feed-forward reads): the sum and its norm in one."""

        def branch(x: Tensor) -> Tensor:
            return self.attend.branch(self.attend.before(x), samples, positions, samples, cache)

        recomputes = self.recompute == "attention" and self.training
        attended = recomputed(branch, x) if recomputes else branch(x)
        norm = self.feed.before
        assert isinstance(norm, Normalise)
        return norm.added(x, attended)

    def _attended(self, x: Tensor, positions: Tensor, samples: Tensor, cache: Cache | None) -> Tensor:
        inputs = (x, samples, positions, samples, cache)
        if self.recompute == "attention" and self.training:
            return recomputed(self.attend, *inputs)
        return self.attend(*inputs)

    def _run(self, x: Tensor, positions: Tensor, samples: Tensor, cache: Cache | None = None) -> Tensor:
        if self.joins:
            x, normed = self._joined(x, positions, samples, cache)
            return self.feed.of_sum(x + self.feed.branch(normed, samples))
        if not self.is_parallel:
            return self.feed(self._attended(x, positions, samples, cache), samples)
        normed = self.attend.before(x)
        other = normed if self.is_shared else self.feed.before(x)
        inputs: tuple[Any, ...] = (normed, samples, positions, samples, cache)
        inner: tuple[Any, ...] = (other, samples)
        if self.joint is not None:
            made = self.joint.entered(normed, self.parallel)
            inputs, inner = (*inputs, made[:3]), (*inner, made[3:])
        attended = self.attend.branch
        if self.recompute == "attention" and self.training:
            return x + recomputed(attended, *inputs) + self.feed.branch(*inner)
        return x + attended(*inputs) + self.feed.branch(*inner)

    def forward(self, stream: Stream, cache: Cache | None = None) -> Stream:
        x, positions, samples = stream
        self.prepare(positions)
        run = self.run if self.training else self._run
        if self.recompute == "block" and self.training:
            y = recomputed(run, x, positions, samples)
        else:
            y = run(x, positions, samples, cache)
        if isinstance(self.feedforward, MixtureOfExperts):
            self.feedforward.report()
        return y, positions, samples


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), whose inner activations are made again in the backward pass.

    Randomness is keyed, so there is no generator state to save for the second forward.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def joint_projection(settings: Model, layer: int, parallel: TensorParallel) -> ColumnLinear | None:
    """q, k, v and the inner feed-forward in one product, where all read the same normed x and only then."""
    own, form = settings.layer(layer), settings.feedforward
    if not LAYOUTS[settings.layout].shared or own.experts is not None:
        return None
    attention = own.attention
    if not isinstance(attention, GroupedAttention.Config) or attention.bias != form.bias:
        return None
    heads = {f"blocks.{layer}.attention.{name}": width for name, width in attention.outputs().items()}
    inner = {f"blocks.{layer}.feedforward.{name}": width for name, width in form.outputs().items()}
    std = standard_deviation(settings)(settings.d_model)
    outputs = {**heads, **inner}
    return ColumnLinear("", settings.d_model, outputs, std=std, group=parallel.group, bias=form.bias)


def _feedforward(
    name: str,
    settings: Model,
    own: LayerSettings,
    layer: int,
    auxiliary: Auxiliary,
    parallel: TensorParallel,
    projected: bool,
) -> nn.Module:
    std, scale, form = standard_deviation(settings), output_scale(settings), settings.feedforward
    width = std(settings.d_model)
    if own.experts is None:
        return FeedForward(
            name,
            form,
            settings.d_model,
            std=width,
            output_std=std(form.d_ff) * scale,
            parallel=parallel,
            projected=projected,
        )
    return MixtureOfExperts(
        name,
        own.experts,
        form,
        settings.d_model,
        layer=layer,
        std=width,
        output_std=std(own.experts.d_ff) * scale,
        shared_std=std(max(own.experts.shared_d_ff, 1)) * scale,
        auxiliary=auxiliary,
        parallel=parallel,
    )


def standard_deviation(settings: Model) -> Callable[[int], float]:
    """Fan-in -> standard deviation of a matrix's initial weights."""
    fixed = settings.initial.std
    return (lambda fan_in: fan_in**-0.5) if fixed is None else (lambda fan_in: fixed)


def output_scale(settings: Model) -> float:
    """Factor on the sublayers' output matrices: 1 / sqrt(2 n_layers), so that the stream starts tame."""
    return (2 * settings.n_layers) ** -0.5 if settings.initial.scale_outputs else 1.0

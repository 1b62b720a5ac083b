"""One decoder block; its layout is a table entry, not a branch.

B batch, S sequence length (S / tp between the regions under sequence parallelism), D width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.dropout import Clock, KeyedDropout
from megamodel.feedforward import FeedForward
from megamodel.norm import build_norm
from megamodel.position import Position
from parallel.tensor import TensorParallel

Stream = tuple[Tensor, Tensor, Tensor]  # (x, positions, samples): all that crosses a stage border


def _pre(block: "Block", x: Tensor, positions: Tensor, samples: Tensor) -> Tensor:
    """h = x + A(N1 x); y = h + F(N2 h)."""
    h = x + block.drop_attention(
        block.attention(block.attention_norm(x), positions, samples), samples, x.shape[1]
    )
    return h + block.drop_feedforward(block.feedforward(block.feedforward_norm(h)), samples, h.shape[1])


LAYOUTS: dict[str, Callable[["Block", Tensor, Tensor, Tensor], Tensor]] = {"pre": _pre}


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
        recompute: bool,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        name, d_model = f"blocks.{layer}", settings.d_model
        std, scale = standard_deviation(settings), output_scale(settings)
        dropout = settings.dropout

        def keyed(p: float, site: str) -> KeyedDropout:
            return KeyedDropout(p, seed=seed, layer=layer, site=site, clock=clock)

        self.layout = LAYOUTS[settings.layout]
        self.recompute = recompute
        self.parallel = parallel
        self.attention_norm = build_norm(settings.norm, f"{name}.attention_norm", d_model, parallel)
        inner = settings.attention.n_heads * settings.attention.head_width
        self.attention = GroupedAttention(
            f"{name}.attention",
            settings.attention,
            d_model,
            position=position,
            std=std(d_model),
            output_std=std(inner) * scale,
            documents=documents,
            dropout=keyed(dropout.attention, "attention"),
            parallel=parallel,
        )
        self.feedforward_norm = build_norm(settings.norm, f"{name}.feedforward_norm", d_model, parallel)
        self.feedforward = FeedForward(
            f"{name}.feedforward",
            settings.feedforward,
            d_model,
            std=std(d_model),
            output_std=std(settings.feedforward.d_ff) * scale,
            parallel=parallel,
        )
        self._attention_dropout = keyed(dropout.residual, "attention_output")
        self._feedforward_dropout = keyed(dropout.residual, "feedforward_output")

    def drop_attention(self, y: Tensor, samples: Tensor, tokens: int) -> Tensor:
        """Residual dropout of the attention's output."""
        return self._attention_dropout(y, samples, first_token=self._first(tokens))

    def drop_feedforward(self, y: Tensor, samples: Tensor, tokens: int) -> Tensor:
        """Residual dropout of the feed-forward's output."""
        return self._feedforward_dropout(y, samples, first_token=self._first(tokens))

    def _first(self, tokens: int) -> int:
        return self.parallel.group.rank * tokens if self.parallel.sequence else 0

    def _run(self, x: Tensor, positions: Tensor, samples: Tensor) -> Tensor:
        return self.layout(self, x, positions, samples)

    def forward(self, stream: Stream) -> Stream:
        x, positions, samples = stream
        if self.recompute and self.training:
            # Randomness is keyed, so there is no generator state to save for the second forward.
            y: Any = checkpoint(
                self._run, x, positions, samples, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y = self._run(x, positions, samples)
        return y, positions, samples


def standard_deviation(settings: Model) -> Callable[[int], float]:
    """Fan-in -> standard deviation of a matrix's initial weights."""
    fixed = settings.initial.std
    return (lambda fan_in: fan_in**-0.5) if fixed is None else (lambda fan_in: fixed)


def output_scale(settings: Model) -> float:
    """Factor on the sublayers' output matrices: 1 / sqrt(2 n_layers), so that the stream starts tame."""
    return (2 * settings.n_layers) ** -0.5 if settings.initial.scale_outputs else 1.0

"""The feed-forward layer. D width, F = d_ff."""

import dataclasses

from torch import Tensor, nn

from conf.typed import config, setting
from megamodel.activation import ACTIVATIONS, ActivationName, gating
from parallel.tensor import ColumnLinear, Heads, RowLinear, TensorParallel


class FeedForward(nn.Module):
    """Gated: (act(x Wgate) * (x Wup)) Wdown, the first two in one product. Plain: act(x Wup) Wdown."""

    @config
    class Config:
        d_ff: int = setting(1024, on_resume="must_equal", help="inner width")
        activation: ActivationName = setting("silu", on_resume="must_equal", help="pointwise function")
        gated: bool = setting(True, on_resume="must_equal", help="with silu: SwiGLU")
        bias: bool = setting(False, on_resume="must_equal", help="biases on all of its products")
        clamp: float | None = setting(
            None, on_resume="must_equal", help="SwiGLU with clamped branches and up + 1 (gpt-oss: 7)"
        )
        alpha: float = setting(1.702, on_resume="must_equal", help="slope of the sigmoid of the clamped form")

        def __post_init__(self) -> None:
            if self.d_ff < 1:
                raise ValueError(f"model.feedforward.d_ff ({self.d_ff}) must be at least 1")
            if self.clamp is not None and not (self.gated and self.activation == "silu" and self.clamp > 0):
                raise ValueError(
                    f"model.feedforward.clamp ({self.clamp}) must be above 0 and needs gated=true and "
                    f"activation=silu (they are {self.gated} and {self.activation})"
                )

        @property
        def matrices(self) -> int:
            """Products of D x F."""
            return 3 if self.gated else 2

        def outputs(self) -> dict[str, Heads]:
            """What is made of x."""
            width = Heads(self.d_ff)
            return {"gate": width, "up": width} if self.gated else {"up": width}

        def of_width(self, d_ff: int) -> "FeedForward.Config":
            """The same form at another inner width."""
            return dataclasses.replace(self, d_ff=d_ff)

    def __init__(
        self,
        name: str,
        settings: "FeedForward.Config",
        d_model: int,
        *,
        std: float,
        output_std: float,
        parallel: TensorParallel,
        projected: bool = False,
    ) -> None:
        super().__init__()
        if settings.d_ff % parallel.group.size:
            raise ValueError(
                f"model.feedforward.d_ff ({settings.d_ff}) must be divisible by parallel.tp "
                f"({parallel.group.size})"
            )
        self.settings, self.gated = settings, settings.gated
        self.gate = gating(settings.activation, clamp=settings.clamp, alpha=settings.alpha)
        self.activation = ACTIVATIONS[settings.activation]
        self.parallel = parallel
        bias = settings.bias
        outputs, group = settings.outputs(), parallel.group
        self.inner = (
            None if projected else ColumnLinear(name, d_model, outputs, std=std, group=group, bias=bias)
        )
        self.down = RowLinear(
            f"{name}.down", settings.d_ff, d_model, std=output_std, parallel=parallel, bias=bias
        )

    def forward(self, x: Tensor, projected: tuple[Tensor, ...] | None = None) -> Tensor:
        """x (B, S, D) between the regions -> like x. projected: the inner products, made elsewhere."""
        made = projected if self.inner is None else self.inner.entered(x, self.parallel)
        assert made is not None
        return self.down(self.gate(*made) if self.gated else self.activation(*made))

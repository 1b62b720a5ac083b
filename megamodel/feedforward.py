"""The feed-forward layer. D width, F = d_ff."""

from torch import Tensor, nn

from conf.typed import config, setting
from megamodel.activation import ACTIVATIONS, ActivationName
from parallel.tensor import ColumnLinear, Heads, RowLinear, TensorParallel


class FeedForward(nn.Module):
    """Gated: (act(x Wgate) * (x Wup)) Wdown, the first two in one product. Plain: act(x Wup) Wdown."""

    @config
    class Config:
        d_ff: int = setting(1024, on_resume="must_equal", help="inner width")
        activation: ActivationName = setting("silu", on_resume="must_equal", help="pointwise function")
        gated: bool = setting(True, on_resume="must_equal", help="with silu: SwiGLU")

        def __post_init__(self) -> None:
            if self.d_ff < 1:
                raise ValueError(f"model.feedforward.d_ff ({self.d_ff}) must be at least 1")

    def __init__(
        self,
        name: str,
        settings: "FeedForward.Config",
        d_model: int,
        *,
        std: float,
        output_std: float,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        width = Heads(settings.d_ff)
        if settings.d_ff % parallel.group.size:
            raise ValueError(
                f"model.feedforward.d_ff ({settings.d_ff}) must be divisible by parallel.tp "
                f"({parallel.group.size})"
            )
        outputs = {"gate": width, "up": width} if settings.gated else {"up": width}
        self.gated = settings.gated
        self.activation = ACTIVATIONS[settings.activation]
        self.parallel = parallel
        self.inner = ColumnLinear(name, d_model, outputs, std=std, group=parallel.group)
        self.down = RowLinear(f"{name}.down", settings.d_ff, d_model, std=output_std, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) between the regions -> like x."""
        if not self.gated:
            (up,) = self.inner(self.parallel.enter(x))
            return self.down(self.activation(up))
        gate, up = self.inner(self.parallel.enter(x))
        return self.down(self.activation(gate) * up)

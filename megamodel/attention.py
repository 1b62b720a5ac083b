"""Attention with grouped key/value heads (MHA: K = H, MQA: K = 1).

B batch, S sequence length, H query heads, K key/value heads, E head width; h and k this rank's share.
"""

from typing import Literal

from torch import Tensor, nn

from conf.typed import config, setting
from megamodel.attend import Attend
from megamodel.dropout import KeyedDropout
from megamodel.position import Position
from parallel.tensor import ColumnLinear, Heads, RowLinear, TensorParallel


class GroupedAttention(nn.Module):
    """x -> o(attend(rotate(q x), rotate(k x), v x)); the three products are one."""

    @config
    class Config:
        kind: Literal["grouped"] = setting("grouped", on_resume="must_equal", help="grouped-query attention")
        n_heads: int = setting(8, on_resume="must_equal", help="query heads")
        n_kv_heads: int = setting(4, on_resume="must_equal", help="key/value heads; divides n_heads")
        head_width: int = setting(
            48, on_resume="must_equal", help="width of a head; heads x width may differ from d_model"
        )
        window: int | None = setting(
            None, on_resume="must_equal", help="a query sees this many keys, itself included; null: all"
        )

        def __post_init__(self) -> None:
            if min(self.n_heads, self.n_kv_heads, self.head_width) < 1:
                raise ValueError(
                    f"model.attention: n_heads ({self.n_heads}), n_kv_heads ({self.n_kv_heads}) and "
                    f"head_width ({self.head_width}) must be at least 1"
                )
            if self.n_heads % self.n_kv_heads:
                raise ValueError(
                    f"model.attention.n_heads ({self.n_heads}) must be a multiple of n_kv_heads "
                    f"({self.n_kv_heads}); use n_kv_heads in {_divisors(self.n_heads)}"
                )
            if self.window is not None and self.window < 1:
                raise ValueError(
                    f"model.attention.window ({self.window}) must be at least 1, or null for none"
                )

    def __init__(
        self,
        name: str,
        settings: "GroupedAttention.Config",
        d_model: int,
        *,
        position: Position,
        std: float,
        output_std: float,
        documents: bool,
        dropout: KeyedDropout,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.head_width = width = settings.head_width
        queries = Heads(settings.n_heads, width)
        keys = Heads(settings.n_kv_heads, width)
        self.qkv = ColumnLinear(
            name, d_model, {"q": queries, "k": keys, "v": keys}, std=std, group=parallel.group
        )
        self.output = RowLinear(
            f"{name}.output", settings.n_heads * width, d_model, std=output_std, parallel=parallel
        )
        self.position = position
        first_head, _ = queries.local_blocks(parallel.group)
        self.attend = Attend(
            scale=width**-0.5,
            window=settings.window,
            documents=documents,
            dropout=dropout,
            first_head=first_head,
        )

    def forward(self, x: Tensor, positions: Tensor, samples: Tensor) -> Tensor:
        """x (B, S, D) between the regions, positions (B, S), samples (B,) -> like x."""
        q, k, v = (
            y.unflatten(-1, (-1, self.head_width)) for y in self.qkv(self.parallel.enter(x))
        )  # (B, S, h, E), (B, S, k, E) twice
        q, k = self.position.rotate(q, k, positions)
        return self.output(self.attend(q, k, v, positions, samples).flatten(2))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

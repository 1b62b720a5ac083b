"""Losses that are made inside the model, and what their layers count: one object for the layers of a rank.

Their gradient enters where they are made, attached to an activation, so that no stage passes anything on.
"""

import torch
from torch import Tensor

from parallel.collectives import all_reduce
from parallel.mesh import SINGLE, Group

NAMES = ("loss/balance", "loss/router_z")  # the sums, in their order


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, torch.full_like(ctx.like, ctx.weight), None


def attach(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """x unchanged; where its gradient passes, weight x the gradient of the loss (0-d) joins in."""
    return _Attach.apply(x, loss, weight)  # type: ignore[return-value]


class Auxiliary:
    """What the layers of this rank add up over one step. `begin` before it, `applied` after its update."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.dp: Group = SINGLE
        self.begin(sequences=1)

    def begin(self, *, sequences: int) -> None:
        """A new step with so many sequences on this data rank. The gradients of ranks will be averaged."""
        self.weight = 1.0 / sequences
        self.total: Tensor | None = None
        self.loads: dict[int, tuple[torch.nn.Module, Tensor]] = {}

    def record(self, losses: Tensor) -> None:
        """Losses (2,) in the order of NAMES, each summed over the sequences of a micro-batch."""
        losses = losses.detach().double()
        self.total = losses if self.total is None else self.total + losses

    def count(self, layer: int, module: torch.nn.Module, load: Tensor) -> None:
        """Tokens (n_experts) that each expert of a layer was given, for balancing by bias."""
        before = self.loads.get(layer)
        self.loads[layer] = (module, load if before is None else before[1] + load)

    def sums(self) -> Tensor:
        """(2,) fp64, in the order of NAMES: this rank's share of the means over the data rank's sequences."""
        return torch.zeros(2, dtype=torch.float64) if self.total is None else self.total * self.weight

    @torch.no_grad()
    def applied(self) -> None:
        """After an update. Collective over dp: every expert's bias takes its step towards an even load."""
        for _, (module, load) in sorted(self.loads.items()):
            module.balance(all_reduce(load.double(), self.dp))  # type: ignore[operator]

"""DeepSpeed's two ZeRO-1 optimizers (fp32 and bf16) behind one face.

Both flatten each parameter group, cut it into equal parts, one a data rank, and keep an fp32 master and
Adam's moments of their part. `Partition` knows which stretch of which parameter lies where, so that the norm,
clipping, skipping, saving and restoring are written once. Adding up and reducing gradients is ours
(parallel/gradients.py): DeepSpeed copies them up to three times on the way to Adam and rounds sums to bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from parallel.gradients import Gradients
from parallel.mesh import Mesh
from parallel.piece import Piece, pieces_of


@dataclass(frozen=True)
class StateTensor:
    """A live, contiguous 1-d view of one stretch of one piece; nothing is copied.

    kind: master | exp_avg | exp_avg_sq. The view holds the elements [flat_start, flat_start + numel) of the
    piece's box, counted row-major. Piece.owner is False on replicas, which are restored but not saved.
    """

    piece: Piece
    kind: str
    tensor: Tensor
    flat_start: int


@dataclass(frozen=True)
class _Stretch:
    """Elements [start, start + length) of a flattened parameter at `at` of its group's partition."""

    group: int
    parameter: Tensor
    start: int
    length: int
    at: int

    def overlaps(self) -> list[tuple[Piece, int, int, int]]:
        """(piece, first element within the piece, within the stretch, length) of each piece it touches."""
        found = []
        for piece in pieces_of(self.parameter):
            first = max(self.start, piece.start)
            stop = min(self.start + self.length, piece.start + piece.numel)
            if first < stop:
                found.append((piece, first - piece.start, first - self.start, stop - first))
        return found


class ZeroPartition:
    """This data rank's part of a DeepSpeed ZeRO-1 optimizer over torch's AdamW."""

    def __init__(
        self,
        optimizer: BF16_Optimizer | DeepSpeedZeroOptimizer,
        mesh: Mesh,
        *,
        clip_norm: float,
        tied: Sequence[Tensor] = (),
    ) -> None:
        self.optimizer = optimizer
        self.mesh = mesh
        self.clip_norm = clip_norm
        self.is_bf16 = isinstance(optimizer, BF16_Optimizer)
        groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
        self.parameters: list[Tensor] = [p for group in groups for p in group]
        self.masters = _masters(optimizer, mesh)
        self.stretches: list[_Stretch] = []
        for index, group in enumerate(groups):
            self.stretches += _stretches(index, group, self.masters[index].numel(), mesh.dp.rank)
        self.reduction = Gradients(groups, [m.numel() for m in self.masters], mesh.dp, tied=tied)
        self._trained = self._start_adam()
        self._updates = 0

    def _start_adam(self) -> list[Tensor]:
        """Have Adam train each stretch of the masters, its moments there from the beginning."""
        trained: list[Tensor] = [
            torch.nn.Parameter(self.masters[s.group].detach().narrow(0, s.at, s.length))
            for s in self.stretches
        ]
        adam = self.optimizer.optimizer
        adam.state.clear()
        for index, group in enumerate(adam.param_groups):
            group["params"] = [p for s, p in zip(self.stretches, trained, strict=True) if s.group == index]
            for master in group["params"]:
                adam.state[master] = {
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=master.device if group.get("fused") else "cpu"
                    ),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
        return trained

    def gradients(self) -> list[tuple[_Stretch, Tensor]]:
        """The reduced gradient of each stretch of this partition, as a flat live view."""
        averaged = self.reduction.averaged
        return [(s, averaged(s.parameter, start=s.start, length=s.length, at=s.at)) for s in self.stretches]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of the whole gradient, each logical element counted once: a 0-d fp64 tensor.

        Collective over the world. NaN or infinity anywhere, replicas included, gives a non-finite norm on
        every rank.
        """
        owned, replicas = [], []
        for stretch, gradient in self.gradients():
            overlaps = stretch.overlaps()
            if all(piece.owner for piece, *_ in overlaps):
                # What no piece covers is vocabulary padding, whose gradient is zero.
                owned.append(gradient)
                continue
            for piece, _, at, n in overlaps:
                (owned if piece.owner else replicas).append(gradient.narrow(0, at, n))
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if owned:
            total += torch.stack(torch._foreach_norm(owned)).double().square().sum()
        if replicas:
            # They do not count, but a replica that is no number would ruin its rank's weights unseen.
            unseen = torch.stack(torch._foreach_norm(replicas)).double().square().sum()
            total += torch.where(unseen.isfinite(), 0.0, torch.nan)
        if self.mesh.world.size > 1:
            dist.all_reduce(total, group=self.mesh.world.handle)
        return total.sqrt()

    def step(self, norm: float) -> None:
        """Clip by the given norm and update masters, moments and weights."""
        over = (norm + 1e-6) / self.clip_norm if self.clip_norm > 0 else 0.0
        adam, gradients = self.optimizer.optimizer, [gradient for _, gradient in self.gradients()]
        fused = all(group["fused"] for group in adam.param_groups)
        if over > 1.0 and gradients and not fused:
            torch._foreach_mul_(gradients, 1.0 / over)
        for master, gradient in zip(self._trained, gradients, strict=True):
            master.grad = gradient
        # The fused form divides while it reads, as it does for torch's GradScaler: one pass less over memory.
        divisor = torch.full((), over, device=self.mesh.device) if over > 1.0 and fused else None
        adam.grad_scale = divisor  # type: ignore[attr-defined]
        adam.step()
        self._updates += 1
        self.discard()
        self._update_weights()

    def _update_weights(self) -> None:
        """The weights of all parts from the masters. Collective over dp."""
        if self.is_bf16 or self.mesh.dp.size > 1:
            self.optimizer.update_lp_params()

    def discard(self) -> None:
        """Forget the gradients: nothing else changes."""
        for master in self._trained:
            master.grad = None
        self.reduction.clear()

    def close(self) -> None:
        """Let go of the parameters."""
        self.reduction.close()

    def state(self) -> list[StateTensor]:
        """Masters and moments of this partition as named stretches, in a fixed order."""
        found = []
        for stretch, master in zip(self.stretches, self._trained, strict=True):
            moments = self.optimizer.optimizer.state[master]
            views = {
                "master": master.detach(),
                "exp_avg": moments["exp_avg"],
                "exp_avg_sq": moments["exp_avg_sq"],
            }
            for piece, flat_start, at, length in stretch.overlaps():
                for kind, flat in views.items():
                    found.append(StateTensor(piece, kind, flat.narrow(0, at, length), flat_start))
        return found

    @property
    def adam_step(self) -> int:
        """Updates that Adam has made."""
        return self._updates

    def restored(self, step: int) -> None:
        """After masters and moments were overwritten: Adam's count, and the weights from the masters."""
        self._updates = step
        for master in self._trained:
            self.optimizer.optimizer.state[master]["step"].fill_(float(step))
        self.discard()
        self._update_weights()


def _masters(optimizer: BF16_Optimizer | DeepSpeedZeroOptimizer, mesh: Mesh) -> list[Tensor]:
    """The flat fp32 masters of this rank's part of each group; frees DeepSpeed's buffers for gradients."""
    if isinstance(optimizer, BF16_Optimizer):
        for buffers in (
            optimizer.fp32_groups_gradients_flat,
            optimizer.fp32_groups_gradients,
            optimizer.fp32_groups_gradient_flat_partition,
            optimizer.fp32_groups_actual_gradients_flat,
            optimizer.non_expert_gradients,
            optimizer.fp32_groups_gradient_dict,
        ):
            buffers.clear()
        masters = optimizer.fp32_groups_flat_partition
        parameters = [p for group in optimizer.bf16_groups for p in group]
    else:
        # The weights of this rank's part are their own masters: one copy less to hold and to make.
        masters = optimizer.single_partition_of_fp32_groups
        for master, parts in zip(masters, optimizer.parallel_partitioned_bit16_groups, strict=True):
            master.data = parts[mesh.dp.rank].data
        parameters = [p for group in optimizer.bit16_groups for p in group]
    for parameter in parameters:
        parameter._hp_mapping = None  # it holds buffers and masters that were
    return masters


def _stretches(index: int, group: list[Tensor], size: int, rank: int) -> list[_Stretch]:
    """Where the parameters of a group lie in the part [rank size, (rank + 1) size) of its flat buffer."""
    first, found, offset = rank * size, [], 0
    for parameter in group:
        start = max(first, offset)
        stop = min(first + size, offset + parameter.numel())
        if start < stop:
            found.append(_Stretch(index, parameter, start - offset, stop - start, start - first))
        offset += parameter.numel()
    return found

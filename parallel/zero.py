"""DeepSpeed's two ZeRO-1 optimizers (fp32 and bf16) behind one face.

Both flatten each parameter group, cut it into equal parts, one a data rank, and keep an fp32 master and
Adam's moments of their part. `Partition` knows which stretch of which parameter lies where, so that the norm,
clipping, skipping, saving and restoring are written once. In fp32 it reduces the gradients too: DeepSpeed
copies them three times on the way to Adam.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from parallel.mesh import Group, Mesh
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
        self, optimizer: BF16_Optimizer | DeepSpeedZeroOptimizer, mesh: Mesh, *, clip_norm: float
    ) -> None:
        self.optimizer = optimizer
        self.mesh = mesh
        self.clip_norm = clip_norm
        self.is_bf16 = isinstance(optimizer, BF16_Optimizer)
        groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
        self.masters: list[Tensor] = (
            optimizer.fp32_groups_flat_partition
            if isinstance(optimizer, BF16_Optimizer)
            else optimizer.single_partition_of_fp32_groups
        )
        self.parameters: list[Tensor] = [p for group in groups for p in group]
        self._groups: list[list[Tensor]] = [list(group) for group in groups]
        # In fp32 the gradients of whole groups, as long as all parts together.
        self._flat: list[Tensor] = []
        if isinstance(optimizer, BF16_Optimizer):
            self._flat = optimizer.fp32_groups_gradients_flat
        else:
            # The weights of this rank's part are their own masters: one copy less to hold and to make.
            weights = optimizer.parallel_partitioned_bit16_groups
            for master, parts in zip(self.masters, weights, strict=True):
                master.data = parts[mesh.dp.rank].data
            for parameter in self.parameters:
                parameter._hp_mapping = None  # type: ignore[attr-defined]  # it holds the masters that were
            self._flat = [m.new_zeros(m.numel() * mesh.dp.size) for m in self.masters]
        self._gradients: list[Tensor] = (
            optimizer.fp32_groups_gradient_flat_partition
            if isinstance(optimizer, BF16_Optimizer)
            else [self._part(flat, m.numel()) for flat, m in zip(self._flat, self.masters, strict=True)]
        )
        self.stretches: list[_Stretch] = []
        for index, group in enumerate(groups):
            self.stretches += _stretches(index, group, self.masters[index].numel(), mesh.dp.rank)
        self._start_moments()

    def _start_moments(self) -> None:
        """Adam's state from the beginning, so that a restore finds what to overwrite."""
        for group in self.optimizer.optimizer.param_groups:
            for master in group["params"]:
                self.optimizer.optimizer.state[master] = {
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=master.device if group.get("fused") else "cpu"
                    ),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    def accumulated(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter summed over the micro-batches, before any reduction over dp."""
        if self.is_bf16:
            gradient = getattr(parameter, "_hp_grad", None)
            return None if gradient is None else gradient.view(parameter.shape)
        return self.optimizer.get_gradient_for_reduction(parameter)

    def _part(self, flat: Tensor, size: int) -> Tensor:
        return flat.narrow(0, self.mesh.dp.rank * size, size)

    @torch.no_grad()
    def begin(self) -> None:
        """fp32: the gradients of the coming step are added up where they are reduced, from zero."""
        if self.is_bf16:  # DeepSpeed adds them up in fp32 as they come
            return
        for group, flat in zip(self._groups, self._flat, strict=True):
            flat.zero_()
            places = flat[: sum(p.numel() for p in group)].split([p.numel() for p in group])
            for place, parameter in zip(places, group, strict=True):
                parameter.grad = place.view(parameter.shape)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the accumulated gradients over dp in fp32, each rank its part. Collective over dp.

        DeepSpeed would round the sums over micro-batches to bf16 first, even where there is nobody to send
        them to.
        """
        dp = self.mesh.dp
        for group, flat, part in zip(self._groups, self._flat, self._gradients, strict=True):
            for parameter in group:
                parameter.grad = None
            if dp.size > 1:
                _sum_over(part, flat, dp)
                part.div_(dp.size)

    def gradients(self) -> list[tuple[_Stretch, Tensor]]:
        """The reduced gradient of each stretch of this partition, as a flat live view."""
        return [(s, self._gradients[s.group].narrow(0, s.at, s.length)) for s in self.stretches]

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
        if over > 1.0:
            for gradient in self._gradients:
                gradient.mul_(1.0 / over)
        for master, gradient in zip(self.masters, self._gradients, strict=True):
            master.grad = gradient
        self.optimizer.optimizer.step()
        self._update_weights()
        if self.is_bf16:
            self.optimizer.clear_hp_grads()

    def _update_weights(self) -> None:
        """The weights of all parts from the masters. Collective over dp."""
        if self.is_bf16 or self.mesh.dp.size > 1:
            self.optimizer.update_lp_params()

    def discard(self) -> None:
        """Forget the gradients: nothing else changes."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[StateTensor]:
        """Masters and moments of this partition as named stretches, in a fixed order."""
        found = []
        for stretch in self.stretches:
            master = self.masters[stretch.group]
            moments = self.optimizer.optimizer.state[master]
            views = {
                "master": master.data,
                "exp_avg": moments["exp_avg"],
                "exp_avg_sq": moments["exp_avg_sq"],
            }
            for piece, flat_start, at, length in stretch.overlaps():
                for kind, flat in views.items():
                    view = flat.narrow(0, stretch.at + at, length)
                    found.append(StateTensor(piece, kind, view, flat_start))
        return found

    @property
    def adam_step(self) -> int:
        """Updates that Adam has made."""
        return int(self.optimizer.optimizer.state[self.masters[0]]["step"].item())

    def restored(self, step: int) -> None:
        """After masters and moments were overwritten: Adam's count, and the weights from the masters."""
        for master in self.masters:
            self.optimizer.optimizer.state[master]["step"].fill_(float(step))
        self.discard()
        self._update_weights()


def _sum_over(part: Tensor, flat: Tensor, group: Group) -> None:
    """The sum of every rank's `flat`, at least where `part` of it lies."""
    if flat.is_cuda:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(part, flat, group=group.handle)
    else:
        dist.all_reduce(flat, group=group.handle)


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

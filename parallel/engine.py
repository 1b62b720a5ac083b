"""The training engine: DeepSpeed's pipeline engine for every layout, one process included.

What it adds: layers and stages of our own, gradients that are sums over tp, one norm that every rank agrees
on, and the judgement of a step before its update is applied.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor, nn

from parallel.deepspeed_config import Precision, deepspeed_config
from parallel.gradients import split_groups
from parallel.mesh import Group, Mesh
from parallel.piece import Piece, pieces_of
from parallel.pipeline import GuardedEngine, LayerLike, StagedModule, quiet
from parallel.stages import stage_bounds
from parallel.start import close_at_stop
from parallel.stopwatch import Stopwatch
from parallel.zero import StateTensor, ZeroPartition

_DEEPSPEED_VERSION = "0.19.8"
_BUCKET_ELEMENTS = 16 << 20  # of gradients that are summed over tp in one call


class LossLike(Protocol):
    """What the engine asks of a loss: see megamodel.loss.Loss."""

    loss_sum: Tensor | None
    z_sum: Tensor | None
    max_logit: Tensor | None
    max_log_z: Tensor | None
    per_sample: list[Tensor]

    def reset(self) -> None: ...
    def __call__(self, made: Any, labels: tuple[Tensor, Tensor]) -> Tensor: ...


class AuxiliaryLike(Protocol):
    """What the engine asks of losses that the model makes inside: see megamodel.auxiliary.Auxiliary."""

    dp: Group

    def begin(self, *, sequences: int) -> None: ...
    def sums(self) -> Tensor: ...
    def applied(self) -> None: ...


class BatchLike(Protocol):
    """One micro-batch: see megamodel.data.batch.Batch."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def samples(self) -> Tensor: ...
    @property
    def valid_tokens(self) -> int: ...


@dataclass(frozen=True)
class Signals:
    """What is known of a step before its update, reduced over all ranks and equal on all.

    loss and z_loss per valid token of the global batch; norm before clipping; maxima are the caller's own
    numbers, the largest of all ranks each.
    """

    loss: float
    z_loss: float
    norm: float
    max_logit: float
    max_log_z: float
    non_finite: bool
    maxima: tuple[float, ...] = ()
    auxiliary: tuple[float, ...] = ()  # means over the global batch's sequences, summed over layers


@dataclass(frozen=True)
class StepResult:
    """One attempt. signals is None when no target of the global batch was valid: nothing was judged.

    seconds: of this rank, which waits for all others before the judgement; on a GPU those of the update
    before are in it, not its own. work_seconds: this rank alone, from where all data ranks have met to the
    end of its backward passes; waits within tp and pp are in it.
    """

    signals: Signals | None
    valid_tokens: int
    applied: bool
    seconds: float
    work_seconds: float = 0.0
    maxima: tuple[float, ...] = ()  # as in Signals, and there without them


Judge = Callable[[Signals], bool]
Gradients = Callable[[list[tuple[str, Tensor, Tensor]]], None]


def accept(signals: Signals) -> bool:
    """The judge that applies every finite update."""
    return True


class Engine:
    """Trains the layers under the loss on the mesh.

    make_optimizer gets the local parameters of this stage and returns torch's AdamW over its groups.
    bucket_bytes: gradients are summed over dp in pieces of about so many bytes while backward goes on; 0:
    after it.
    """

    def __init__(
        self,
        layers: Sequence[LayerLike],
        loss: LossLike,
        *,
        mesh: Mesh,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        precision: Precision,
        micro_batch: int,
        accumulation: int,
        clip_norm: float,
        stage_layers: Sequence[int] | None = None,
        set_step: Callable[[int], None] = lambda step: None,
        auxiliary: AuxiliaryLike | None = None,
        bucket_bytes: int = 0,
    ) -> None:
        _check_version()
        self.mesh = mesh
        self.loss = loss
        self._set_step = set_step
        self._overlaps = bucket_bytes > 0 and mesh.dp.size > 1
        self._auxiliary = auxiliary
        self.bounds = stage_bounds(
            [layer.cost for layer in layers],
            [layer.is_block for layer in layers],
            pp=mesh.pp.size,
            stage_layers=stage_layers,
        )
        raw = deepspeed_config(
            micro_batch=micro_batch,
            accumulation=accumulation,
            dp=mesh.dp.size,
            precision=precision,
            clip_norm=clip_norm,
        )
        with quiet():
            with torch.no_grad():  # it broadcasts tied weights, which autograd must not see
                self.module = StagedModule(layers, loss, mesh, self.bounds)
            mpu, tied, optimizer = self.module.mpu(), self.module.tied(), make_optimizer(self.module)
            if mesh.dp.size > 1:
                split_groups(optimizer, bucket_bytes=bucket_bytes or 1 << 62, tied=tied)
            self._engine = GuardedEngine(
                args=None,
                model=self.module,
                optimizer=optimizer,
                mpu=mpu,
                config=raw,
                config_class=DeepSpeedConfig(raw, mpu),
            )
        self.partition = ZeroPartition(self._engine.optimizer, mesh, clip_norm=clip_norm, tied=tied)
        self._untrained = _in_fp32(p for p in self.module.parameters() if not p.requires_grad)
        self._engine.attach(self._before_reduction, self._decide, self.partition)
        self._judge: Judge = accept
        self._applied = False
        self._signals: Signals | None = None
        self._on_gradients: Gradients | None = None
        self._maxima = self._found = ()
        self._work = Stopwatch(mesh.device)
        self._valid, self._valid_tokens = torch.zeros((), dtype=torch.int64), 0
        close_at_stop(self)

    @property
    def adam_step(self) -> int:
        """Updates that Adam has made."""
        return self.partition.adam_step

    @property
    def optimizer_step(self) -> int:
        """The same, under the name that checkpoints use."""
        return self.partition.adam_step

    def train_step(
        self,
        batches: Sequence[BatchLike],
        *,
        lr: float,
        tried: int,
        judge: Judge = accept,
        maxima: Sequence[float] = (),
        on_gradients: Gradients | None = None,
    ) -> StepResult:
        """One attempt at an update, on the micro-batches of this data rank. Collective.

        lr is applied as it is; tried keys dropout. The judge sees the signals before the update and says
        whether to apply it; a non-finite step is never applied. maxima: numbers of this rank, as many on
        each, that travel with the signals and come back as the largest of all ranks. on_gradients: called
        on each rank between backward and reduction with (name, weight, gradient) of each of its parameters,
        live: what the rank itself has computed.
        """
        started = time.perf_counter()
        valid = self._count_valid(batches)
        self._work.begin()
        self._maxima = tuple(maxima)
        if len(batches) != self._engine.micro_batches:
            size = self._engine.micro_batch_size * len(batches) * self.mesh.dp.size
            self._engine.set_train_batch_size(size)
        self._judge, self._valid, self._signals = judge, valid, None
        self._on_gradients = on_gradients
        self._set_step(tried)
        self.loss.reset()
        if self._auxiliary is not None:
            self._auxiliary.dp = self.mesh.dp
            self._auxiliary.begin(sequences=sum(batch.tokens.shape[0] for batch in batches))
        for group in self._engine.optimizer.optimizer.param_groups:
            group["lr"] = lr
        # A fault must be seen in the gradients of the rank that made it, so then they stay until the end.
        self.partition.reduction.begin(len(batches), overlap=self._overlaps and on_gradients is None)
        # How many targets are valid is known to the host with the verdict only: nothing waits for it here.
        weight = len(batches) * self.mesh.dp.size / valid.clamp(min=1)
        self._engine.train_batch(self._feed(batches, weight.float()))
        self._engine.timers(TRAIN_BATCH_TIMER).reset()  # it would keep two events of each step for ever
        if self._applied and self._auxiliary is not None:
            self._auxiliary.applied()
        seconds, signals = time.perf_counter() - started, self._signals  # _decide has set them
        work = self._work.seconds
        return StepResult(signals, self._valid_tokens, self._applied, seconds, work, self._found)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[BatchLike]) -> tuple[float, int]:
        """(sum of cross-entropy in nats, valid tokens) over all data ranks, equal on every rank. Collective.

        Every data rank gives the same number of micro-batches, of the training's shape.
        """
        self.loss.reset()
        count = int(self._count_valid(batches))
        if batches and count:
            self._engine.eval_batch(
                self._feed(batches, torch.ones((), device=self.mesh.device)),
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=len(batches),
            )
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.loss.loss_sum is not None and self.mesh.tp.rank == 0:
            total += self.loss.loss_sum
        if self.mesh.world.size > 1:
            dist.all_reduce(total, group=self.mesh.world.handle)
        return float(total), count

    def state(self) -> list[StateTensor]:
        """Live views of masters and moments, in a fixed order; weights are the rounded masters.

        What no optimizer trains, biases that balance experts, comes last, as masters without moments.
        """
        state = self.partition.state()
        for parameter in self._untrained:
            for piece in pieces_of(parameter):
                view = parameter.data.view(-1).narrow(0, piece.start, piece.numel)
                owner = piece.owner and self.mesh.dp.rank == 0
                state.append(StateTensor(replace(piece, owner=owner), "master", view, 0))
        return state

    def load_done(self, step: int) -> None:
        """After the tensors of `state` were overwritten: step is Adam's count. Collective over dp."""
        self.partition.restored(step)

    def close(self) -> None:
        """Let go of the parameters; the engine cannot be used any more.

        DeepSpeed's hooks on the gradients refer to its optimizer from C++, where Python's collector does
        not look: without this an engine would never be freed.
        """
        self.partition.close()
        with quiet():
            self._engine.optimizer.destroy()

    def _feed(self, batches: Sequence[BatchLike], scale: Tensor) -> Iterator[tuple[Any, Any]]:
        device = self.mesh.device
        for batch in batches:
            # From pinned memory this waits for nothing.
            tensors = (batch.tokens, batch.positions, batch.samples, batch.targets)
            tokens, positions, samples, targets = (t.to(device, non_blocking=True) for t in tensors)
            yield (tokens, positions, samples), (targets, scale)

    def _count_valid(self, batches: Sequence[BatchLike]) -> Tensor:
        """Valid targets of all data ranks, on the device."""
        count = sum(batch.valid_tokens for batch in batches)
        total = torch.full((), count, dtype=torch.int64, device=self.mesh.device)  # a fill waits for nothing
        if self.mesh.dp.size > 1:
            dist.all_reduce(total, group=self.mesh.dp.handle)
        return total

    def sample_losses(self) -> Tensor:
        """(B, 2) on the CPU: sum and count of the cross-entropy of each sequence of the last attempt.

        In the order of this data rank's micro-batches; empty on ranks that have not computed it. Not
        collective.
        """
        rows = self.loss.per_sample if self.mesh.tp.rank == 0 else []
        return torch.cat(rows).cpu() if rows else torch.empty(0, 2)

    @torch.no_grad()
    def _before_reduction(self) -> None:
        self._work.end()
        if self._on_gradients is not None:
            own = self.partition.reduction.own
            self._on_gradients([(_name(p), p, own(p)) for p in self.partition.parameters])
        self._sum_over_tp()

    @torch.no_grad()
    def _sum_over_tp(self) -> None:
        """Add up the gradients that are sums over tp, once a step, on the accumulated ones.

        Norm weights under sequence parallelism (each rank saw its own tokens) and k/v heads that several
        ranks hold. Each rank puts its piece into the logical tensor; the sum is taken of the whole.
        """
        if self.mesh.tp.size == 1:
            return
        bucket: list[tuple[Tensor, Piece]] = []
        size = 0
        for parameter in self.partition.parameters:
            for piece in pieces_of(parameter):
                if not piece.summed:
                    continue
                flat = self.partition.reduction.own(parameter).view(-1).narrow(0, piece.start, piece.numel)
                bucket.append((flat, piece))
                size += _numel(piece)
                if size >= _BUCKET_ELEMENTS:
                    self._sum_bucket(bucket)
                    bucket, size = [], 0
        self._sum_bucket(bucket)

    def _sum_bucket(self, bucket: list[tuple[Tensor, Piece]]) -> None:
        if not bucket:
            return
        whole = [flat.new_zeros(piece.shape) for flat, piece in bucket]
        for logical, (flat, piece) in zip(whole, bucket, strict=True):
            logical[piece.slices] = flat.view(piece.extent)
        joined = torch.cat([logical.view(-1) for logical in whole])
        dist.all_reduce(joined, group=self.mesh.tp.handle)
        sizes = [logical.numel() for logical in whole]
        for total, (flat, piece) in zip(joined.split(sizes), bucket, strict=True):
            flat.copy_(total.view(piece.shape)[piece.slices].reshape(-1))

    @torch.no_grad()
    def _decide(self) -> float | None:
        """Signals of this step, judged: the norm when the update is to be applied, None when not."""
        norm = self.partition.norm()
        dp = self.mesh.dp.size
        slots = torch.full((4 + 2 * dp,), -torch.inf, dtype=torch.float64, device=self.mesh.device)
        slots[3] = norm
        loss = self.loss
        if loss.loss_sum is not None:
            slots[4 + self.mesh.dp.rank] = loss.loss_sum
            slots[4 + dp + self.mesh.dp.rank] = 0.0 if loss.z_sum is None else loss.z_sum
            slots[1], slots[2] = loss.max_logit, loss.max_log_z  # type: ignore[assignment]
        inner = self._auxiliary_slots()
        mine = slots.new_empty(len(self._maxima))
        for index, number in enumerate(self._maxima):
            mine[index] = number  # a fill, which waits for nothing, as a copy from the host would
        slots = torch.cat((slots, inner, mine, self._valid.view(1)))
        # MAX does not carry NaN reliably, so a flag carries it. -inf is a slot of another rank.
        bad = torch.isnan(slots) | (slots == torch.inf)
        slots[0] = bad.any().double()
        slots = torch.where(bad, -torch.inf, slots)
        if self.mesh.world.size > 1:
            dist.all_reduce(slots, op=dist.ReduceOp.MAX, group=self.mesh.world.handle)
        *values, valid = slots.tolist()
        self._valid_tokens, self._applied = int(valid), False
        self._found = tuple(values[len(values) - len(self._maxima) :])
        if self._valid_tokens == 0:
            return None
        self._signals = _signals(values, dp, inner.numel() // 2, self._valid_tokens)
        # The judge sees non-finite steps too, to record them; its answer cannot apply them.
        self._applied = self._judge(self._signals) and not self._signals.non_finite
        return self._signals.norm if self._applied else None

    def _auxiliary_slots(self) -> Tensor:
        """A slot for each auxiliary loss, stage and data rank: this rank's own are filled."""
        if self._auxiliary is None:
            return torch.empty(0, dtype=torch.float64, device=self.mesh.device)
        own = self._auxiliary.sums().to(self.mesh.device)
        dp, pp = self.mesh.dp, self.mesh.pp
        slots = own.new_full((own.numel(), pp.size * dp.size), -torch.inf)
        slots[:, pp.rank * dp.size + dp.rank] = own / dp.size
        return slots.view(-1)


def _check_version() -> None:
    if deepspeed.__version__.split("+")[0] != _DEEPSPEED_VERSION:
        raise ValueError(
            f"deepspeed {deepspeed.__version__} is installed, but the engine relies on internals of "
            f"{_DEEPSPEED_VERSION}; pip install deepspeed=={_DEEPSPEED_VERSION}"
        )


def _in_fp32(parameters: Iterator[nn.Parameter]) -> list[nn.Parameter]:
    """What no optimizer trains, in fp32 whatever the model's precision: its small steps would be lost."""
    found = list(parameters)
    for parameter in found:
        parameter.data = parameter.data.float()
    return found


def _signals(values: list[float], dp: int, inner: int, valid_tokens: int) -> Signals:
    non_finite = values[0] > 0
    loss = sum(values[4 : 4 + dp]) / valid_tokens
    z_loss = sum(values[4 + dp : 4 + 2 * dp]) / valid_tokens
    norm, max_logit, max_log_z = values[3], values[1], values[2]
    if non_finite:
        missing = float("nan")
        loss, norm = (missing if value == -torch.inf else value for value in (loss, norm))
        z_loss = missing if z_loss == -torch.inf else z_loss
    first = 4 + 2 * dp
    balance, z = (sum(values[first + i * inner : first + (i + 1) * inner]) for i in (0, 1))
    auxiliary = (balance, z) if inner else ()
    maxima = tuple(values[first + 2 * inner :])
    return Signals(loss, z_loss, norm, max_logit, max_log_z, non_finite, maxima, auxiliary)


def _name(parameter: Tensor) -> str:
    """The logical names that a parameter holds pieces of."""
    return "+".join(dict.fromkeys(piece.name for piece in pieces_of(parameter)))


def _numel(piece: Piece) -> int:
    total = 1
    for size in piece.shape:
        total *= size
    return total

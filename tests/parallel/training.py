"""A small model trained by the engine at some layout, and by plain torch in one process, to compare."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from conf.typed import parse
from megamodel.auxiliary import Auxiliary
from megamodel.choose import choose, chunked, equip, this_machine
from megamodel.config import Model
from megamodel.data.batch import IGNORE, Batch
from megamodel.dropout import Clock
from megamodel.kernels.config import Kernels
from megamodel.loss import Loss
from megamodel.model import Transformer, layers
from megamodel.moe import Routed
from parallel.engine import Engine, Signals
from parallel.mesh import build_mesh
from parallel.piece import pieces_of
from parallel.tensor import TensorParallel, VocabularyShard
from tests.parallel.variants import EVERY

WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Case:
    """One training: the layout, the split of a fixed global batch, and the model's variations."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence: bool = False
    tied: bool = False
    micro_batch: int = 1
    global_batch: int = 8
    steps: int = 5
    kv_heads: int = 2
    vocabulary: int = 250
    z_loss: float = 1e-3
    n_layers: int = 4
    precision: str = "fp32"
    recompute: str = "none"
    recompute_every: int = 1
    kernels: tuple[tuple[str, Any], ...] = ()
    stage_layers: tuple[int, ...] | None = None
    dropout: float = 0.0
    documents: bool = False
    ragged: bool = False
    clip: float = 0.5
    lr: float = 1e-3
    skip_at: int = 0
    bucket_bytes: int = 4096  # several matrices or one: most gradients are on their way before backward ends
    variant: str = "consensus"  # of tests/parallel/variants.py

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def accumulation(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp)

    def __str__(self) -> str:
        default = Case()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(parts) or "one"


def settings(case: Case) -> Model:
    """The model of a case: 4 query heads of width 8, d_model 32."""
    drop = case.dropout
    usual = {
        "vocab_size": case.vocabulary,
        "d_model": 32,
        "n_layers": case.n_layers,
        "attention": {"n_heads": 4, "n_kv_heads": case.kv_heads, "head_width": 8},
        "feedforward": {"d_ff": 48},
        "tie_embeddings": case.tied,
        "z_loss": case.z_loss,
        "dropout": {"embedding": drop, "attention": drop, "residual": drop},
    }
    return parse(Model, usual | EVERY[case.variant])


def global_batch(case: Case, step: int) -> Batch:
    """All rows of a step. Ragged: the rows have very different numbers of valid targets, one none at all."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows, length = case.global_batch, 16
    tokens = torch.randint(case.vocabulary, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    positions = torch.arange(length).repeat(rows, 1)
    if case.documents:
        positions[:, 5:] -= 5
        targets[:, 4] = IGNORE
    if case.ragged:
        for row, valid in enumerate([0, 1, 16, 10, 3, 16, 2, 7][:rows]):
            targets[row, valid:] = IGNORE
    samples = torch.arange(rows) + step * rows
    return Batch(tokens[:, :-1].contiguous(), targets, positions, samples)


def micro_batches(case: Case, step: int, dp_rank: int) -> list[Batch]:
    """The micro-batches of one data rank, dealt as the loader deals them."""
    whole = global_batch(case, step)
    found = []
    for m in range(case.accumulation):
        first = (m * case.dp + dp_rank) * case.micro_batch
        rows = slice(first, first + case.micro_batch)
        found.append(
            Batch(whole.tokens[rows], whole.targets[rows], whole.positions[rows], whole.samples[rows])
        )
    return found


def groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Decay on matrices only."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(module: torch.nn.Module) -> torch.optim.AdamW:
    # A tiny eps: where it is as large as a gradient, the update shows that gradient's rounding noise.
    return torch.optim.AdamW(groups(module), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, fused=True)


def build(case: Case) -> Engine:
    """The engine of a case, on the ranks of the default process group."""
    mesh = build_mesh(tp=case.tp, pp=case.pp, device=torch.device("cpu"))
    parallel = TensorParallel(mesh.tp, sequence=case.sequence)
    model, clock, auxiliary = settings(case), Clock(), Auxiliary()
    shard = VocabularyShard(case.vocabulary, mesh.tp)
    forms = parse(Kernels, dict(case.kernels))
    choices = choose(forms, this_machine(mesh.device), case.precision)  # type: ignore[arg-type]
    head = chunked(choices, forms)
    if head is not None and head.workspace_bytes is None:
        head = replace(head, workspace_bytes=4 * 256 * 5)  # several chunks a micro-batch
    return Engine(
        layers(
            model,
            seed=7,
            documents=case.documents,
            parallel=parallel,
            recompute=case.recompute,  # type: ignore[arg-type]
            recompute_every=case.recompute_every,
            clock=clock,
            auxiliary=auxiliary,
            equip=lambda module: equip(module, choices),
        ),
        Loss(
            z_weight=case.z_loss,
            start=shard.start,
            group=mesh.tp,
            consume=True,
            chunked=head,
            widened=choices["products"].form == "widened",
        ),
        mesh=mesh,
        make_optimizer=adamw,
        precision=case.precision,  # type: ignore[arg-type]
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        clip_norm=case.clip,
        stage_layers=case.stage_layers,
        set_step=lambda step: setattr(clock, "step", step),
        auxiliary=auxiliary if isinstance(model.experts, Routed) else None,
        bucket_bytes=case.bucket_bytes,
    )


def logical_state(engine: Engine) -> list[tuple[str, str, tuple[int, ...], Any, int, Any]]:
    """(name, kind, shape, box, start in the box, values) of each owned stretch on this rank."""
    return [
        (s.piece.name, s.kind, s.piece.shape, s.piece.slices, s.flat_start, s.tensor.detach().clone().numpy())
        for s in engine.state()
        if s.piece.owner
    ]


def join(parts: list[Any]) -> dict[tuple[str, str], np.ndarray]:
    """Whole logical tensors from the stretches of all ranks; each element must be given exactly once."""
    whole: dict[tuple[str, str], np.ndarray] = {}
    count: dict[tuple[str, str], np.ndarray] = {}
    for name, kind, shape, box, start, values in parts:
        array = whole.setdefault((name, kind), np.zeros(shape, np.float32))
        times = count.setdefault((name, kind), np.zeros(shape, np.int64))
        numbers = np.arange(array.size).reshape(shape)[box].reshape(-1)[start : start + values.size]
        array.reshape(-1)[numbers] = values
        times.reshape(-1)[numbers] += 1
    assert all((times == 1).all() for times in count.values()), "an element is owned twice or by nobody"
    return whole


def train(case: Case) -> dict[str, Any]:
    """On each rank: losses, norms and the owned state after the steps of the case."""
    engine = build(case)
    signals: list[Signals] = []
    for step in range(1, case.steps + 1):

        def judge(seen: Signals, step: int = step) -> bool:
            return step != case.skip_at

        batches = micro_batches(case, step, engine.mesh.dp.rank)
        result = engine.train_step(batches, lr=case.lr, tried=step, judge=judge)
        assert result.signals is not None
        signals.append(result.signals)
    evaluation = engine.evaluate(micro_batches(case, 99, engine.mesh.dp.rank))
    return {
        "loss": [s.loss for s in signals],
        "z_loss": [s.z_loss for s in signals],
        "norm": [s.norm for s in signals],
        "auxiliary": [s.auxiliary for s in signals],
        "max_log_z": [s.max_log_z for s in signals],
        "state": logical_state(engine),
        "evaluation": evaluation,
        "adam_step": engine.adam_step,
    }


def one_process(case: Case) -> dict[str, Any]:
    """The same with plain torch: whole batch, one mean, torch's clipping and AdamW."""
    case = replace(case, tp=1, pp=1, dp=1)
    model = Transformer(settings(case), seed=7, documents=case.documents)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = case.lr
    out: dict[str, Any] = {"loss": [], "z_loss": [], "norm": [], "auxiliary": []}
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        model.clock.step = step
        model.auxiliary.begin(sequences=case.global_batch)
        logits = model(batch.tokens, batch.positions, batch.samples)
        count = batch.valid_tokens
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        log_z = logits.logsumexp(-1)[batch.targets != IGNORE]
        z_loss = case.z_loss * log_z.square().sum() / count
        (loss / count + z_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        out["loss"].append(float(loss.detach() / count))
        out["z_loss"].append(float(z_loss.detach()))
        out["norm"].append(float(norm))
        if isinstance(model.settings.experts, Routed):
            out["auxiliary"].append(tuple(model.auxiliary.sums().tolist()))
        if step == case.skip_at:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        model.auxiliary.applied()
    model.eval()
    batch = global_batch(case, 99)
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    out["evaluation"] = (float(loss), batch.valid_tokens)
    out["state"] = {}
    for parameter in model.parameters():
        moments = optimizer.state[parameter] if parameter.requires_grad else {}
        for piece in pieces_of(parameter):
            for kind, tensor in {"master": parameter.data, **moments}.items():
                if kind == "step":
                    continue
                flat = tensor.reshape(-1)[piece.start : piece.start + piece.numel]
                out["state"][piece.name, kind] = flat.view(piece.extent).numpy().copy()
    return out

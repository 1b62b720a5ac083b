"""Assemble a run from its configuration: the only place that constructs."""

import dataclasses
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from checkpoints.choose import Rewind
from checkpoints.manager import About, Manager, Restored
from checkpoints.snapshots import state_bytes
from conf.schema import Difference, plain
from launcher import forms
from launcher.accepting import Acceptor
from launcher.cluster import Placement, placement
from launcher.config import Config, Plan, check_same, plan
from launcher.events import FILE, Events, records
from launcher.failure import DONE, FailureWatch
from launcher.faults import Faults, poisoned
from launcher.guard import Guard
from launcher.hardware import peak_flops
from launcher.heart import Heart
from launcher.joining import join
from launcher.layers import LayerStatistics
from launcher.leaving import agreed, is_over, leave
from launcher.log import logging_to
from launcher.metrics import MetricsWriter, flattened
from launcher.preparing import prepare_unless
from launcher.responding import Responder
from launcher.rewind import Recorded, Rewinder, applied_again, recorded
from launcher.rundirectory import RunDirectory, package_versions
from launcher.sampling import Sampler
from launcher.sinks import check_installed, deliveries
from launcher.stopping import StopRequest, ended_by_term, reason, stop_signals
from launcher.telling import beginning, compiled_text, dry_run_text, ended, ending, overridden, prevention
from launcher.train import Outcome, Run
from launcher.train import train as loop
from megamodel.accounting import flops_per_token
from megamodel.auxiliary import Auxiliary
from megamodel.choose import chunked, equip
from megamodel.data.batch import Batch, Cursor
from megamodel.data.held_out import HeldOut
from megamodel.data.loader import Loader
from megamodel.data.prefetch import Prefetcher
from megamodel.data.prepare import prepare as prepare_data
from megamodel.data.prepared import Prepared
from megamodel.dropout import Clock
from megamodel.kernels.compiler import counted
from megamodel.loss import Loss
from megamodel.model import layers
from megamodel.moe import Routed
from megamodel.optim import adamw
from parallel.engine import Engine
from parallel.exchange import Exchange, exchange_over, together
from parallel.mesh import Mesh, build_mesh
from parallel.start import connect, pick_device, stop, wait_for_main
from parallel.tensor import TensorParallel, VocabularyShard

log = logging.getLogger(__name__)


def train(config: Config) -> int:
    """The command `train`, on each process of a run."""
    started = time.time()
    limit = config.run.time_limit_seconds
    deadline = None if limit is None else time.monotonic() + limit
    check_installed(config.sinks)
    place = placement(os.environ)
    device = pick_device(config.hardware.device, place.local_rank)
    settled = plan(config, world_size=place.world_size, cuda=device.type == "cuda")
    directory = RunDirectory(settled.directory)
    torch.set_num_threads(config.hardware.threads or max(1, _cores() // place.local_size))
    if not config.dry_run and is_over(settled, directory, rank=place.rank):
        return DONE
    logs = directory.log_file(place.rank) if not config.dry_run else None
    with (
        nullcontext(StopRequest()) if config.dry_run else stop_signals(deadline) as stop,
        logging_to(logs, rank=place.rank, level=config.run.log_level),
    ):
        if stop.ends_at_once(place.world_size):
            leave(directory, stop.signalled, is_main=place.rank == 0)
            return DONE
        _together(settled, place, device, directory, started, stop)
    return DONE


def _together(
    settled: Plan,
    place: Placement,
    device: torch.device,
    directory: RunDirectory,
    started: float,
    stop: StopRequest,
) -> None:
    """Meet the other processes, and do the work of the run with them."""
    config = settled.config
    heart = Heart(config.heartbeat, place, logs=directory.path / "logs")
    with (
        joined(place, config, device) as name,
        watched(place, directory, name, None if config.dry_run else heart),
    ):
        mesh = build_mesh(tp=config.parallel.tp, pp=config.parallel.pp, device=device)
        if config.dry_run:
            _dry_run(settled, mesh)
        else:
            _train(settled, mesh, directory, heart, started, stop)


@contextmanager
def joined(place: Placement, config: Config, device: torch.device) -> Iterator[str]:
    """The processes in one group; the name of this start."""
    with ended_by_term(place.world_size > 1):
        name = join(place, device, timedelta(seconds=config.run.timeout_seconds))
    try:
        yield name
    finally:
        # After an error others may be gone, and leaving a NCCL group would wait for them.
        if sys.exc_info()[0] is None or device.type == "cpu":
            stop()


def watched(place: Placement, directory: RunDirectory, name: str, heart: Heart | None = None) -> FailureWatch:
    """The watch over failures of other ranks. name: of this start."""
    return FailureWatch(
        lambda: connect(place.master_addr, place.master_port, name),
        rank=place.rank,
        world_size=place.world_size,
        directory=directory,
        heart=heart,
    )


def _train(
    settled: Plan, mesh: Mesh, directory: RunDirectory, heart: Heart, started: float, stop: StopRequest
) -> None:
    """See that all ranks have the same, prepare the data, train."""
    config = settled.config
    exchange = exchange_over(mesh.world)
    _check_same(config, exchange)
    forms.check_same(settled, mesh, exchange)
    prepared = _prepared(config, mesh, exchange, stop)
    asked = agreed(exchange, stop)
    if asked or prepared is None:
        leave(directory, asked, is_main=mesh.is_main)
    else:
        heart.beat(0, "start")
        _train_on(prepared, settled, mesh, exchange, directory, heart, started, stop)


def _train_on(
    prepared: Prepared,
    settled: Plan,
    mesh: Mesh,
    exchange: Exchange,
    directory: RunDirectory,
    heart: Heart,
    started: float,
    stop: StopRequest,
) -> None:
    """Assemble, restore, train, and tell how it went, on data that are there."""
    config = settled.config
    loader, held_out = _data(settled, prepared)
    engine = build_engine(settled, mesh)
    about = About(plain(config), package_versions(), prepared.tokenizer.hash)
    checkpoints = Manager(directory.path, config.checkpoint, mesh, about, say=log.info)
    past_events = exchange.share(_past(directory))
    rewound = [Recorded(*values) for values in past_events["rewinds"]]
    past = [Rewind(event.attempt, event.snapshot_step) for event in rewound]
    acceptor = Acceptor(settled, prepared)
    restored = checkpoints.restore(engine, config.resume, rewinds=past, accept=acceptor)
    cursor, budget = applied_again(restored.cursor if restored else Cursor(), rewound)
    directory.begin(config, rank=mesh.world.rank, step=cursor.step, extra=_machine(mesh))
    metrics = _metrics(settled, directory, restored, cursor, rank=mesh.world.rank)
    cursor = dataclasses.replace(cursor, attempt=exchange.share(metrics.attempt))
    extra = {"data": prepared.digest, "segment": metrics.segment}
    responder = Responder(
        settled,
        _guard(config, restored, budget),
        Events(directory, rank=mesh.world.rank),
        Rewinder(engine, checkpoints, metrics, directory, extra, past),
        loader,
        exchange,
        _faults(config, past_events),
        started=cursor.attempt,
        tokenizer=prepared.tokenizer if prepared.tokenizer_path else None,
    )
    run = Run(
        plan=settled,
        engine=engine,
        feed=Prefetcher(
            loader, data_rank=mesh.dp.rank, data_size=mesh.dp.size, pin=mesh.device.type == "cuda"
        ),
        held_out=held_out,
        metrics=metrics,
        checkpoints=checkpoints,
        directory=directory,
        responder=responder,
        extra=extra,
        flops_per_token=flops_per_token(config.model, config.train.sequence_length).training,
        peak_flops=_peak(settled, mesh),
        peak_bytes=_peak_bytes(mesh.device),
        stop=stop,
        heart=heart,
        sampler=Sampler(config, prepared, checkpoints.files, directory, mesh.is_main),
        layers=LayerStatistics(directory, exchange, every=config.statistics.layers_every),
        started=started,
    )
    _carried_out(run, prepared, cursor, acceptor.changed, restored)
    exchange.everyone(None)  # leave together


def _carried_out(
    run: Run, prepared: Prepared, cursor: Cursor, changed: list[Difference], restored: Restored | None
) -> None:
    try:
        _introduce(run, prepared, cursor, changed, restored)
        asked = agreed(run.responder.exchange, run.stop)
        outcome = Outcome(cursor, reason(asked), None) if asked else loop(run, cursor)
    finally:
        run.close()
    if run.plan.config.kernels.compile == "block":
        log.info(compiled_text(counted()))  # on the main rank's terminal, in every rank's log
    if run.engine.mesh.is_main:
        _tell(run, prepared, outcome)


def _check_same(config: Config, exchange: Exchange) -> None:
    first = exchange.share(plain(config))
    together(exchange, lambda: check_same(config, first, rank=exchange.rank))


def _machine(mesh: Mesh) -> dict[str, Any]:
    return {"device": device_name(mesh.device), "processes": mesh.world.size}


def _faults(config: Config, past: dict[str, list[Any]]) -> Faults:
    return Faults(config.faults, config.model.vocab_size, config.train.seed, past["faults"])


def _guard(config: Config, restored: Restored | None, budget: dict[str, Any] | None) -> Guard:
    guard = Guard(config.monitor)
    guard.restore(restored.extra if restored else {}, budget)
    return guard


def _introduce(
    run: Run, prepared: Prepared, cursor: Cursor, changed: list[Difference], restored: Restored | None
) -> None:
    """What is about to be done, and what is unwise about it."""
    settled, mesh = run.plan, run.engine.mesh
    if restored:
        reason = f"from {restored.path}, saved at layout {restored.layout}"
        run.responder.events.write("resume", cursor, attempt=cursor.attempt, step=cursor.step, reason=reason)
    host_bytes = run.checkpoints.host_bytes(run.engine)
    run.metrics.note(beginning(settled, mesh, run.engine.bounds, prepared, cursor, host_bytes=host_bytes))
    if not prevention(settled.config) and mesh.is_main:
        log.warning(
            "nothing keeps the loss from spiking; model.z_loss=1e-4, optim.clip_norm=1 or QK-norm would"
        )
    if changed:
        run.metrics.note(overridden(settled, cursor, changed))


def _tell(run: Run, prepared: Prepared, outcome: Outcome) -> None:
    """What the run came to. It is over and saved: what goes wrong here does not make it a failed one."""
    state = "stopped" if outcome.stopped_by else "finished"
    run.directory.set_status(state, reason=outcome.stopped_by or "", step=outcome.cursor.step)
    try:
        facts = ended(run.plan, prepared, run.held_out, outcome, run.checkpoints)
    except Exception as error:
        log.warning(f"the end of the run could not be told ({type(error).__name__}: {error})", exc_info=True)
        return
    print(json.dumps(facts) if run.plan.config.format == "json" else ending(facts))


def _past(directory: RunDirectory) -> dict[str, list[Any]]:
    """What earlier processes of the run have recorded: rewinds and faults."""
    file = directory.path / FILE
    return {
        "rewinds": [dataclasses.astuple(rewind) for rewind in recorded(file)],
        "faults": [event["fault"] for event in records(file) if event.get("event") == "fault"],
    }


def _metrics(
    settled: Plan, directory: RunDirectory, restored: Restored | None, cursor: Cursor, *, rank: int
) -> MetricsWriter:
    values = plain(settled.config)
    return MetricsWriter(
        directory,
        values,
        rank=rank,
        sinks=deliveries(settled.config.sinks, directory, flattened(values)) if rank == 0 else (),
        steps=settled.steps,
        step=cursor.step,
        attempt=cursor.attempt,
        segment=int(restored.extra.get("segment", 0)) if restored else 0,
        resumed=restored is not None,
        log_every=settled.config.run.log_every,
        stream=sys.stderr if settled.config.format == "json" else None,
    )


def build_engine(settled: Plan, mesh: Mesh) -> Engine:
    """The model of a configuration on the mesh, under the engine."""
    config, clock, auxiliary = settled.config, Clock(), Auxiliary()
    parallel = TensorParallel(mesh.tp, sequence=config.parallel.sequence_parallel)
    shard = VocabularyShard(config.model.vocab_size, mesh.tp)
    choices = forms.chosen(settled, mesh.device)
    built = layers(
        config.model,
        seed=config.train.seed,
        documents=config.data.isolate_documents,
        parallel=parallel,
        recompute=config.parallel.recompute,
        recompute_every=config.parallel.recompute_every,
        clock=clock,
        auxiliary=auxiliary,
        equip=lambda module: equip(module, choices),
    )
    return Engine(
        built,
        Loss(
            z_weight=config.model.z_loss,
            start=shard.start,
            group=mesh.tp,
            consume=True,
            chunked=chunked(choices, config.kernels),
            widened=choices["products"].form == "widened",
        ),
        mesh=mesh,
        make_optimizer=lambda module: adamw(module, config.optim),
        precision=settled.precision,
        micro_batch=settled.batches.micro_batch,
        accumulation=settled.batches.at(0).accumulation,
        clip_norm=config.optim.clip_norm,
        stage_layers=config.parallel.stage_layers,
        set_step=clock.set,
        auxiliary=auxiliary if isinstance(config.model.experts, Routed) else None,
        bucket_bytes=config.parallel.bucket_bytes,
    )


def _prepared(config: Config, mesh: Mesh, exchange: Exchange, stop: StopRequest) -> Prepared | None:
    """The main rank builds what is missing, the others wait; then each opens it, and all must agree.

    None on all ranks where a signal has ended the building.
    """
    complete = not mesh.is_main or prepare_unless(lambda: stop.signalled, config.data, config.tokenizer)
    # Waiting on the store has no time limit of the group's: a large corpus takes hours.
    wait_for_main(mesh, "megamodel/prepared")
    if not exchange.share(complete):
        return None
    prepared = prepare_data(config.data, config.tokenizer)
    if len(set(exchange.everyone(prepared.digest))) > 1:
        raise ValueError(
            f"the prepared data differ between the nodes (here {prepared.directory}); "
            "give all of them the same files, or a data.cache on a shared file system"
        )
    return prepared


def _data(settled: Plan, prepared: Prepared) -> tuple[Loader, HeldOut]:
    config = settled.config
    if prepared.tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {prepared.tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{config.model.vocab_size}; use model.vocab_size={prepared.tokenizer.vocab_size}"
        )
    length, isolated = config.train.sequence_length, config.data.isolate_documents
    loader = Loader(
        prepared.train,
        sequence_length=length,
        seed=config.train.seed,
        isolate_documents=isolated,
        mixture=config.data.weights(),
        vocab_size=config.model.vocab_size,
        poisoned=poisoned(config.faults),
    )
    held_out = HeldOut(
        prepared.held_out,
        sequence_length=length,
        isolate_documents=isolated,
        vocab_size=config.model.vocab_size,
    )
    return loader, held_out


def _dry_run(settled: Plan, mesh: Mesh) -> None:
    """Build everything and make one forward and backward pass on random tokens; nothing is written."""
    config = settled.config
    forms.check_same(settled, mesh, exchange_over(mesh.world))
    engine = build_engine(settled, mesh)
    generator = torch.Generator().manual_seed(config.train.seed + mesh.dp.rank)
    rows, length = settled.batches.micro_batch, config.train.sequence_length
    shape = (rows, length)
    batches = []
    for _ in range(settled.batches.at(0).accumulation):
        tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(shape).contiguous()
        batches.append(
            Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, torch.arange(rows))
        )
    peak = _peak_bytes(mesh.device)
    result = engine.train_step(batches, lr=0.0, tried=1, judge=lambda signals: False)
    assert result.signals is not None
    if mesh.is_main:
        host_bytes = state_bytes(engine) * config.checkpoint.copies
        print(dry_run_text(settled, mesh, engine.bounds, result, peak(), host_bytes=host_bytes))


def _peak(settled: Plan, mesh: Mesh) -> float | None:
    one = peak_flops(settled.config.hardware, device_name(mesh.device), settled.precision)
    return None if one is None else one * mesh.world.size


def device_name(device: torch.device) -> str:
    """What torch calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _peak_bytes(device: torch.device) -> Callable[[], int]:
    """The most memory so far: allocated on the GPU, or resident in this process on the CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.max_memory_allocated(device)
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cores() -> int:
    return len(os.sched_getaffinity(0))

"""Save, find, restore and prune the checkpoints of one run, all ranks together."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from checkpoints import choose, load, store
from checkpoints import manifest as manifests
from checkpoints.choose import Choices, Rewind
from checkpoints.config import Checkpoint
from checkpoints.files import Files, LocalFiles
from checkpoints.keeping import held_out_loss, kept
from checkpoints.manifest import BLOCK_BYTES, Entry, FileSum, Manifest
from checkpoints.objects import place
from checkpoints.reading import Reading
from checkpoints.snapshots import Ring, Slot, Snapshot, Writer, collect, plain_json, state_bytes
from checkpoints.state import Engine, parts
from checkpoints.store import Found
from megamodel.data.batch import Cursor
from parallel.exchange import Exchange, exchange_over, together
from parallel.mesh import Mesh


@dataclass(frozen=True)
class About:
    """What a checkpoint says of the run that wrote it, beside its numbers. All plain JSON."""

    configuration: dict[str, Any] = field(default_factory=dict)  # resolved
    versions: dict[str, str] = field(default_factory=dict)  # library -> version
    tokenizer: str = ""  # hash


@dataclass(frozen=True)
class Restored:
    """A checkpoint, without its tensors."""

    path: Path
    cursor: Cursor
    extra: dict[str, Any]
    optimizer_step: int
    layout: dict[str, int]
    about: About


@dataclass(frozen=True)
class Rewound:
    """The state that a rewind went back to; source: `memory`, or the directory of a checkpoint."""

    cursor: Cursor
    extra: dict[str, Any]
    source: str


@dataclass(frozen=True)
class Written:
    """A save that is complete."""

    path: Path
    seconds: float  # from the first file to the pointer
    bytes: int  # of all ranks; 0 on ranks that do not know


@dataclass(frozen=True)
class Costs:
    """What has happened on this rank since last asked. stall_seconds: how long training stood still."""

    stall_seconds: float | None
    written: list[Written]


def where(run_dir: Path, config: Checkpoint) -> tuple[Files, Path]:
    """The file system and the directory of a run's checkpoints."""
    return place(config.store or str(run_dir / "checkpoints"), renames=config.commit == "rename")


def holds_run(run_dir: Path, config: Checkpoint) -> bool:
    """Whether a run has left anything that a fresh run would mix with."""
    files, directory = where(run_dir, config)
    names = set(LocalFiles().names(run_dir))
    return bool(
        names & {"metrics.jsonl", "events.jsonl", "status.json"}
        or store.steps(files, directory)
        or store.scan(files, directory)[0]
    )


def _silent(message: str) -> None:
    pass


def _unannounced(rewound: Rewound) -> None:
    pass


class Manager:
    """Checkpoints of one run. All methods but `latest`, `wait`, `check`, `take`, `host_bytes` are collective.

    say: receives lines for the log, on rank 0 only. With config.background a save is written from a copy
    while training goes on; then the loop calls `check` each step and `wait` at its end. Of two saves the
    second waits until the first is complete, and so does everything that reads. exchange: of its own, its
    thread uses it.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Checkpoint,
        mesh: Mesh,
        about: About | None = None,
        *,
        say: Callable[[str], None] = _silent,
        files: Files | None = None,
        exchange: Exchange | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        found, self.directory = where(run_dir, config)
        self._config, self._mesh, self._about = config, mesh, about or About()
        self.files: Files = files or found
        # A rank may wait long for another's disk; that another has died is noticed elsewhere.
        self._exchange = exchange or exchange_over(mesh.world, timeout=timedelta(days=1))
        self._say = say if self._exchange.rank == 0 else _silent
        self._reading = Reading(self.files, self._exchange, self._say)
        self._block_bytes = block_bytes
        manifests.canonical(asdict(self._about))
        self._slot, self._writer = Slot() if config.background else None, Writer()
        self._ring = Ring(config.snapshots if config.snapshot_every else 0)
        self._source: Snapshot | None = None  # of the save that is being written
        self._condemned: set[int] = set()  # saved steps that a rewind has undone; known on rank 0
        self._losses: dict[int, float | None] = {}  # held-out loss of saved steps, as far as known
        self._stall: float | None = None
        self._written: list[Written] = []
        self.stall_seconds = 0.0  # how long the last `save` held up the training
        self.write_seconds = 0.0  # how long the last write took, from the first file to the pointer

    def host_bytes(self, engine: Engine) -> int:
        """The most host memory that copies of this rank's state take."""
        return state_bytes(engine) * self._config.copies

    def take(self) -> Costs:
        """What checkpoints have cost on this rank since the last call, and what has been completed."""
        stall, self._stall = self._stall, None
        done = self._written[:]  # the thread may add to it meanwhile
        del self._written[: len(done)]
        return Costs(stall, done)

    def latest(self) -> Path | None:
        """The checkpoint that the pointer names, on this rank."""
        return store.latest(self.files, self.directory)

    def save(
        self,
        engine: Engine,
        cursor: Cursor,
        extra: dict[str, Any],
        *,
        protect: Iterable[int] = (),
        trusted: int | None = None,
    ) -> Path:
        """Write the state after cursor.step updates to the path that is returned.

        It is complete and pointed to when this returns; in the background: when `wait` does, and this returns
        once the state is copied. A save that is still being written is waited for first.
        extra: plain JSON (schedule, monitor), non-finite numbers as strings. protect: steps that stay
        whatever the configuration says; trusted: so do the newest one of at most so many steps and the next
        one, which will be trusted in its place. On failure every rank raises and the checkpoint before stays.
        """
        start = time.perf_counter()
        self.wait()
        held = self._ring.at(cursor) if self._slot else None
        if held:  # the copy in the ring serves both
            snapshot = replace(held, extra=plain_json(extra))
        else:
            snapshot = collect(engine, cursor, extra, self._slot)
        self._source = held
        stay = list(protect)
        if self._slot:
            self._writer.start(lambda: self._write(snapshot, stay, trusted))
        else:
            self._write(snapshot, stay, trusted)
        self.stall_seconds = time.perf_counter() - start
        self._stall = self.stall_seconds + (self._stall or 0.0)
        return self.directory / store.step_name(cursor.step)

    def wait(self) -> None:
        """Until no save is being written; raises what the writing raised. Call it before the process ends."""
        self._writer.wait()

    def check(self) -> None:
        """Raise what a background save raised, without waiting for one: for every step of the loop."""
        self._writer.check()

    def save_copy(self, to: int) -> Path | None:
        """Write the newest copy in memory of at most `to` updates, unless there is none or it is saved."""
        self.wait()
        snapshot = self._ring.at_or_before(to)
        if snapshot is None or snapshot.cursor.step in self.saved():
            return None
        self._write(snapshot, [], to)
        return self.directory / store.step_name(snapshot.cursor.step)

    def _write(self, snapshot: Snapshot, protect: list[int], trusted: int | None) -> None:
        start = time.perf_counter()
        rank, root, step = self._exchange.rank, self.directory, snapshot.cursor.step
        prepared = self._on_main(lambda: store.prepare(self.files, root, step))
        told = self._exchange.share(prepared and [str(prepared.directory), prepared.prefix])
        draft = store.Draft(Path(told[0]), told[1])
        total, entries = together(
            self._exchange,
            lambda: store.write_part(self.files, draft, rank, snapshot.state, block_bytes=self._block_bytes),
        )
        told = self._exchange.gather(
            {"file": total and manifests.plain(total), "pieces": [manifests.plain(e) for e in entries]}
        )
        path = root / store.step_name(step)
        self._on_main(lambda: store.commit(self.files, root, draft, self._manifest(snapshot, told)))
        if rank == 0:
            self._losses[step] = held_out_loss(snapshot.extra)
            self._condemned.discard(step)
            self._prune(step, protect, trusted)
        self.write_seconds = time.perf_counter() - start
        size = sum(t["file"]["bytes"] for t in told if t["file"])
        self._written.append(Written(path, self.write_seconds, size))

    def _on_main(self, action: Callable[[], Any]) -> Any:
        return together(self._exchange, action if self._exchange.rank == 0 else lambda: None)

    def _manifest(self, snapshot: Snapshot, told: list[dict[str, Any]]) -> Manifest:
        mesh = self._mesh
        return Manifest(
            step=snapshot.cursor.step,
            optimizer_step=snapshot.optimizer_step,
            cursor=snapshot.cursor,
            layout={"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size},
            configuration=self._about.configuration,
            versions=self._about.versions,
            tokenizer=self._about.tokenizer,
            extra=snapshot.extra,
            written=time.time(),
            block_bytes=self._block_bytes,
            files=tuple(manifests.typed(FileSum, t["file"]) for t in told if t["file"]),
            pieces=tuple(manifests.typed(Entry, piece) for t in told for piece in t["pieces"]),
        )

    def _prune(self, newest: int, protect: Iterable[int], trusted: int | None) -> None:
        config = self._config
        try:
            present = store.steps(self.files, self.directory)
            sound = sorted(set(present) - self._condemned)
            if trusted is not None:
                good = [step for step in sound if step <= trusted]
                protect = [*protect, *good[-1:], *sound[len(good) :][:1]]
            stay = kept(
                present,
                newest=newest,
                keep=config.keep,
                keep_every=config.keep_every,
                keep_best=config.keep_best,
                protected=protect,
                losses=self._known_losses(present),
            )
            store.prune(self.files, self.directory, stay)
        except OSError as error:  # the new checkpoint is safe: no reason to end the run
            self._say(f"old checkpoints could not be deleted: {error}")

    def _known_losses(self, present: Iterable[int]) -> dict[int, float]:
        """Held-out losses of the steps that are there; manifests of earlier processes are read once."""
        if not self._config.keep_best:
            return {}
        for step in present:
            if step in self._losses:
                continue
            try:
                content, _ = manifests.read(self.files, self.directory / store.step_name(step))
            except ValueError:  # damaged: the best of nothing
                self._losses[step] = None
                continue
            self._losses[step] = held_out_loss(content.extra)
        return {step: loss for step in present if (loss := self._losses[step]) is not None}

    def find(self, resume: str, *, rewinds: Iterable[Rewind] = ()) -> Restored | None:
        """What `restore` would try, by manifest, sizes and headers: for checks before there is an engine.

        ValueError as `restore`.
        """
        if resume == "none":
            return None
        self.wait()
        reading, choices = self._look(resume, rewinds)
        found = reading.first(choices, lambda found: None)
        return _restored(found[0]) if found else None

    def restore(
        self,
        engine: Engine,
        resume: str,
        *,
        rewinds: Iterable[Rewind] = (),
        accept: Callable[[Restored], None] | None = None,
    ) -> Restored | None:
        """Bring the engine to a saved state, at whatever layout it was saved.

        resume: `auto` takes the newest that is sound (None when there is none at all), `none` does nothing, a
        path is a step's directory, or a run's, of which the newest sound one is taken. accept may refuse a
        checkpoint by ValueError before anything is loaded. rewinds: see `condemned`.
        ValueError when what is named is missing, damaged or does not fit, or nothing sound is left; live
        state is then untouched, on all ranks.
        """
        if resume == "none":
            return None
        self.wait()
        reading, choices = self._look(resume, rewinds)
        found = self._load(engine, reading, choices, accept)
        if found is None:
            return None
        self._say(f"resumed from {found.path}, step {found.manifest.step}")
        return _restored(found)

    def _look(self, resume: str, rewinds: Iterable[Rewind]) -> tuple[Reading, Choices]:
        """Where `resume` points, and what may be loaded there."""
        reading, path = self._reading, Path(resume)
        if "://" in resume or self.files.whole:
            files, path = place(resume) if resume != "auto" else (self.files, path)
            reading = Reading(files, self._exchange, self._say)
        return reading, reading.choices(
            lambda: choose.look(reading.files, self.directory, resume, path, rewinds)
        )

    def _load(
        self,
        engine: Engine,
        reading: Reading,
        choices: Choices,
        accept: Callable[[Restored], None] | None = None,
        announce: Callable[[Rewound], None] = _unannounced,
    ) -> Found | None:
        """Bring the engine to the first choice that is sound on every rank."""
        state = parts(engine)
        told = self._exchange.gather(sorted({(part.kind, part.name) for part in state}))
        names = {(kind, name) for rank in told for kind, name in rank}

        def read(found: Found) -> list[torch.Tensor]:
            if accept:
                accept(_restored(found))
            if self._exchange.rank == 0:
                _refuse_unknown(found, names)
            return load.stage(reading.files, found, state)

        answer = reading.first(choices, read)
        if answer is None:
            return None
        found, staged = answer
        announce(Rewound(found.manifest.cursor, found.manifest.extra, str(found.path)))
        load.put(state, staged)
        engine.load_done(found.manifest.optimizer_step)
        return found

    def snapshot(self, engine: Engine, cursor: Cursor, extra: dict[str, Any]) -> None:
        """Copy the state into the ring, for `rewind`; the oldest copy makes room, once it is written."""
        start = time.perf_counter()
        if self._source is not None and self._ring.next_out(cursor.step) is self._source:
            self.wait()
        self._ring.add(engine, cursor, extra)
        self._stall = time.perf_counter() - start + (self._stall or 0.0)

    def restorable(self, rewinds: Iterable[Rewind] = ()) -> list[int]:
        """Steps of the states that `rewind` could go back to, ascending, the same on all ranks. Collective.

        A save that is being written is waited for.
        """
        return sorted({*self.saved(rewinds), *self._ring.steps})

    def saved(self, rewinds: Iterable[Rewind] = ()) -> list[int]:
        """The same, of those on disk alone."""
        self.wait()
        choices = self._reading.choices(lambda: choose.newest(self.files, self.directory, rewinds))
        return sorted(_step_of(path) for path, _ in choices.paths)

    def rewind(
        self,
        engine: Engine,
        to: int,
        *,
        rewinds: Iterable[Rewind] = (),
        announce: Callable[[Rewound], None] = _unannounced,
    ) -> Rewound:
        """Bring the live engine back to the newest state of at most `to` updates: from the ring, else a file.

        Snapshots of later steps are dropped. rewinds: those before, so that no file that they condemn is
        taken. announce: told on every rank what is gone back to, before anything changes: the place for a
        record that must be written first. ValueError when there is nothing; live state is then untouched.
        """
        self.wait()
        snapshot = self._ring.at_or_before(to)
        choices = self._reading.choices(
            lambda: choose.newest(self.files, self.directory, rewinds, at_most=to)
        )
        newer = [path for path in choices.paths if snapshot and _step_of(path[0]) > snapshot.cursor.step]
        if newer:
            snapshot, choices = None, replace(choices, paths=newer)
        told = self._exchange.everyone(snapshot and snapshot.cursor.step)
        if len(set(told)) > 1:
            raise RuntimeError(f"the ranks hold snapshots of different steps: {told}")
        if snapshot:
            rewound = Rewound(snapshot.cursor, plain_json(snapshot.extra), "memory")
            announce(rewound)
            load.put(parts(engine), [part.tensor for part in snapshot.state])
            engine.load_done(snapshot.optimizer_step)
            self._undone(snapshot.cursor.step)
            return rewound
        found = self._load(engine, self._reading, choices, announce=announce)
        if found is None:
            raise ValueError(f"there is no snapshot and no checkpoint of at most {to} steps to go back to")
        self._undone(found.manifest.step)
        return Rewound(found.manifest.cursor, found.manifest.extra, str(found.path))

    def _undone(self, step: int) -> None:
        """What is of more than `step` updates belongs to a past that is given up."""
        self._ring.forget_after(step)
        if self._exchange.rank == 0:
            self._condemned |= {s for s in store.steps(self.files, self.directory) if s > step}


def _step_of(path: str) -> int:
    step = store.step_of(Path(path).name)
    assert step is not None
    return step


def _refuse_unknown(found: Found, names: set[tuple[str, str]]) -> None:
    unknown = load.unknown(found, names)
    if unknown:
        raise ValueError(
            f"{found.path} holds {len(unknown)} tensors that this model has not, such as {unknown[0]}; "
            "resume with the model that was saved, or start afresh in another run.dir"
        )


def _restored(found: Found) -> Restored:
    m = found.manifest
    about = About(m.configuration, m.versions, m.tokenizer)
    return Restored(found.path, m.cursor, m.extra, m.optimizer_step, m.layout, about)

"""Save, find, restore and prune the checkpoints of one run, all ranks together."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints import choose, load, store
from checkpoints import manifest as manifests
from checkpoints.choose import Choices, Rewind
from checkpoints.config import Checkpoint
from checkpoints.files import Files, LocalFiles
from checkpoints.manifest import BLOCK_BYTES, Damaged, Entry, FileSum, Manifest
from checkpoints.snapshots import Ring, Slot, Snapshot, Writer, collect
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


def holds_run(run_dir: Path) -> bool:
    """Whether a run has left anything in a directory that a fresh run would mix with."""
    files = LocalFiles()
    names = set(files.names(run_dir))
    return bool(
        names & {"metrics.jsonl", "events.jsonl", "status.json"}
        or store.steps(files, run_dir / "checkpoints")
        or store.scan(files, run_dir / "checkpoints")[0]
    )


def _silent(message: str) -> None:
    pass


class Manager:
    """Checkpoints in run_dir/checkpoints. Every method but `latest`, `wait` and `check` is a collective.

    say: receives lines for the log, on rank 0 only. background: save from a copy while training goes on, in
    host memory for one copy of the state; then the loop calls `check` each step and `wait` at its end.
    snapshots: how many copies `snapshot` keeps, in as much host memory. files, exchange: the outside world.
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
        background: bool = False,
        snapshots: int = 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.directory = run_dir / "checkpoints"
        self._config, self._mesh, self._about = config, mesh, about or About()
        self._files: Files = files or LocalFiles()
        self._exchange = exchange or exchange_over(mesh.world)
        self._say = say if self._exchange.rank == 0 else _silent
        self._block_bytes = block_bytes
        manifests.canonical(asdict(self._about))
        self._slot, self._writer = Slot() if background else None, Writer()
        self._ring = Ring(snapshots)
        self.stall_seconds = 0.0  # how long the last `save` held up the training
        self.write_seconds = 0.0  # how long the last write took, from the first file to the pointer

    def latest(self) -> Path | None:
        """The checkpoint that the pointer names, on this rank."""
        return store.latest(self._files, self.directory)

    def save(
        self, engine: Engine, cursor: Cursor, extra: dict[str, Any], *, protect: Iterable[int] = ()
    ) -> Path:
        """Write the state after cursor.step updates to the path that is returned.

        It is complete and pointed to when this returns; in the background: when `wait` does, and this returns
        once the state is copied. A save that is still being written is waited for first.
        extra: plain JSON (schedule, monitor), non-finite numbers as strings. protect: steps that stay
        whatever the configuration says. On failure every rank raises and the checkpoint before stays.
        """
        start = time.perf_counter()
        self.wait()
        snapshot = collect(engine, cursor, extra, self._slot)
        stay = list(protect)
        if self._slot:
            self._writer.start(lambda: self._write(snapshot, stay))
        else:
            self._write(snapshot, stay)
        self.stall_seconds = time.perf_counter() - start
        return self.directory / store.step_name(cursor.step)

    def wait(self) -> None:
        """Until no save is being written; raises what the writing raised. Call it before the process ends."""
        self._writer.wait()

    def check(self) -> None:
        """Raise what a background save raised, without waiting for one: for every step of the loop."""
        self._writer.check()

    def _write(self, snapshot: Snapshot, protect: list[int]) -> None:
        start = time.perf_counter()
        rank, root, step = self._exchange.rank, self.directory, snapshot.cursor.step
        directory = root / (store.step_name(step) + store.WRITING)
        self._on_main(lambda: store.prepare(self._files, root, step))
        total, entries = together(
            self._exchange,
            lambda: store.write_part(
                self._files, directory, rank, snapshot.state, block_bytes=self._block_bytes
            ),
        )
        told = self._exchange.gather(
            {"file": total and manifests.plain(total), "pieces": [manifests.plain(e) for e in entries]}
        )
        self._on_main(lambda: store.commit(self._files, root, self._manifest(snapshot, told)))
        if rank == 0:
            self._prune(step, protect)
        self.write_seconds = time.perf_counter() - start

    def _on_main(self, action: Callable[[], Any]) -> None:
        together(self._exchange, action if self._exchange.rank == 0 else lambda: None)

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

    def _prune(self, newest: int, protect: Iterable[int]) -> None:
        try:
            stay = store.kept(
                store.steps(self._files, self.directory),
                newest=newest,
                keep=self._config.keep,
                keep_every=self._config.keep_every,
                protected=protect,
            )
            store.prune(self._files, self.directory, stay)
        except OSError as error:  # the new checkpoint is safe: no reason to end the run
            self._say(f"old checkpoints could not be deleted: {error}")

    def find(self, resume: str, *, rewinds: Iterable[Rewind] = ()) -> Restored | None:
        """What `restore` would try, by manifest, sizes and headers: for checks before there is an engine.

        ValueError as `restore`.
        """
        if resume == "none":
            return None
        self.wait()
        choices = self._choices(lambda: choose.look(self._files, self.directory, resume, rewinds))
        found = self._first(choices, lambda found: None)
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
        choices = self._choices(lambda: choose.look(self._files, self.directory, resume, rewinds))
        found = self._load(engine, choices, accept)
        if found is None:
            return None
        self._say(f"resumed from {found.path}, step {found.manifest.step}")
        return _restored(found)

    def _load(
        self, engine: Engine, choices: Choices, accept: Callable[[Restored], None] | None = None
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
            return load.stage(self._files, found, state)

        answer = self._first(choices, read)
        if answer is None:
            return None
        found, staged = answer
        load.put(state, staged)
        engine.load_done(found.manifest.optimizer_step)
        return found

    def snapshot(self, engine: Engine, cursor: Cursor, extra: dict[str, Any]) -> None:
        """Copy the state into the ring, for `rewind`; the oldest copy makes room."""
        self._ring.add(engine, cursor, extra)

    def rewind(self, engine: Engine, to: int, *, rewinds: Iterable[Rewind] = ()) -> Rewound:
        """Bring the live engine back to the newest state of at most `to` updates: from the ring, else a file.

        Snapshots of later steps are dropped. rewinds: this one and those before, so that no file that they
        condemn is taken. ValueError when there is nothing to go back to; live state is then untouched.
        """
        self.wait()
        snapshot = self._ring.at_or_before(to)
        told = self._exchange.everyone(snapshot and snapshot.cursor.step)
        if len(set(told)) > 1:
            raise RuntimeError(f"the ranks hold snapshots of different steps: {told}")
        self._ring.forget_after(to)
        if snapshot:
            load.put(parts(engine), [part.tensor for part in snapshot.state])
            engine.load_done(snapshot.optimizer_step)
            return Rewound(snapshot.cursor, snapshot.extra, "memory")
        found = self._load(
            engine,
            self._choices(lambda: choose.newest(self._files, self.directory, rewinds, at_most=to)),
        )
        if found is None:
            raise ValueError(f"there is no snapshot and no checkpoint of at most {to} steps to go back to")
        return Rewound(found.manifest.cursor, found.manifest.extra, str(found.path))

    def _first(self, choices: Choices, read: Callable[[Found], Any]) -> tuple[Found, Any] | None:
        """The first choice that every rank can read, and what this rank read; None when there is nothing."""
        faults = choices.faults
        for fault in faults:
            self._say(f"{fault}; passed over")
        for path, checksum in choices.paths:
            fault, found, value = self._attempt(Path(path), checksum, read)
            if fault is None:
                return found, value
            if choices.named:
                raise ValueError(f"{fault}\ngive another checkpoint with resume=PATH, or resume=auto")
            faults.append(fault)
            self._say(f"{fault}; falling back to an older checkpoint")
        if not faults:
            return None
        raise ValueError(
            f"no checkpoint in {choices.where} can be loaded: {'; '.join(faults)}\n"
            "give a sound one with resume=PATH, or start afresh in another run.dir"
        )

    def _attempt(
        self, path: Path, checksum: str, read: Callable[[Found], Any]
    ) -> tuple[str | None, Any, Any]:
        """(what is damaged or None, the checkpoint, what was read), the first of them equal on all ranks.

        ValueError on all ranks when it does not fit on one.
        """
        found = value = failure = None
        answer: list[str] | None = None
        try:
            content, proof = manifests.read(self._files, path)
            if proof != checksum:
                raise Damaged(f"{path} has another manifest on rank {self._exchange.rank} than on rank 0")
            found = Found(path, content, checksum)
            store.check_heads(self._files, found, self._exchange.rank, self._exchange.size)
            value = read(found)
        except Damaged as error:
            answer = ["damaged", str(error)]
        except ValueError as error:
            answer = ["unfit", str(error)]
        except Exception as error:  # the others must hear of it before it is raised
            answer, failure = ["failed", f"{type(error).__name__}: {error}"], error
        answers = [a for a in self._exchange.everyone(answer) if a]
        if failure:
            raise failure
        for wanted in ("failed", "unfit", "damaged"):
            for kind, message in answers:
                if kind == wanted == "damaged":
                    return message, None, None
                if kind == wanted:
                    raise RuntimeError(message) if kind == "failed" else ValueError(message)
        return None, found, value

    def _choices(self, lookup: Callable[[], Choices]) -> Choices:
        """What may be loaded, looked up on rank 0, the same on all ranks."""
        told = None
        if self._exchange.rank == 0:
            try:
                told = asdict(lookup())
            except (ValueError, OSError) as error:
                told = str(error)
        told = self._exchange.share(told)
        if isinstance(told, str):
            raise ValueError(told)
        return Choices(**{**told, "paths": [(path, checksum) for path, checksum in told["paths"]]})


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

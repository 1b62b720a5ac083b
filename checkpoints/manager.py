"""Save, find, restore and prune the checkpoints of one run, all ranks together."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints import load, store
from checkpoints import manifest as manifests
from checkpoints.config import Checkpoint
from checkpoints.files import Files, LocalFiles
from checkpoints.manifest import BLOCK_BYTES, Damaged, Entry, FileSum, Manifest
from checkpoints.state import Engine, Part, parts
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
class Rewind:
    """A rewind that was decided: what was saved between its snapshot and its alarm is not to be trusted."""

    attempt: int  # of the alarm
    snapshot_step: int


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
class _Choices:
    """What rank 0 found: (path, checksum of its manifest), best first."""

    where: str
    named: bool
    paths: list[tuple[str, str]]
    faults: list[str]


def condemned(cursor: Cursor, rewinds: Iterable[Rewind]) -> bool:
    """Written after the snapshot of a rewind and not after its alarm."""
    return any(cursor.step > r.snapshot_step and cursor.attempt <= r.attempt for r in rewinds)


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
    """Checkpoints in run_dir/checkpoints. Every method but `latest` is a collective of all ranks.

    `say` receives lines for the log, on rank 0 only. `files` and `exchange` are the outside world.
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
        self.directory = run_dir / "checkpoints"
        self._config, self._mesh, self._about = config, mesh, about or About()
        self._files: Files = files or LocalFiles()
        self._exchange = exchange or exchange_over(mesh.world, mesh.device)
        self._say = say if self._exchange.rank == 0 else _silent
        self._block_bytes = block_bytes

    def latest(self) -> Path | None:
        """The checkpoint that the pointer names, on this rank."""
        return store.latest(self._files, self.directory)

    def save(
        self, engine: Engine, cursor: Cursor, extra: dict[str, Any], *, protect: Iterable[int] = ()
    ) -> Path:
        """Write the state after cursor.step updates; complete and pointed to when this returns.

        extra: plain JSON (schedule, monitor), non-finite numbers as strings. protect: steps that stay
        whatever the configuration says. On failure every rank raises and the checkpoint before stays.
        """
        manifests.canonical({"extra": extra, "about": asdict(self._about)})
        rank, root = self._exchange.rank, self.directory
        directory = root / (store.step_name(cursor.step) + store.WRITING)
        if rank == 0:
            self._together(lambda: store.prepare(self._files, root, cursor.step))
        else:
            self._together(lambda: None)
        state = parts(engine)
        total, entries = self._together(
            lambda: store.write_part(self._files, directory, rank, state, block_bytes=self._block_bytes)
        )
        told = self._exchange.gather(
            {"file": total and manifests.plain(total), "pieces": [manifests.plain(e) for e in entries]}
        )
        self._together(lambda: self._commit(engine, cursor, extra, told) if rank == 0 else None)
        if rank == 0:
            self._prune(cursor.step, protect)
        return root / store.step_name(cursor.step)

    def _together(self, action: Callable[[], Any]) -> Any:
        return together(self._exchange, action)

    def _commit(self, engine: Engine, cursor: Cursor, extra: dict[str, Any], told: list[dict]) -> None:
        mesh = self._mesh
        content = Manifest(
            step=cursor.step,
            optimizer_step=engine.optimizer_step,
            cursor=cursor,
            layout={"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size},
            configuration=self._about.configuration,
            versions=self._about.versions,
            tokenizer=self._about.tokenizer,
            extra=extra,
            written=time.time(),
            block_bytes=self._block_bytes,
            files=tuple(manifests.typed(FileSum, t["file"]) for t in told if t["file"]),
            pieces=tuple(manifests.typed(Entry, piece) for t in told for piece in t["pieces"]),
        )
        store.commit(self._files, self.directory, content)

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
        found = self._search(resume, rewinds, lambda found: None)
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
        state = parts(engine)
        told = self._exchange.gather(sorted({(part.kind, part.name) for part in state}))
        names = {(kind, name) for rank in told for kind, name in rank}

        def read(found: Found) -> list[torch.Tensor]:
            if accept:
                accept(_restored(found))
            if self._exchange.rank == 0:
                _refuse_unknown(found, names)
            return load.stage(self._files, found, state)

        answer = self._search(resume, rewinds, read)
        if answer is None:
            return None
        found, staged = answer
        self._put(engine, state, staged, found.manifest.optimizer_step)
        self._say(f"resumed from {found.path}, step {found.manifest.step}")
        return _restored(found)

    def _put(self, engine: Engine, state: list[Part], staged: list[torch.Tensor], step: int) -> None:
        load.put(state, staged)
        engine.load_done(step)

    def _search(
        self, resume: str, rewinds: Iterable[Rewind], read: Callable[[Found], Any]
    ) -> tuple[Found, Any] | None:
        """The first choice that every rank can read, and what this rank read; None when there is nothing."""
        if resume == "none":
            return None
        choices = self._choices(resume, list(rewinds))
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

    def _choices(self, resume: str, rewinds: list[Rewind]) -> _Choices:
        """What may be loaded, looked up on rank 0, the same on all ranks."""
        told = None
        if self._exchange.rank == 0:
            try:
                told = asdict(_look(self._files, self.directory, resume, rewinds))
            except (ValueError, OSError) as error:
                told = str(error)
        told = self._exchange.share(told)
        if isinstance(told, str):
            raise ValueError(told)
        return _Choices(told["where"], told["named"], [tuple(p) for p in told["paths"]], told["faults"])


def _look(files: Files, directory: Path, resume: str, rewinds: list[Rewind]) -> _Choices:
    if resume == "auto":
        return _newest(files, directory, rewinds)
    path = Path(resume)
    names = files.names(path)
    if manifests.NAME in names:
        checksum = manifests.read(files, path)[1]
        return _Choices(str(path), True, [(str(path), checksum)], [])
    for inner in (path / "checkpoints", path):
        if store.steps(files, inner):
            return _newest(files, inner, rewinds)
    state = "is not a complete checkpoint" if names else "does not exist or is empty"
    raise ValueError(
        f"resume={resume} {state}; give the directory of a step (.../{store.step_name(1000)}) or of a run, "
        "or resume=auto"
    )


def _newest(files: Files, directory: Path, rewinds: list[Rewind]) -> _Choices:
    found, faults = store.scan(files, directory)
    paths = [(str(f.path), f.checksum) for f in found if not condemned(f.manifest.cursor, rewinds)]
    return _Choices(str(directory), False, paths, faults)


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

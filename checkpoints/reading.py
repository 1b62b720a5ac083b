"""All ranks agree on which checkpoint is read, and on whether it is sound, before anything live changes."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoints import manifest as manifests
from checkpoints import store
from checkpoints.choose import Choices
from checkpoints.files import Files
from checkpoints.manifest import Damaged
from checkpoints.store import Found
from parallel.exchange import Exchange


class Reading:
    """One place with checkpoints, as the ranks of a run read it. Every method is a collective."""

    def __init__(self, files: Files, exchange: Exchange, say: Callable[[str], None]) -> None:
        self.files, self._exchange, self._say = files, exchange, say

    def choices(self, lookup: Callable[[], Choices]) -> Choices:
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

    def first(self, choices: Choices, read: Callable[[Found], Any]) -> tuple[Found, Any] | None:
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
            content, proof = manifests.read(self.files, path)
            if proof != checksum:
                raise Damaged(f"{path} has another manifest on rank {self._exchange.rank} than on rank 0")
            found = Found(path, content, checksum)
            store.check_heads(self.files, found, self._exchange.rank, self._exchange.size)
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

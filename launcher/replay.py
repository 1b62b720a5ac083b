"""The command `replay`: what the monitor would have said about old runs, from their logs alone.

In a log nothing is rewound: after a REWIND judging starts anew at the level reached; no budget is counted.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conf.typed import config, setting
from launcher.curves import matching, observations
from launcher.failure import DONE
from launcher.metrics import encoded
from launcher.monitor import History, Kind, Monitor, Observation, Verdict, judge
from launcher.picture import Picture


@config
class Replay:
    """The monitor on old logs."""

    files: list[str] = setting(
        on_resume="free",
        help="logs or patterns: CSV (step,loss[,grad_norm]) or metrics.jsonl, both also .gz; a directory of "
        "a run or of TensorBoard",
    )
    monitor: Monitor = setting(factory=Monitor, on_resume="free", help="the rules to try")
    plot: str | None = setting(None, on_resume="free", help="PNG to draw the curves and verdicts in")
    format: Literal["json", "text"] = setting(
        "json", on_resume="free", help="json: one object for each verdict but OK, then one for the whole file"
    )

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files must name at least one log: files=[LOG, ...]")


@dataclass(frozen=True)
class Judged:
    """One attempt of a log and what was said about it."""

    observation: Observation
    verdict: Verdict


def replay(tree: Replay) -> int:
    """Judge every log and print what stands out. ValueError at the end when a log could not be read."""
    picture = Picture() if tree.plot else None
    unreadable: list[str] = []
    for path in matching(tree.files):
        counts: Counter[Kind] = Counter()
        steps = 0
        panel = picture.panel(str(path)) if picture else None
        try:
            for judged in judgements(path, tree.monitor):
                steps += 1
                counts[judged.verdict.kind] += 1
                if panel is not None:
                    panel.add(judged.observation, judged.verdict)
                if judged.verdict.kind != Kind.OK:
                    tell(record(path, judged), tree.format)
        except (ValueError, OSError, EOFError, zlib.error) as error:
            said = str(error) if isinstance(error, ValueError) else f"{path}: {error}"
            unreadable.append(said)
            tell({"file": str(path), "error": said}, tree.format)
            continue
        tell({"file": str(path), "summary": summary(steps, counts)}, tree.format)
    if picture is not None and tree.plot is not None:
        picture.save(Path(tree.plot))
    if unreadable:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise ValueError(f"a log could not be read: {unreadable[0]}{more}")
    return DONE


def judgements(path: Path, settings: Monitor) -> Iterator[Judged]:
    """Every attempt of a log with its verdict."""
    history = History()
    for observation in observations(path):
        if settings.action == "none":
            verdict = Verdict(Kind.OK, history)
        else:
            verdict = judge(history, observation, settings)
        history = verdict.history
        yield Judged(observation, verdict)


def record(path: Path, judged: Judged) -> dict[str, Any]:
    """As it is printed; onset is null for what does not last."""
    verdict, seen = judged.verdict, judged.observation
    return {
        "file": str(path),
        "step": seen.step,
        "verdict": verdict.kind.name,
        "loss": encoded(seen.loss),
        "onset": verdict.onset,
        "reason": verdict.reason,
    }


def summary(steps: int, counts: Counter[Kind]) -> dict[str, int]:
    kinds = (Kind.WARN, Kind.SKIP, Kind.REWIND)
    return {"steps": steps, **{kind.name.lower(): counts[kind] for kind in kinds}}


def tell(record: dict[str, Any], form: Literal["json", "text"]) -> None:
    """One line, at once: a reader may follow."""
    if form == "json":
        line = json.dumps(record, allow_nan=False)
    elif "verdict" in record:
        onset = "" if record["onset"] is None else f" since step {record['onset']}"
        line = f"{record['file']}  step {record['step']}  {record['verdict']}{onset}  {record['reason']}"
    elif "error" in record:
        line = f"{record['file']}  {record['error']}"
    else:
        line = f"{record['file']}  " + "  ".join(f"{key} {n}" for key, n in record["summary"].items())
    print(line, flush=True)

"""The command `report`: what a run has left, as one HTML file that needs nothing beside it."""

import json
from pathlib import Path

from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.report.goodput import account
from launcher.report.happened import sentence
from launcher.report.outlook import outlook
from launcher.report.reading import last_finite, load
from launcher.report.single import report_page
from launcher.rundirectory import write_atomic

NAME = "report.html"


@config
class Which:
    """The run."""

    dir: str | None = setting(None, on_resume="free", help="directory of the run")


@config
class Report:
    """A report on one run."""

    run: Which = setting(factory=Which, on_resume="free", help="the run")
    output: str | None = setting(None, on_resume="free", help=f"file to write; null: {NAME} in run.dir")
    calibrate: bool = setting(
        True,
        on_resume="free",
        help="measure this machine's CPU for a second, to plan a run that was made on one",
    )
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)


def report(tree: Report) -> int:
    """Read the run, write the page, say in a line how the run went."""
    if not tree.run.dir:
        raise ValueError("run.dir must be given, the directory of a run: run.dir=runs/NAME")
    record = load(Path(tree.run.dir).expanduser())
    spent, found = account(record), outlook(record, calibrate=tree.calibrate)
    path = record.path / NAME if tree.output is None else Path(tree.output).expanduser()
    save(path, report_page(record, spent, found), key="output")
    last = record.applied[-1]
    if tree.format == "json":
        facts = {
            "report": str(path),
            "state": record.status.get("state"),
            "step": last["step"],
            "tokens": last.get("tokens/total"),
            "last_train_loss": last_finite(record.applied, "loss/train"),
            "held_out_loss": last_finite(record.applied, "loss/eval"),
            "goodput": spent.share,
            "seconds": spent.seconds,
            "whole": spent.whole,
            "plan": {row.name: [row.predicted, row.measured] for row in found.rows},
        }
        print(json.dumps(facts))
    else:
        print(f"{sentence(record)}\nreport  {path}")
    return DONE


def save(path: Path, text: str, *, key: str) -> None:
    """Write a page; ValueError where that cannot be."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ValueError(f"{key}={path} cannot be written: {error.strerror or error}") from None

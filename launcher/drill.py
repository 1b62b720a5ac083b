"""The command `drill`: a small model is trained with faults on purpose, and what came of each is reported.

Every run is started under torchrun, as a user would. A run with a fault is compared with the one without, at
the same layout.
"""

import base64
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from conf.typed import config, setting
from launcher.config import FORMAT_HELP
from launcher.events import FILE, records
from launcher.failure import DONE, FAILED
from launcher.monitor import History, Kind, Observation, Verdict
from launcher.picture import Picture
from launcher.report.page import SWITCH
from launcher.report.page import page as document
from launcher.report.page import table as html_table

PROCESSES = 2
LAYOUTS = {"tp2": ["parallel.tp=2"], "pp2": ["parallel.pp=2"], "dp2": []}
CLEAN = "clean"
WIDTH = 180  # columns of the table in text
NEAR = 0.02  # nats: a recovered run ends as near to the clean one
SETTINGS = [
    "model=tiny",
    "train.sequence_length=64",
    "train.global_batch=8",
    "optim.lr=3e-3",
    "evaluate.every=0",
    "evaluate.batches=20",
    "checkpoint.every=0",
    "checkpoint.snapshot_every=10",
    "monitor.fingerprint_every=1",
    "sample.max_tokens=0",
    "hardware=cpu",
]


@config
class Drill:
    """Rehearse what a run does about faults."""

    out: str = setting("runs/drill", on_resume="free", help="directory of the runs and the report")
    steps: int = setting(240, on_resume="free", help="updates of each run")
    layouts: list[Literal["tp2", "pp2", "dp2"]] = setting(
        factory=lambda: ["tp2", "pp2", "dp2"], on_resume="free", help="each on two processes"
    )
    faults: list[Literal["poison", "nan_gradient", "lr", "bit_flip", "tokens"]] = setting(
        factory=lambda: ["poison", "nan_gradient", "lr", "bit_flip", "tokens"],
        on_resume="free",
        help="each in a run of its own",
    )
    train: list[str] = setting(
        factory=list, on_resume="free", help="more for every run: ['data=files','data.paths=[x]']"
    )
    format: Literal["text", "json"] = setting("text", on_resume="free", help=FORMAT_HELP)

    def __post_init__(self) -> None:
        if self.steps < 80:
            raise ValueError(f"steps ({self.steps}) must be at least 80: a fault comes at two thirds of them")
        if not self.layouts or not self.faults:
            raise ValueError("layouts and faults must name at least one each")


@dataclass(frozen=True)
class Result:
    """One run. lost: attempts beyond the updates; difference: of the held-out loss, from the clean run."""

    layout: str
    fault: str
    state: str
    fired: int | None = None  # attempts
    detected: int | None = None
    verdict: str | None = None
    rewound_to: int | None = None
    skipped: int = 0  # samples left out by rewinds
    lost: int = 0
    cause: str | None = None
    held_out: float | None = None
    difference: float | None = None


def drill(tree: Drill) -> int:
    """Run all of it and report; exit code 1 when a run did not finish or was not as good as the clean one."""
    out = Path(tree.out)
    results: list[Result] = []
    picture = Picture()
    for layout, fault in itertools.product(tree.layouts, [CLEAN, *tree.faults]):
        directory = out / f"{layout}-{fault}"
        if tree.format == "text":
            print(f"{layout} {fault} ...", flush=True)
        run(tree, layout, fault, directory)
        clean = next((r for r in results if r.layout == layout and r.fault == CLEAN), None)
        results.append(judged(directory, layout, fault, clean))
        panel = picture.panel(f"{layout}, {fault}")
        for observation, verdict in curve(directory):
            panel.add(observation, verdict)
    picture.save(out / "report.png")
    (out / "report.json").write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    (out / "report.html").write_text(page(results, picture), encoding="utf-8")
    if tree.format == "json":
        print(json.dumps({"results": [asdict(r) for r in results], "report": str(out / "report.html")}))
    else:
        console = Console()
        console.width = max(console.width, WIDTH)
        console.print(table(results))
        print(f"report  {out / 'report.html'}")
    return DONE if all(good(result) for result in results) else FAILED


def fault_setting(kind: str, steps: int) -> str:
    """The configuration of one fault, at two thirds of the run."""
    at = 2 * steps // 3
    first = 8 * at
    return {
        "poison": f"{{kind: poison, samples: [{first}, {first + 80}]}}",
        "nan_gradient": f"{{kind: nan_gradient, step: {at}, rank: 1}}",
        "lr": f"{{kind: lr, step: {at}, steps: 4, factor: 30}}",
        "bit_flip": f"{{kind: bit_flip, step: {at}, rank: 1}}",
        # Of the data ranks: there is one of them, number 0, under tensor and pipeline parallelism.
        "tokens": f"{{kind: tokens, step: {at}, steps: 2, rank: 0}}",
    }[kind]


def run(tree: Drill, layout: str, fault: str, directory: Path) -> None:
    """One training under torchrun; its output goes into output.txt of its directory."""
    if (directory / "metrics.jsonl").exists():
        raise ValueError(f"{directory} holds a run; give another out=DIRECTORY, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [*SETTINGS, f"train.steps={tree.steps}", f"run.dir={directory}", *LAYOUTS[layout]]
    if fault != CLEAN:
        arguments.append(f"faults=[{fault_setting(fault, tree.steps)}]")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(PROCESSES), "-m", "launcher", "train", *arguments, *tree.train]
    with open(directory / "output.txt", "w", encoding="utf-8") as output:
        subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )


def lines(directory: Path) -> list[dict[str, Any]]:
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def judged(directory: Path, layout: str, fault: str, clean: Result | None) -> Result:
    """What the records of a run say."""
    found, events = lines(directory), list(records(directory / FILE))
    status = directory / "status.json"
    state = json.loads(status.read_text())["state"] if status.exists() else "failed"
    fired = next((event["attempt"] for event in events if event["event"] == "fault"), None)
    seen = next((e for e in events if e["event"] in ("skip", "rewind", "stop") and fired is not None), None)
    rewinds = [event for event in events if event["event"] == "rewind"]
    causes = [event for event in events if event["event"] == "diagnosis"]
    loss = found[-1].get("loss/eval") if found else None
    cause = next((c for c in causes if c["cause"] == "hardware"), causes[0] if causes else None)
    named = f": {cause['parameter']} on rank {cause['rank']}" if cause and "rank" in cause else ""
    return Result(
        layout,
        fault,
        state,
        fired=fired,
        detected=seen["attempt"] if seen else None,
        verdict=seen["event"] if seen else None,
        rewound_to=rewinds[-1]["snapshot_step"] if rewinds else None,
        skipped=int(found[-1]["monitor/skipped_samples"]) if found else 0,
        lost=found[-1]["attempt"] - found[-1]["step"] if found else 0,
        cause=f"{cause['cause']}{named}" if cause else None,
        held_out=loss,
        difference=loss - clean.held_out if clean and loss is not None and clean.held_out else None,
    )


def good(result: Result) -> bool:
    """Finished, the fault noticed, and as good as without it."""
    if result.state != "finished" or result.held_out is None:
        return False
    return result.fault == CLEAN or (
        result.detected is not None and result.difference is not None and result.difference < NEAR
    )


def curve(directory: Path) -> Iterator[tuple[Observation, Verdict]]:
    """The loss by attempt, with the verdicts that were carried out."""
    onsets = {
        event["attempt"]: event.get("onset")
        for event in records(directory / FILE)
        if event["event"] == "rewind"
    }
    for line in lines(directory):
        loss = line.get("loss/train")
        observation = Observation(line["attempt"], float(loss) if loss is not None else None)
        kind = Kind(line["monitor/verdict"])
        onset = onsets.get(line["attempt"])
        lasted = None if onset is None else line["attempt"] - (line["step"] - onset)
        yield observation, Verdict(kind, History(), onset=lasted)


def cells(result: Result) -> list[str]:
    """A row of the report, in the order of HEADS."""
    after = None if result.detected is None or result.fired is None else result.detected - result.fired
    detected = "-" if after is None else f"{result.verdict} after {after + 1}"
    number = "-" if result.held_out is None else f"{result.held_out:.4f}"
    difference = "-" if result.difference is None else f"{result.difference:+.4f}"
    rewound = "-" if result.rewound_to is None else str(result.rewound_to)
    return [detected, rewound, str(result.skipped), str(result.lost), result.cause or "-", number, difference]


HEADS = (
    "detected",
    "back to",
    "left out",
    "lost",
    "cause found",
    "held-out loss",
    "against clean",
)


def table(results: Sequence[Result]) -> Table:
    found = Table("layout", "fault", "", *HEADS, box=None)
    for result in results:
        found.add_row(result.layout, result.fault, "ok" if good(result) else result.state, *cells(result))
    return found


def page(results: Sequence[Result], picture: Picture) -> str:
    """One HTML page that needs nothing beside it."""
    file = io.BytesIO()
    picture.image().save(file, format="PNG", optimize=True)
    image = base64.b64encode(file.getvalue()).decode()
    rows = [
        [escape(cell) for cell in (r.layout, r.fault, "ok" if good(r) else f"not ok ({r.state})", *cells(r))]
        for r in results
    ]
    failed = sum(not good(result) for result in results)
    said = f"{failed} of {len(results)} runs are not ok." if failed else f"All {len(results)} runs are ok."
    body = (
        f"<header><h1>Drill</h1>{SWITCH}</header>\n"
        f'<p class="lead">{said} Each fault in a run of its own; training loss by attempt below.</p>\n'
        f"{html_table(['layout', 'fault', '', *HEADS], rows)}\n<h2>Loss</h2>\n"
        f'<p><img src="data:image/png;base64,{image}" alt="loss curves" style="max-width:100%"></p>'
    )
    return document("Drill", body)

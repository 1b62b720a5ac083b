"""The command `harness`: a model on tasks of the lm-eval harness, which is an optional extra."""

import importlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.hardware import Hardware
from launcher.opening import asked, open_model


@config
class Harness:
    """Scores of a model on tasks of lm-eval."""

    source: str = setting(
        "runs/run",
        on_resume="free",
        help="directory of a run, of one step, or of a model of transformers",
    )
    tokenizer: str | None = setting(None, on_resume="free", help="tokenizer file; null: the source's own")
    tasks: list[str] = setting(on_resume="free", help="names of tasks: [hellaswag, arc_easy]")
    include: str | None = setting(None, on_resume="free", help="a folder of your own tasks, YAML files")
    shots: int | None = setting(None, on_resume="free", help="examples before each; null: the task's number")
    limit: int | None = setting(None, on_resume="free", help="only the first so many of each task; null: all")
    rows: int = setting(8, on_resume="free", help="requests that are read together")
    context: int | None = setting(
        None, on_resume="free", help="tokens seen at once; null: those of the training, else 1024"
    )
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the machine")
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks must name at least one task: tasks=[hellaswag]")
        for name in ("shots", "limit", "rows"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "shots" else 1):
                raise ValueError(f"{name} ({value}) is too small")
        if self.include is not None and not Path(self.include).expanduser().is_dir():
            raise ValueError(f"include={self.include} is no folder")


def harness(tree: Harness) -> int:
    """The command: a line for each task and metric, or one JSON object."""
    try:
        adapter = importlib.import_module("launcher.harness_model")
    except ImportError as error:
        raise ValueError(
            f"the harness needs lm-eval, which is not installed whole ({error}); "
            "pip install 'megamodel[lm-eval]'"
        ) from None
    with asked(tree.hardware) as (device, parallel):
        opened = open_model(tree.source, tokenizer=tree.tokenizer, device=device, parallel=parallel)
        results: dict[str, dict[str, Any]] = adapter.results(
            opened,
            tasks=tree.tasks,
            include=None if tree.include is None else str(Path(tree.include).expanduser()),
            shots=tree.shots,
            limit=tree.limit,
            rows=tree.rows,
            context=tree.context or opened.context or 1024,
        )
        if parallel.group.rank:
            return DONE
    if tree.format == "json":
        print(json.dumps({"source": str(opened.where), "results": results}))
    else:
        made = Table("task", "metric", "value", "standard error", box=None)
        for task, values in results.items():
            for metric, value in values.items():
                if isinstance(value, float) and "_stderr" not in metric:
                    name, _, kind = metric.partition(",")
                    error = values.get(f"{name}_stderr,{kind}")
                    told = f"{error:.4f}" if isinstance(error, float) else "-"
                    made.add_row(task, name if kind == "none" else metric, f"{value:.4f}", told)
        Console().print(made)
    return DONE

"""Weights & Biases and MLflow, as further places for the numbers of a run. Both are optional extras.

Only the main rank writes, from a thread: a service that is slow or away never holds up the training. What
cannot be delivered is said once and left out; metrics.jsonl has it all. The axis of every curve is `attempt`,
which never goes back; `step` is a number beside the others.
"""

import importlib
import importlib.util
import json
import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from conf.typed import config, setting, union
from launcher.rundirectory import RunDirectory, write_atomic

log = logging.getLogger(__name__)

FILE = "sinks.json"  # the ids under which a resumed run goes on
MOST_WAITING = 10_000  # attempts that wait to be delivered; more are left out
MOST_PAUSE = 1024  # attempts that are left out before a failed sink is tried again
CLOSE_SECONDS = 60.0  # in which what waits must be delivered at the end
MOST_TEXT = 500  # characters of a setting: MLflow's limit on a parameter
BATCH = 100  # settings in one call: MLflow's limit


@config
class No:
    """Not used."""

    kind: Literal["none"] = setting("none", on_resume="free", help="not used")


@config
class Wandb:
    """A run at Weights & Biases, or in its directory to be synchronised later."""

    kind: Literal["online", "offline"] = setting(
        "online", on_resume="free", help="online; or offline: into run.dir, for `wandb sync`"
    )
    project: str = setting("megamodel", on_resume="free", help="project there")
    entity: str | None = setting(None, on_resume="free", help="user or team; null: the default one")
    group: str | None = setting(None, on_resume="free", help="group of the run; null: none")
    tags: list[str] = setting(factory=list, on_resume="free", help="tags of the run")


@config
class Mlflow:
    """A run at an MLflow server, or in files."""

    kind: Literal["mlflow"] = setting("mlflow", on_resume="free", help="used")
    tracking_uri: str | None = setting(
        None, on_resume="free", help="server, or sqlite:///FILE for none; null: as MLflow is configured"
    )
    experiment: str = setting("megamodel", on_resume="free", help="experiment there")


@config
class Sinks:
    """Where the metrics go besides metrics.jsonl and TensorBoard."""

    wandb: Annotated[No | Wandb, union("kind")] = setting(
        factory=No, on_resume="free", help="Weights & Biases: kind=online or offline"
    )
    mlflow: Annotated[No | Mlflow, union("kind")] = setting(
        factory=No, on_resume="free", help="MLflow: kind=mlflow"
    )


class Sink(Protocol):
    """One service. Every call may raise whatever its library raises."""

    name: str

    def open(self, values: Mapping[str, Any], known: str | None) -> str:
        """Begin with the flat configuration, or go on with the run `known`; the id of the run."""
        ...

    def write(self, line: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class WandbSink:
    def __init__(self, settings: Wandb, directory: Path) -> None:
        self.name, self._settings, self._directory = "wandb", settings, directory
        self._run: Any = None

    def open(self, values: Mapping[str, Any], known: str | None) -> str:
        settings = self._settings
        self._run = importlib.import_module("wandb").init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=list(settings.tags),
            name=self._directory.name,
            dir=str(self._directory),
            mode=settings.kind,
            id=known,
            resume="allow",
            config=dict(values),
        )
        self._run.define_metric("attempt")
        self._run.define_metric("*", step_metric="attempt")
        return str(self._run.id)

    def write(self, line: Mapping[str, float]) -> None:
        self._run.log(dict(line))

    def close(self, *, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


class MlflowSink:
    def __init__(self, settings: Mlflow, directory: Path) -> None:
        self.name, self._settings, self._directory = "mlflow", settings, directory
        self._library: Any = None

    def open(self, values: Mapping[str, Any], known: str | None) -> str:
        library = importlib.import_module("mlflow")
        if self._settings.tracking_uri is not None:
            library.set_tracking_uri(self._settings.tracking_uri)
        library.set_experiment(self._settings.experiment)
        run = library.start_run(run_id=known, run_name=self._directory.name)
        if known is None:  # a parameter can be set once
            pairs = [(key, str(value)[:MOST_TEXT]) for key, value in values.items()]
            try:
                for first in range(0, len(pairs), BATCH):
                    library.log_params(dict(pairs[first : first + BATCH]))
            except Exception:
                library.end_run(status="FAILED")  # the next try begins another one
                raise
        self._library = library
        return str(run.info.run_id)

    def write(self, line: Mapping[str, float]) -> None:
        own = {name: value for name, value in line.items() if name != "attempt"}
        self._library.log_metrics(own, step=int(line["attempt"]))

    def close(self, *, failed: bool) -> None:
        if self._library is not None:
            self._library.end_run(status="FAILED" if failed else "FINISHED")


class Delivery:
    """One sink behind a thread of its own."""

    def __init__(self, sink: Sink, values: Mapping[str, Any], ids: "Ids") -> None:
        self._sink, self._values, self._ids = sink, values, ids
        self._waiting: queue.Queue[dict[str, float] | None] = queue.Queue(MOST_WAITING)
        self._failed = self._said = self._opened = False
        self._pause, self._left = 1, 0
        self._thread = threading.Thread(target=self._work, name=f"sink-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, line: dict[str, float]) -> None:
        """Never waits and never raises."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._say(f"is too slow: {MOST_WAITING} attempts wait")

    def close(self, *, failed: bool) -> None:
        """Deliver what waits and end the run there, within a time."""
        self._failed = failed
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self._say("took nothing any more at the end")
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(f"did not take everything within {CLOSE_SECONDS:.0f} s")

    def _work(self) -> None:
        while (line := self._waiting.get()) is not None:
            if self._left:  # after a failure some are left out, twice as many each time
                self._left -= 1
                continue
            if self._tried(lambda line=line: self._write(line)):
                self._pause = 1
            else:
                self._left, self._pause = self._pause - 1, min(2 * self._pause, MOST_PAUSE)
        if self._opened:
            self._tried(lambda: self._sink.close(failed=self._failed))

    def _write(self, line: dict[str, float]) -> None:
        if not self._opened:
            self._ids.keep(self._sink.name, self._sink.open(self._values, self._ids.of(self._sink.name)))
            self._opened = True
        self._sink.write(line)

    def _tried(self, action: Any) -> bool:
        try:
            action()
        except Exception as error:
            self._say(f"failed ({type(error).__name__}: {error})")
            log.debug(f"sinks.{self._sink.name}", exc_info=True)
            return False
        return True

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            log.warning(
                f"sinks.{self._sink.name} {what}; some numbers may be missing there, training goes on"
            )


class Ids:
    """The ids of a run at its sinks, in its directory."""

    def __init__(self, directory: Path) -> None:
        self._file, self._lock = directory / FILE, threading.Lock()

    def of(self, name: str) -> str | None:
        return self._read().get(name)

    def keep(self, name: str, known: str) -> None:
        with self._lock:
            write_atomic(self._file, json.dumps({**self._read(), name: known}) + "\n")

    def _read(self) -> dict[str, str]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def check_installed(sinks: Sinks) -> None:
    """ValueError when a service is asked for whose package is not there."""
    asked = {"wandb": not isinstance(sinks.wandb, No), "mlflow": not isinstance(sinks.mlflow, No)}
    for name, wanted in asked.items():
        if wanted and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"sinks.{name}.kind={getattr(sinks, name).kind} needs the package {name}, which is not "
                f"installed; pip install 'megamodel[{name}]', or use sinks.{name}.kind=none"
            )


def deliveries(sinks: Sinks, directory: RunDirectory, values: Mapping[str, Any]) -> list[Delivery]:
    """The sinks that are asked for, opened in the background. values: the flat configuration."""
    found: list[Sink] = []
    if isinstance(sinks.wandb, Wandb):
        found.append(WandbSink(sinks.wandb, directory.path))
    if isinstance(sinks.mlflow, Mlflow):
        found.append(MlflowSink(sinks.mlflow, directory.path))
    ids = Ids(directory.path)
    return [Delivery(sink, values, ids) for sink in found]

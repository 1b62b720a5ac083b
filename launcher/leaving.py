"""Leaving before the first step: the run is over already, or a signal has come so early."""

import logging

from checkpoints.manager import holds_run
from launcher.config import Plan, check_resume
from launcher.rundirectory import RunDirectory
from launcher.stopping import StopRequest, reason
from parallel.exchange import Exchange

log = logging.getLogger(__name__)


def leave(directory: RunDirectory, asked: int, *, is_main: bool) -> None:
    """A signal came before the first step: there is nothing to save, and the next start begins here again."""
    if not is_main:
        return
    before = directory.status() or {}
    directory.set_status("stopped", reason=reason(asked), step=int(before.get("step", 0)))
    log.info(f"stopped by {reason(asked)} before the first step; the same command goes on")


def agreed(exchange: Exchange, stop: StopRequest) -> int:
    """The signal that has asked any rank, or 0; the same on all."""
    return max(exchange.everyone(int(stop.signalled)))


def is_over(settled: Plan, directory: RunDirectory, *, rank: int) -> bool:
    """Whether there is nothing left to do; ValueError when resume=none would mix with a run."""
    if settled.config.resume == "none" and holds_run(directory.path, settled.config.checkpoint):
        raise ValueError(
            f"{directory.path} holds a run and resume=none starts a new one; "
            "give another run.name or run.dir, or resume=auto to go on"
        )
    status = directory.status()
    saved = directory.saved_config()
    if settled.config.resume != "auto" or not status or status["state"] != "finished" or saved is None:
        return False
    check_resume(saved, settled.config)
    if status["step"] < settled.steps:
        return False
    if rank == 0:
        print(f"{directory.path} is finished at step {status['step']}; nothing to do")
    return True

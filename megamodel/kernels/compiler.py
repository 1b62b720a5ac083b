"""torch.compile of blocks: whether it can be, and how often it was."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parallel.outside import keep_all

LIMIT = 16  # forms of one block that are compiled before the rest runs as it is


@dataclass(frozen=True)
class Compiled:
    """What torch.compile has done in this process. graphs: compiled pieces; breaks: places where one ends."""

    graphs: int
    breaks: int
    beyond_limit: bool


def triton_problem() -> str | None:
    """Why kernels of triton cannot be made here; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'megamodel[gpu]'"
    if os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        return None
    return "triton needs a C compiler (gcc or clang) to start its kernels, and there is none"


def problem(*, cuda: bool) -> str | None:
    """Why torch.compile cannot be used here; None where it can."""
    if cuda:
        return triton_problem()
    if any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return None
    return "torch.compile needs a C++ compiler (g++ or clang++) on a CPU, and there is none"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind torch.compile: one graph for each form of its inputs, at most LIMIT."""
    keep_all()
    torch._dynamo.config.recompile_limit = LIMIT
    return torch.compile(function, dynamic=False)


def counted() -> Compiled:
    """What was compiled so far."""
    from torch._dynamo.utils import counters  # costs a second at the start of what compiles nothing

    limit = any("recompile_limit" in str(reason) for reason in counters["unimplemented"])
    return Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), limit)

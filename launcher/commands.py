"""The table of commands: what each is called, does, is configured by and runs."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """One command. root and function are `module:name`, imported when the command is used and not before."""

    name: str
    summary: str
    config_name: str  # the primary file in conf/
    root: str
    function: str  # called with the typed root, returns the exit code
    has_run: bool  # whether it works in run.dir
    passes_on: bool = False  # whether the function also gets the arguments as they were written

    def load_root(self) -> type:
        return load(self.root)

    def load_function(self) -> Callable[..., int]:
        return load(self.function)


def load(name: str) -> Any:
    """The object that `module:name` stands for."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="train",
            summary="train a model: prepare what is missing, train, evaluate, save, resume",
            config_name="config",
            root="launcher.config:Config",
            function="launcher.run:train",
            has_run=True,
        ),
        Command(
            name="prepare",
            summary="build the tokenizer and the token files of a run, nothing else",
            config_name="prepare",
            root="launcher.config:Prepare",
            function="launcher.preparing:prepare",
            has_run=False,
        ),
        Command(
            name="launch",
            summary="start a run on a cluster, or print what would: torchrun, deepspeed, slurm, kubernetes",
            config_name="config",
            root="launcher.launch:Launch",
            function="launcher.launch:launch",
            has_run=False,
            passes_on=True,
        ),
        Command(
            name="doctor",
            summary="check the machines before a run: versions, clocks, disk, GPUs, collectives, speed",
            config_name="config",
            root="launcher.doctor:Doctor",
            function="launcher.doctor:doctor",
            has_run=False,
        ),
        Command(
            name="generate",
            summary="write text: from a run, a checkpoint or a model directory of transformers",
            config_name="bare",
            root="launcher.writing:Generate",
            function="launcher.writing:generate",
            has_run=False,
        ),
        Command(
            name="evaluate",
            summary="loss, perplexity and bits per byte of a model on files, document by document",
            config_name="bare",
            root="launcher.scoring:Score",
            function="launcher.scoring:evaluate",
            has_run=False,
        ),
        Command(
            name="harness",
            summary="scores of a model on tasks of lm-eval, an optional extra",
            config_name="bare",
            root="launcher.harness:Harness",
            function="launcher.harness:harness",
            has_run=False,
        ),
        Command(
            name="import-hf",
            summary="a model directory of transformers -> a checkpoint that training goes on from",
            config_name="bare",
            root="launcher.models:Import",
            function="launcher.models:import_model",
            has_run=False,
        ),
        Command(
            name="export-hf",
            summary="a checkpoint -> a model directory that transformers loads",
            config_name="bare",
            root="launcher.models:Export",
            function="launcher.models:export_model",
            has_run=False,
        ),
        Command(
            name="checkpoints",
            summary="list checkpoints: step, size, layout, age, health",
            config_name="bare",
            root="launcher.checkpoint_commands:ListCheckpoints",
            function="launcher.checkpoint_commands:list_checkpoints",
            has_run=False,
        ),
        Command(
            name="verify",
            summary="read checkpoints whole and check every sum; 1 when one is damaged",
            config_name="bare",
            root="launcher.checkpoint_commands:Verify",
            function="launcher.checkpoint_commands:verify",
            has_run=False,
        ),
        Command(
            name="inspect",
            summary="statistics of one tensor of a checkpoint, or the list of its tensors",
            config_name="bare",
            root="launcher.checkpoint_commands:Inspect",
            function="launcher.checkpoint_commands:inspect",
            has_run=False,
        ),
        Command(
            name="reshape",
            summary="write a checkpoint at another layout, without processes",
            config_name="bare",
            root="launcher.checkpoint_commands:Reshape",
            function="launcher.checkpoint_commands:reshape",
            has_run=False,
        ),
        Command(
            name="compare",
            summary="runs side by side: what they differ in, losses, speed; one table, plot or page",
            config_name="bare",
            root="launcher.compare:Compare",
            function="launcher.compare:compare",
            has_run=False,
        ),
        Command(
            name="report",
            summary="one HTML file on a run: curves, where the time went, what happened, plan and reality",
            config_name="bare",
            root="launcher.report.command:Report",
            function="launcher.report.command:report",
            has_run=False,
        ),
        Command(
            name="extrapolate",
            summary="held-out loss of runs at longer contexts than they were trained on, RoPE also scaled",
            config_name="bare",
            root="launcher.extrapolate:Extrapolate",
            function="launcher.extrapolate:extrapolate",
            has_run=False,
        ),
        Command(
            name="kernels",
            summary="in which form each operation would be computed here, and why",
            config_name="bare",
            root="launcher.kernels:Listed",
            function="launcher.kernels:listed",
            has_run=False,
        ),
        Command(
            name="drill",
            summary="rehearse: train a small model with faults on purpose, report what became of each",
            config_name="bare",
            root="launcher.drill:Drill",
            function="launcher.drill:drill",
            has_run=False,
        ),
        Command(
            name="plan",
            summary="what a run would need and cost on given GPUs: memory, time, money, the best layout",
            config_name="plan",
            root="launcher.plan.command:Plan",
            function="launcher.plan.command:plan",
            has_run=False,
        ),
        Command(
            name="replay",
            summary="run the monitor over old logs: CSV, metrics.jsonl, TensorBoard; what it would have done",
            config_name="replay",
            root="launcher.replay:Replay",
            function="launcher.replay:replay",
            has_run=False,
        ),
    )
}

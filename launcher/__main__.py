"""The command line: python -m launcher COMMAND key=value ..., also under torchrun, deepspeed, srun, mpirun.

Exit codes: 0 done, 1 failed run, 2 wrong input.
"""

import contextlib
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conf.saved import read
from conf.typed import InvalidConfiguration
from launcher.cluster import Placement, placement
from launcher.commands import COMMANDS, Command
from launcher.failure import DONE, guarded
from launcher.help import command_help, option_parser, overview
from launcher.rundirectory import RunDirectory
from launcher.stopping import ignore_signals, stop_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (sys.argv by default) and give its exit code."""
    arguments = [a for a in (sys.argv[1:] if argv is None else argv) if not is_local_rank(a)]
    rank = rank_for_messages(os.environ)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # From the first moment: a signal that comes while libraries are imported must not kill a run unsaid.
    with stop_signals() if is_run(arguments) else contextlib.nullcontext():
        return guarded(lambda: run(arguments, os.environ), rank=rank, error_file=error_file)


def is_run(arguments: Sequence[str]) -> bool:
    """Whether the command trains, so that a signal is a request; all others end at once."""
    short = {"-h", "--help", "-c", "--cfg", "dry_run=true"}
    return list(arguments[:1]) == ["train"] and not short & set(arguments)


def is_local_rank(argument: str) -> bool:
    """The deepspeed launcher and old torch launchers add --local_rank=N; the environment says it too."""
    return re.fullmatch(r"--local[_-]rank=-?\d+", argument) is not None


def rank_for_messages(environment: Mapping[str, str]) -> int:
    """The rank, also where the environment is too broken for a placement."""
    try:
        return placement(environment).rank
    except ValueError:
        return 0


def run(line: Sequence[str], environment: Mapping[str, str]) -> int:
    """Check the whole command line, then do what it says. Raises ValueError for wrong input."""
    if not line or line[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE
    name, *arguments = line
    command = COMMANDS.get(name)
    if command is None:
        refuse_command(name)
    options = option_parser(command).parse_intermixed_args(arguments)
    place = placement(environment)
    # Only now what costs time: the sections with what they import, and Hydra.
    from conf.compose import Composer, composition_error, is_composition_error

    root = command.load_root()
    saved, overrides = take_saved(options.overrides)
    composer = Composer(
        root,
        options.config_name or command.config_name,
        directory=options.config_dir,
        saved=None if saved is None else values_for(root, saved),
    )
    if options.help:
        print(command_help(command, root, {group: composer.options(group) for group in composer.groups}))
        return DONE
    try:
        request = composer.request(overrides, sweep=options.multirun)
        if options.multirun:
            return sweep(command, composer, request, place, environment)
        raw = composer.compose(request.overrides)
        tree = composer.typed(raw, request.problems)
    except Exception as error:
        if not is_composition_error(error):
            raise
        raise ValueError(composition_error(error)) from error
    if options.cfg:
        text = composer.resolved_yaml(tree) if options.resolve else composer.shown(raw, options.cfg)
        print(text if place.rank == 0 else "", end="")
        return DONE
    return execute(command, tree, place, environment, arguments)


def refuse_command(name: str) -> NoReturn:
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
    hint = f"the nearest is {close[0]}" if close else "see python -m launcher --help"
    raise ValueError(f"there is no command {name!r}; {hint} (commands: {', '.join(COMMANDS)})")


def take_saved(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """config=FILE and the other arguments."""
    files = [argument.partition("=")[2] for argument in overrides if argument.startswith("config=")]
    if len(files) > 1 or "" in files:
        raise ValueError(f"config= must name one file; it names {files}")
    path = Path(files[0]).expanduser() if files else None
    if path is not None and path.is_dir():
        path = path / "config.yaml"
    return path, [argument for argument in overrides if not argument.startswith("config=")]


def values_for(root: type, file: Path) -> dict[str, Any]:
    """The values of a saved configuration that this command has; those of another command are left out."""
    values = read(file)
    ours = {field.name for field in dataclasses.fields(root)}
    others = {f.name for command in COMMANDS.values() for f in dataclasses.fields(command.load_root())}
    return {key: value for key, value in values.items() if key in ours or key not in others}


def execute(
    command: Command,
    tree: Any,
    place: Placement,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> int:
    """Run the function of a command on its typed configuration; an error is reported and becomes the code."""
    directory = None
    if command.has_run:
        from launcher.config import run_directory
        from parallel.start import declare_accelerator

        directory = RunDirectory(run_directory(tree))
        declare_accelerator(tree.hardware.device)
    return guarded(
        lambda: command.load_function()(tree, *([arguments] if command.passes_on else [])),
        rank=place.rank,
        directory=directory,
        error_file=environment.get("TORCHELASTIC_ERROR_FILE"),
    )


def sweep(
    command: Command, composer: Any, request: Any, place: Placement, environment: Mapping[str, str]
) -> int:
    """One run after another in this process, each in its own directory; the worst exit code."""
    if place.world_size > 1:
        raise ValueError(
            f"-m runs one process at a time, but {place.launcher} has started {place.world_size}; "
            "start each run by itself"
        )
    if command.passes_on:
        raise ValueError(f"-m: {command.name} is for one run; give one value of each key")
    if request.problems:
        raise InvalidConfiguration(request.problems)
    trees: list[Any] = []

    def check(raw: Any) -> int:
        trees.append(numbered(composer.typed(raw), len(trees)) if command.has_run else composer.typed(raw))
        return DONE

    composer.multirun(request.overrides, check)  # all combinations are checked before the first one runs
    return max((execute(command, tree, place, environment) for tree in trees), default=DONE)


def numbered(tree: Any, number: int) -> Any:
    """The run of a sweep in a directory of its own, unless run.dir or run.name already give it one."""
    if tree.run.dir is not None:
        return tree
    return dataclasses.replace(tree, run=dataclasses.replace(tree.run, name=f"{tree.run.name}-{number}"))


if __name__ == "__main__":
    code = main()
    if is_run(sys.argv[1:]):
        ignore_signals()  # while the interpreter takes itself down
    sys.exit(code)

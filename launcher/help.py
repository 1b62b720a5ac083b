"""What the command line says about itself: commands, options, presets and the table of keys."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from conf.schema import NO_DEFAULT, Field, fields
from launcher.commands import COMMANDS, Command

USAGE = "python -m launcher COMMAND [options] key=value ..."


class OptionParser(argparse.ArgumentParser):
    """Wrong options are wrong input, reported as all others are."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        close = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.6)
        hint = f"; the nearest is {close[0]}" if close and unknown.startswith("-") else ""
        raise ValueError(f"{message}{hint}; see {self.prog} --help")


def option_parser(command: Command) -> OptionParser:
    """The options of a command, named as Hydra names them."""
    parser = OptionParser(prog=f"python -m launcher {command.name}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("-h", "--help", action="store_true", help="options, presets and keys")
    parser.add_argument(
        "-c", "--cfg", choices=("job", "hydra", "all"), help="print the configuration and stop"
    )
    parser.add_argument(
        "--resolve", action="store_true", help="with --cfg: checked, every value as it is used"
    )
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own presets, used first")
    parser.add_argument(
        "-cn", "--config-name", metavar="NAME", help="another primary file than the command's"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: key=a,b runs one after another")
    return parser


def overview() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"usage: {USAGE}", "", "commands:"]
    lines += [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values()]
    lines += ["", "python -m launcher COMMAND --help lists the options, presets and keys of a command."]
    return "\n".join(lines)


def command_help(command: Command, root: type, presets: Mapping[str, Sequence[str]]) -> str:
    """Everything that may be written after a command."""
    lines = [f"usage: python -m launcher {command.name} [options] key=value ...", "", command.summary, ""]
    options = option_parser(command).format_help().partition("options:")[2].rstrip()
    lines += [f"options:{options}", "", "presets, chosen as GROUP=NAME:"]
    lines += [f"  {group} = {' | '.join(names)}" for group, names in presets.items()]
    lines += [
        "",
        "config=FILE starts from a saved configuration (a run's config.yaml) instead of the presets",
        "",
    ]
    lines += ["keys, with their type and default:"]
    lines += [key_line(field) for field in fields(root)]
    return "\n".join(lines)


def key_line(field: Field) -> str:
    only = f" [{field.variant}]" if field.variant else ""
    return f"  {field.path}={default_text(field.default)}  ({field.type}){only}\n      {field.help}"


def default_text(default: Any) -> str:
    if default is NO_DEFAULT:
        return "VALUE"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)


def markdown_table(root: type) -> str:
    """The table of keys for the documentation: path, type, default, what a resume does, what it means."""
    lines = ["| key | type | default | on resume | meaning |", "|---|---|---|---|---|"]
    for field in fields(root):
        only = f" ({field.variant})".replace("|", "\\|") if field.variant else ""
        default = "" if field.default is NO_DEFAULT else f"`{default_text(field.default)}`"
        kind = field.type.replace("|", "\\|")
        lines.append(f"| `{field.path}`{only} | {kind} | {default} | {field.on_resume} | {field.help} |")
    return "\n".join(lines)

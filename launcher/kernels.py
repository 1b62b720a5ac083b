"""The command `kernels`: in which form each operation would be computed here, and why."""

import json
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.table import Table

from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.hardware import Hardware
from megamodel.choose import choose, this_machine
from megamodel.kernels.config import Kernels
from parallel.start import pick_device

WIDTH = 160  # columns of the table


@config
class Listed:
    """The forms of operations on this machine."""

    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", on_resume="free", help="of the training; auto: bf16 on a GPU, else fp32"
    )
    kernels: Kernels = setting(factory=Kernels, on_resume="free", help="forms of operations")
    hardware: Hardware = setting(factory=Hardware, on_resume="free", help="the machine")
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)


def listed(tree: Listed) -> int:
    """Print every operation with all its forms; what is used is marked."""
    device = pick_device(tree.hardware.device, 0)
    precision = tree.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    machine = this_machine(device)
    choices = choose(tree.kernels, machine, precision)
    if tree.format == "json":
        shown = {name: asdict(choice) for name, choice in choices.items()}
        print(json.dumps({"machine": asdict(machine), "precision": precision, "operations": shown}))
        return DONE
    made = Table("operation", "form", "what it is", "here", box=None)
    for choice in choices.values():
        for form in choice.forms:
            used = form.name == choice.form
            here = f"used: {choice.why}" if used else (form.refused or "possible")
            mark = "* " if used else "  "
            name = choice.operation if form is choice.forms[0] else ""
            made.add_row(name, mark + form.name, form.what, here)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(f"{device.type}, {precision}; force a form by kernels.OPERATION=FORM", highlight=False)
    console.print(made)
    return DONE

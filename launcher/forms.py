"""The forms of operations of a run: each rank chooses by its own machine, and all must come to the same."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from launcher.config import Plan
from launcher.health import unequal
from launcher.rundirectory import package_versions
from megamodel.choose import Choice, choose, this_machine
from parallel.exchange import Exchange, together
from parallel.mesh import Mesh

PLAIN = ("native", "none", "plain")
COMPUTING = ("torch", "triton", "deepspeed")  # packages whose version decides the numbers


@dataclass(frozen=True)
class Own:
    """What one rank would compute with."""

    rank: int
    host: str
    forms: dict[str, str]  # operation -> form
    versions: dict[str, str]


def chosen(settled: Plan, device: torch.device) -> dict[str, Choice]:
    """The form of each operation on this rank."""
    return choose(settled.config.kernels, this_machine(device), settled.precision)


def by_name(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Operation -> form, with that of what stands beside the graphs of compiled blocks."""
    return {
        name: choice.form
        if choice.beside_graphs is None
        else f"{choice.form} ({choice.beside_graphs} beside)"
        for name, choice in choices.items()
    }


def told(choices: Mapping[str, Choice]) -> str:
    """Those that are not the plain ones, for people, and what a faster form would need to be installed."""
    text = ", ".join(f"{name} {choice.form}" for name, choice in choices.items() if choice.form not in PLAIN)
    for why in dict.fromkeys(choice.lacks for choice in choices.values() if choice.lacks):
        slow = [f"{choice.form} {name}" for name, choice in choices.items() if choice.lacks == why]
        text += f"; {', '.join(slow)}: {why}"
    return text


def check_same(settled: Plan, mesh: Mesh, exchange: Exchange) -> None:
    """ValueError on every rank when machines would compute in different ways.

    What several ranks hold alike (activations between tp regions, norm weights) stays alike only while all
    compute it in the same way.
    """
    choices = together(exchange, lambda: chosen(settled, mesh.device))
    packages = package_versions()
    versions = {name: packages[name] for name in COMPUTING if name in packages}
    own = Own(mesh.world.rank, socket.gethostname(), by_name(choices), versions)
    problem = difference([Own(**values) for values in exchange.everyone(asdict(own))])
    if problem:
        raise ValueError(problem)


def difference(everyone: Sequence[Own]) -> str | None:
    """What is not the same on all ranks, and the way out; None when all is."""
    versions = [what for _, what in unequal(everyone, [one.versions for one in everyone])]
    forms = dict(unequal(everyone, [one.forms for one in everyone]))
    if not versions and not forms:
        return None
    ways = ["install the same environment on all nodes"]
    if forms and not versions:
        settings = " ".join(f"kernels.{name}=..." for name in forms)
        ways.append(f"or name one form for all ({settings}); `python -m launcher kernels` says what each has")
    lines = "".join(f"\n  {what}" for what in (*versions, *forms.values()))
    return (
        f"the ranks would compute in different ways, and their copies drift apart:{lines}\n{', '.join(ways)}"
    )

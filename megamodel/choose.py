"""The one place that chooses in which form an operation is computed, and why."""

import importlib
import importlib.util
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn

from megamodel.attend import Attend
from megamodel.attention import GroupedAttention
from megamodel.block import Block
from megamodel.feedforward import FeedForward
from megamodel.kernels.compiler import problem as compiler_problem
from megamodel.kernels.compiler import triton_problem
from megamodel.kernels.config import Kernels
from megamodel.kernels.head import Chunked
from megamodel.kernels.products import widened
from megamodel.moe import Experts, MixtureOfExperts
from megamodel.norm import Normalise
from megamodel.position import Rope
from parallel.product import Product
from parallel.tensor import ColumnLinear, InnerLinear, RowLinear

Precision = Literal["fp32", "bf16"]
POINTWISE = {
    "norm": "RMSNorm and LayerNorm, with the sum before them",
    "rotate": "rotation of queries and keys, with QK-norm before it",
    "gate": "activations and gates",
}
STAND_ALONE = ("norm", "gate")  # are outside of compiled blocks too: the last norm, the experts' gates
LINEAR = (ColumnLinear, InnerLinear, RowLinear, Experts)


@dataclass(frozen=True)
class Machine:
    """What the choice depends on. compiler: what is wrong with the one that torch.compile needs, or None;
    float8: why 8-bit products are impossible, or None."""

    cuda: bool
    matrix_units: bool  # of a CPU, for 16-bit numbers (AMX)
    triton: str | None  # what is wrong with it, or None
    compiler: str | None
    float8: str | None = "8-bit products need a GPU of compute capability 8.9 or newer"


@dataclass(frozen=True)
class Form:
    """One form of an operation. refused: why it cannot be used here, None where it can."""

    name: str
    what: str
    refused: str | None = None


@dataclass(frozen=True)
class Choice:
    """An operation, the form that is used, why, and all forms there are. beside_graphs: the form of what no
    graph of torch.compile holds though blocks are compiled. lacks: what software a faster form would need."""

    operation: str
    form: str
    why: str
    forms: tuple[Form, ...]
    beside_graphs: str | None = None
    lacks: str | None = None


def this_machine(device: torch.device) -> Machine:
    """What there is on this machine."""
    cuda = device.type == "cuda"
    return Machine(
        cuda=cuda,
        matrix_units=not cuda and bool(torch.cpu._is_amx_tile_supported()),
        triton=triton_problem(),
        compiler=compiler_problem(cuda=cuda),
        float8=_float8_problem(device),
    )


def _float8_problem(device: torch.device) -> str | None:
    if device.type != "cuda":
        return Machine.float8
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9) and torch.version.hip is None:
        return f"{Machine.float8}; this one has {capability[0]}.{capability[1]}"
    found = importlib.util.find_spec("torchao") is not None
    return None if found else "torchao is not installed; pip install 'megamodel[float8]'"


def choose(settings: Kernels, machine: Machine, precision: Precision) -> dict[str, Choice]:
    """The form of each operation by its name. ValueError where a forced one is impossible here."""
    compiles = settings.compile == "block"
    found = (
        _products(machine, precision),
        _head(),
        _entropy(settings, machine),
        *(_kernel(name, what, machine, compiles) for name, what in POINTWISE.items()),
        _attention(machine, precision, compiles),
        _experts(machine, precision),
        _compile(machine),
    )
    return {c.operation: _forced(c, getattr(settings, c.operation)) for c in found}


def _forced(choice: Choice, wanted: str) -> Choice:
    if wanted == "auto":
        return choice
    if wanted == choice.form:
        return replace(choice, beside_graphs=None, lacks=None)  # what is named holds everywhere
    form = next(form for form in choice.forms if form.name == wanted)
    if form.refused is not None:
        usable = ", ".join(form.name for form in choice.forms if form.refused is None)
        raise ValueError(
            f"kernels.{choice.operation}={wanted} is not possible here: {form.refused}; use auto or {usable}"
        )
    return Choice(choice.operation, wanted, "as kernels." + choice.operation + " says", choice.forms)


def _products(machine: Machine, precision: Precision) -> Choice:
    only = None if precision == "bf16" and not machine.cuda else "fp32 on a GPU is no faster than 16 bit"
    if precision == "fp32":
        only = "the numbers are fp32 already"
    float8 = machine.float8 if precision == "bf16" else "8-bit products are for train.precision=bf16"
    forms = (
        Form("native", "one product in the numbers' own type"),
        Form("widened", "16-bit operands in fp32, the result rounded once", only),
        Form("float8", "8-bit operands, scaled at each use, through torchao; other numbers", float8),
    )
    if only is None and not machine.matrix_units:
        why = "a CPU without units for 16-bit matrices multiplies fp32 numbers faster"
        return Choice("products", "widened", why, forms)
    why = "the device multiplies them fastest" if precision == "bf16" else "there is nothing to widen"
    return Choice("products", "native", why, forms)


def _kernel(operation: str, what: str, machine: Machine, compiles: bool) -> Choice:
    refused = machine.triton if machine.cuda else "our kernels are for a GPU"
    forms = (
        Form("plain", f"{what}: the definition, by torch"),
        Form("triton", "one kernel forward and one backward, nothing kept but its inputs", refused),
    )
    if compiles:
        why = "torch.compile makes one kernel of it and what stands around it"
        beside = "plain" if refused else "triton"
        return Choice(operation, "plain", why, forms, beside if operation in STAND_ALONE else None)
    if refused:
        return Choice(operation, "plain", refused, forms, lacks=refused if machine.cuda else None)
    return Choice(operation, "triton", "one pass over the memory instead of several", forms)


def _entropy(settings: Kernels, machine: Machine) -> Choice:
    choice = _kernel("entropy", "loss and gradient of a chunk of logits", machine, False)
    if settings.head != "whole":
        return choice
    # Nobody's machine may matter for what is not computed: all ranks must come to the same.
    return Choice("entropy", "plain", "kernels.head=whole makes no chunks of logits", choice.forms)


def _head() -> Choice:
    forms = (
        Form("whole", "the definition: all logits, then the loss"),
        Form("chunked", "some tokens at a time; both gradients at once, no logits kept"),
    )
    return Choice("head", "chunked", "least memory, and a product less than making logits twice", forms)


def _attention(machine: Machine, precision: Precision, compiles: bool) -> Choice:
    refused = machine.triton if machine.cuda else "torch has no backward pass of it on a CPU"
    forms = (
        Form("whole", "the definition: all scores in memory"),
        Form("sdpa", "torch's own, with a mask of S x S for windows and documents"),
        Form(
            "blocked", "torch's own; windows by blocks of queries, documents one by one; memory linear in S"
        ),
        Form("flex", "flex_attention, compiled: windows, documents, soft caps, sinks; linear in S", refused),
        Form(
            "rebuilt",
            "as blocked; the backward pass of plain rows makes their scores again, in compiled products",
            _not_rebuilt(machine, precision, compiles),
        ),
    )
    usable = {form.name for form in forms if form.refused is None}
    if "flex" in usable:
        why = (
            "blocks that see nothing are skipped; plain causal rows still go through torch's flash attention"
        )
        return Choice("attention", "flex", why, forms)
    if machine.cuda:
        return Choice("attention", "blocked", f"flex needs triton: {refused}", forms, lacks=refused)
    if "rebuilt" in usable:
        why = "torch's own backward pass of plain rows in 16 bit takes twice as long"
        return Choice("attention", "rebuilt", why, forms)
    why = "nothing is computed between documents or beyond a window"
    return Choice("attention", "blocked", why, forms)


def _not_rebuilt(machine: Machine, precision: Precision, compiles: bool) -> str | None:
    """Why torch's own backward pass of attention is no slower here; None where it is."""
    if machine.cuda:
        return "torch's own backward pass is faster on a GPU"
    if precision != "bf16" or not machine.matrix_units:
        return "it is for products of 16-bit numbers, on a CPU that has units for them"
    return None if compiles else "it is faster only in compiled blocks: kernels.compile=block"


def _experts(machine: Machine, precision: Precision) -> Choice:
    refused = None if machine.cuda and precision == "bf16" else "torch's grouped products need bf16 on a GPU"
    forms = (
        Form("loop", "the definition: each expert looks for its tokens"),
        Form("sorted", "one gather by expert, a product for each, one sum"),
        Form("grouped", "one gather by expert, one grouped product, one sum", refused),
    )
    form = "sorted" if refused else "grouped"
    return Choice("experts", form, "one pass over the tokens instead of one for each expert", forms)


def _compile(machine: Machine) -> Choice:
    forms = (
        Form("none", "operations one by one"),
        Form("block", "torch.compile of each block: what is pointwise in one pass", machine.compiler),
    )
    why = "kernels.compile is none; block is faster after some seconds at the start"
    return Choice("compile", "none", why, forms)


def chunked(choices: dict[str, Choice], settings: Kernels) -> Chunked | None:
    """How the head works with these choices; None: all logits at once."""
    if choices["head"].form == "whole":
        return None
    kernels = _triton("entropy") if choices["entropy"].form == "triton" else None
    return Chunked(settings.workspace_bytes, choices["products"].form == "widened", kernels)


def equip(module: nn.Module, choices: dict[str, Choice]) -> None:
    """Give the parts of a model the forms that were chosen."""
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    inside = {id(part) for block in blocks for part in block.modules()}
    norm = choices["norm"]
    for part in module.modules():
        if isinstance(part, LINEAR):
            _equip_product(part, choices["products"].form)
        if isinstance(part, Attend):
            part.backend = choices["attention"].form  # type: ignore[assignment]
            part.widens = choices["products"].form == "widened"
        if isinstance(part, Experts):
            fits = part.fits_groups or choices["experts"].form != "grouped"
            part.form = choices["experts"].form if fits else "sorted"  # type: ignore[assignment]
        if isinstance(part, Block) and choices["compile"].form == "block":
            part.compile_block()
        if isinstance(part, Normalise):
            form = norm.form if id(part) in inside else norm.beside_graphs or norm.form
            part.form = _triton("norm") if form == "triton" else None
        if choices["rotate"].form == "triton":
            _equip_rotation(part)
        if isinstance(part, (FeedForward, Experts)) and choices["gate"].form == "triton":
            _equip_gate(part)
        if isinstance(part, MixtureOfExperts) and choices["gate"].beside_graphs == "triton":
            for inner in filter(None, (part.experts, part.shared)):
                _equip_gate(inner)


@lru_cache
def _product(form: str) -> Product:
    if form == "widened":
        return widened
    return importlib.import_module("megamodel.kernels.float8").Float8Product()


def _equip_product(part: ColumnLinear | InnerLinear | RowLinear | Experts, form: str) -> None:
    if isinstance(part, ColumnLinear):
        part.wide = {"native": False, "widened": True}.get(form)
    # Groups of any number of tokens are no 8-bit products.
    if form != "native" and not (isinstance(part, Experts) and form == "float8"):
        part.product = _product(form)


def _equip_gate(part: FeedForward | Experts) -> None:
    form = part.settings if isinstance(part, FeedForward) else part.shape
    kernels, how = _triton("gate"), {"activation": form.activation}
    part.activation = partial(kernels.activate, **how)
    part.gate = partial(kernels.gate, **how, clamp=form.clamp, alpha=form.alpha)


def _equip_rotation(part: nn.Module) -> None:
    kernels = _triton("rotate")
    if isinstance(part, Rope):
        part.rotation = kernels.rotate
    if isinstance(part, GroupedAttention) and part.can_norm_and_rotate:
        part.norm_rotate = kernels.norm_rotate


def _triton(operation: str) -> Any:
    """The module with our kernels of an operation; it imports triton, which not every machine has."""
    return importlib.import_module(f"megamodel.kernels.triton_{operation}")

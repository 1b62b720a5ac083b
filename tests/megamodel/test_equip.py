"""A form that was chosen is in every part of the model that has forms, and is what computes there."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conf.typed import parse
from megamodel import block as block_module
from megamodel.attend import Attend
from megamodel.block import Block
from megamodel.choose import LINEAR, Choice, Machine, choose, chunked, equip
from megamodel.config import Model
from megamodel.kernels.config import Kernels
from megamodel.kernels.products import widened
from megamodel.loss import Loss
from megamodel.model import Transformer, layers
from megamodel.moe import Experts
from parallel.tensor import ColumnLinear, TensorParallel

CPU = Machine(cuda=False, matrix_units=True, triton="triton is not installed", compiler=None)
VOCABULARY, LENGTH, LAYERS = 8192, 80, 3
# A dense layer, and two with routed and shared experts; half of the attentions have a window.
SETTINGS = parse(
    Model,
    {
        "vocab_size": VOCABULARY,
        "d_model": 24,
        "n_layers": LAYERS,
        "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8},
        "feedforward": {"d_ff": 48},
        "experts": {
            "kind": "routed",
            "n_experts": 4,
            "top_k": 2,
            "d_ff": 24,
            "shared_d_ff": 16,
            "dense_layers": [0],
        },
        "kinds": {"local": {"window": 8}, "global": {}},
        "pattern": ["local", "global"],
    },
)


@pytest.fixture(autouse=True)
def _blocks_shorter_than_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamodel.attend.QUERIES", 16)


class Seen(TorchDispatchMode):
    """Of every operation: its name, the numbers of its operands, and the shapes of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.multiplied: set[torch.dtype] = set()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if name in ("mm", "addmm", "bmm"):
            self.multiplied |= {x.dtype for x in args if isinstance(x, Tensor)}
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                self.shapes.add(tuple(x.shape))
        return made


def chosen(precision: Any = "fp32", **forms: Any) -> tuple[dict[str, Choice], Kernels]:
    settings = parse(Kernels, forms)
    choices = choose(settings, CPU, precision)
    assert {name: choices[name].form for name in forms if name in choices} == {
        name: form for name, form in forms.items() if name in choices
    }
    return choices, settings


def whole(choices: dict[str, Choice]) -> nn.Module:
    return Transformer(SETTINGS, equip=lambda part: equip(part, choices))


def staged(choices: dict[str, Choice]) -> nn.Module:
    """As the engine builds it: layer by layer."""
    parts = layers(
        SETTINGS,
        seed=0,
        documents=False,
        parallel=TensorParallel(),
        equip=lambda part: equip(part, choices),
    )
    return nn.ModuleList(part.build() for part in parts)


BUILDS = pytest.mark.parametrize("build", [whole, staged])
Build = Callable[[dict[str, Choice]], Any]


def parts(model: nn.Module, kind: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, kind)]


def run(model: Transformer, how: Kernels | None = None, choices: dict[str, Choice] | None = None) -> Seen:
    """One forward and one backward pass, with the loss where there is a form of it."""
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with Seen() as seen:
        made = model.project(tokens)
        if how is None or choices is None:
            made.x.sum().backward()
        else:
            loss = Loss(z_weight=0.0, chunked=chunked(choices, how))
            loss(made, (tokens, torch.tensor(1.0))).backward()
    return seen


@BUILDS
@pytest.mark.parametrize("form", ["whole", "sdpa", "blocked"])
def test_every_attention_has_the_form(form: str, build: Build) -> None:
    model = build(chosen(attention=form)[0])
    assert [part.backend for part in parts(model, Attend)] == [form] * LAYERS


@pytest.mark.parametrize(
    ("form", "scores", "mask"), [("whole", True, True), ("sdpa", False, True), ("blocked", False, False)]
)
def test_what_attention_makes_of_length_squared(form: str, scores: bool, mask: bool) -> None:
    """All scores of all heads; only the mask of a window; nothing."""
    shapes = run(whole(chosen(attention=form)[0])).shapes
    squares = {shape for shape in shapes if len(shape) == 4 and shape[2:] == (LENGTH, LENGTH)}
    assert any(shape[1] == 4 for shape in squares) is scores
    assert bool(squares) is mask


@BUILDS
@pytest.mark.parametrize("form", ["loop", "sorted"])
def test_all_experts_have_the_form(form: str, build: Build) -> None:
    model = build(chosen(experts=form)[0])
    assert [part.form for part in parts(model, Experts)] == [form] * (LAYERS - 1)


def test_how_experts_find_their_tokens() -> None:
    """In the loop each of 4 looks for them, in 2 layers; sorted, there is one order for each layer."""
    searches = {
        form: [run(whole(chosen(experts=form)[0])).counts.get(name, 0) for name in ("nonzero", "sort")]
        for form in ("loop", "sorted")
    }
    assert searches == {"loop": [8, 0], "sorted": [0, 2]}


@BUILDS
@pytest.mark.parametrize(("form", "product"), [("native", F.linear), ("widened", widened)])
def test_every_product_has_the_form(form: str, product: object, build: Build) -> None:
    model = build(chosen("bf16", products=form)[0])
    found = parts(model, LINEAR)
    # q, k, v; output; dense: inner, down; two with router, experts, shared inner, shared down.
    assert len(found) == 2 * LAYERS + 2 + 2 * 4
    assert all(part.product is product for part in found)
    assert {part.wide for part in parts(model, ColumnLinear)} == {form == "widened"}
    assert [part.widens for part in parts(model, Attend)] == [form == "widened"] * LAYERS


@pytest.mark.parametrize(("form", "dtype"), [("native", torch.bfloat16), ("widened", torch.float32)])
def test_in_which_numbers_is_multiplied(form: str, dtype: torch.dtype) -> None:
    """Of a model in bf16 without what is fp32 in every form: a router, explicit scores."""
    choices, _ = chosen("bf16", products=form, attention="sdpa")
    dense = parse(
        Model,
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "n_layers": 2,
            "attention": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8},
            "feedforward": {"d_ff": 48},
        },
    )
    model = Transformer(dense, equip=lambda part: equip(part, choices)).bfloat16()
    assert run(model).multiplied == {dtype}


def rows_of_logits(seen: Seen) -> int:
    """Of the largest tensor of logits that was made."""
    return max(math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == VOCABULARY)


def test_whole_head_or_in_chunks() -> None:
    """1 MiB has room for 32 tokens' logits; the matrix has 24 rows when it lies on its side."""
    choices, forms = chosen(head="whole")
    assert chunked(choices, forms) is None
    assert rows_of_logits(run(whole(choices), forms, choices)) == LENGTH
    choices, forms = chosen(head="chunked", workspace_bytes=1 << 20)
    how = chunked(choices, forms)
    assert how is not None and how.workspace_bytes == 1 << 20 and not how.wide and how.operations is None
    assert rows_of_logits(run(whole(choices), forms, choices)) == 32


@pytest.mark.parametrize(("form", "wide"), [("native", False), ("widened", True)])
def test_the_head_has_the_products_form_too(form: str, wide: bool) -> None:
    how = chunked(*chosen("bf16", products=form))
    assert how is not None and how.wide is wide and how.workspace_bytes is None


@BUILDS
def test_every_block_is_compiled_where_blocks_are(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training it runs what torch.compile made of it, in evaluation itself."""
    runs: list[Block] = []

    def compiled(function: Any) -> Any:
        def noted(*inputs: Any) -> Any:
            runs.append(function.__self__)
            return function(*inputs)

        return noted

    monkeypatch.setattr(block_module, "compiled", compiled)
    plain, model = build(chosen(compile="none")[0]), build(chosen(compile="block")[0])
    stream = (torch.randn(1, LENGTH, 24), torch.arange(LENGTH)[None], torch.arange(1))
    for block in [*parts(plain, Block), *parts(model, Block)]:
        block(stream)
        block.eval()(stream)
    assert runs == parts(model, Block) and len(runs) == LAYERS

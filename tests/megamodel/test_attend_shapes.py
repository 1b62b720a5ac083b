"""Attention on a CPU in every form against the definition in fp64: awkward shapes, strides and combinations.

B batch, S sequence length, H query heads, K key/value heads, E head width, V value width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamodel import attend
from megamodel.attend import Attend, Seen
from megamodel.dropout import Clock, KeyedDropout
from tests.megamodel.test_attend import POSITIONS, Largest, expected, inputs

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
BACKENDS = pytest.mark.parametrize("backend", ["whole", "sdpa", "blocked"])
FIRST_HEAD = 4  # of the query heads, as on a later tp rank
ALL, WINDOW = Seen(), Seen(window=9)


@dataclass(frozen=True)
class Form:
    """A case: sizes and what attention is asked for. dropout: probability; sinks and bias are leaves too."""

    length: int = 50
    heads: int = 6
    keys: int = 3
    width: int = 20
    value_width: int = 20
    rows: int = 2
    seen: Seen = ALL
    documents: bool = False
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    dropout: float = 0.0

    @property
    def positions(self) -> Tensor:
        """(B, S). Documents of 1, 7, 20 and whatever remains, from another place in each row."""
        rows = []
        for row in range(self.rows):
            ends = [end for end in (1 + row, 8, 28) if end < self.length] if self.documents else []
            starts = [0, *ends]
            parts = [torch.arange(b - a) for a, b in zip(starts, [*ends, self.length], strict=True)]
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def module(self, backend: Any) -> Attend:
        made = Attend(
            scale=self.width**-0.5,
            seen=self.seen,
            documents=self.documents,
            dropout=KeyedDropout(self.dropout, seed=5, layer=2, site="attention", clock=Clock()),
            first_head=FIRST_HEAD,
            softcap=self.softcap,
        )
        made.backend = backend
        made.dropout.clock.set(3)
        return made

    def tensors(self) -> dict[str, Tensor]:
        """In fp64: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V), sinks (H), bias (1, H, S, S)."""
        generator = torch.Generator().manual_seed(self.length + self.width)
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.rows, self.length, self.heads, self.width),
            "k": (self.rows, self.length, self.keys, self.width),
            "v": (self.rows, self.length, self.keys, self.value_width),
        }
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        if self.bias:
            shapes["bias"] = (1, self.heads, self.length, self.length)
        return {name: torch.randn(*shape, generator=generator, dtype=FP64) for name, shape in shapes.items()}

    def computed(self, backend: Any, tensors: dict[str, Tensor], *, widens: bool = False) -> Tensor:
        module = self.module(backend)
        module.widens = widens
        q, k, v = (tensors[name] for name in "qkv")
        more = {name: tensors[name] for name in ("sinks", "bias") if name in tensors}
        return module(q, k, v, self.positions, torch.arange(self.rows) + 11, **more)

    def visible(self) -> Tensor:
        """(B, S, S) by the words of the specification."""
        positions, place = self.positions, torch.arange(self.length)
        start = place - positions if self.documents else torch.zeros_like(positions)
        i, j = place[None, :, None], place[None, None, :]
        mask = (j <= i) & (start[:, :, None] == start[:, None, :])
        if self.seen.window is not None:
            mask = mask & (i - j < self.seen.window)
        if self.seen.sparse == "strided":
            assert not self.documents  # with which the pattern starts anew
            mask = mask & ((i - j < self.seen.stride) | ((i - j) % self.seen.stride == 0))
        return mask

    def kept(self) -> Tensor:
        """(B, H, S, S): which probabilities dropout leaves, by the key of each (head, query, key)."""
        head = torch.arange(FIRST_HEAD, FIRST_HEAD + self.heads)[:, None, None]
        place = torch.arange(self.length)
        places = head * 2**42 + place[:, None] * 2**21 + place
        return self.module("whole").dropout.keep(torch.arange(self.rows) + 11, places, 3)

    def definition(self, tensors: dict[str, Tensor]) -> Tensor:
        group = self.heads // self.keys
        k, v = (tensors[name].repeat_interleave(group, dim=2) for name in "kv")
        scores = torch.einsum("bihe,bjhe->bhij", tensors["q"], k) / self.width**0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias:
            scores = scores + tensors["bias"]
        weights = scores.exp() * self.visible()[:, None]
        total = weights.sum(-1, keepdim=True)
        if self.sinks:
            total = total + tensors["sinks"].exp()[None, :, None, None]
        weights = weights / total
        if self.dropout:
            weights = weights * self.kept() / (1 - self.dropout)
        return torch.einsum("bhij,bjhv->bihv", weights, v)


def tolerance(dtype: torch.dtype, *, widens: bool = False) -> float:
    """Of the largest element. bf16, widened: 2^-8 as results are rounded, and as much again for sums of such
    results (a sink gets one from each block). Not widened, scores, probabilities and their gradients are
    rounded too: a score of 2 to 4 by up to 2^-7, which is then the relative error of its probability."""
    return {FP64: 1e-12, FP32: 1e-5, BF16: 2**-7 if widens else 2**-6}[dtype]


def off(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    error = (found.detach().double() - wanted.detach()).abs().max()
    return error.item() / max(wanted.abs().max().item(), 0.1)


Views = dict[str, Tensor]
Layout = Callable[[Form, dict[str, Tensor]], tuple[list[Tensor], Callable[[list[Tensor]], Views]]]


def as_they_are(form: Form, given: dict[str, Tensor]) -> tuple[list[Tensor], Callable[[list[Tensor]], Views]]:
    """Leaves, and what makes of them the tensors that attention is given."""
    return list(given.values()), lambda leaves: dict(zip(given, leaves, strict=True))


def agree(
    form: Form,
    backend: Any,
    dtype: torch.dtype = FP64,
    *,
    widens: bool = False,
    layout: Layout = as_they_are,
    upstream: Callable[[Tensor], Tensor] = torch.randn_like,
    frozen: tuple[int, ...] = (),
) -> None:
    """Values and the gradients of all leaves that are not frozen, whose numbers are of `dtype`."""
    torch.manual_seed(9)
    leaves, views = layout(form, form.tensors())
    ours = [x.to(dtype).requires_grad_(i not in frozen) for i, x in enumerate(leaves)]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in ours]
    got, want = form.computed(backend, views(ours), widens=widens), form.definition(views(exact))
    assert got.dtype == dtype
    limit = tolerance(dtype, widens=widens)
    assert off(got, want) < limit
    given = upstream(got.detach())
    got.backward(given)
    want.backward(given.double())
    for number, (a, b) in enumerate(zip(ours, exact, strict=True)):
        assert (a.grad is None) is (number in frozen)
        if a.grad is not None and b.grad is not None:
            assert a.grad.dtype == dtype
            assert off(a.grad, b.grad) < limit, number


@pytest.fixture(autouse=True)
def _blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "QUERIES", 16)


FORMS = {
    "causal": Form(),
    "window": Form(seen=WINDOW),
    "documents": Form(documents=True),
    "soft cap": Form(softcap=0.7),
    "documents, sinks": Form(documents=True, sinks=True),
    "bias, soft cap": Form(bias=True, softcap=0.9),
    "documents, window, soft cap": Form(documents=True, seen=WINDOW, softcap=0.9),
    "documents, window, sinks, bias": Form(documents=True, seen=WINDOW, sinks=True, bias=True),
    "strided, sinks": Form(seen=Seen(sparse="strided", stride=7), sinks=True),
}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def test_the_definition_is_the_one_that_goes_query_by_query() -> None:
    case = {"documents": True, "seen": WINDOW, "softcap": 0.9, "sinks": True, "bias": True}
    given = inputs(3, sinks=True, bias=True)
    tensors = dict(zip(("q", "k", "v", "sinks", "bias"), given, strict=True))

    class Same(Form):
        positions = POSITIONS

    found = Same(documents=True, seen=WINDOW, softcap=0.9, sinks=True, bias=True).definition(tensors)
    torch.testing.assert_close(found, expected(case, given), rtol=1e-12, atol=1e-12)


@BACKENDS
@EVERY
@pytest.mark.parametrize("length", [1, 3, 17, 127])
def test_short_and_odd_lengths(length: int, form: Form, backend: str) -> None:
    agree(replace(form, length=length), backend)


@BACKENDS
@EVERY
@pytest.mark.parametrize(("width", "value_width"), [(96, 96), (20, 28), (96, 32)])
def test_widths_of_heads_and_of_values(width: int, value_width: int, form: Form, backend: str) -> None:
    agree(replace(form, width=width, value_width=value_width), backend, FP32)


@BACKENDS
@pytest.mark.parametrize(
    "form",
    [
        Form(),
        Form(seen=Seen(window=300)),
        Form(documents=True),
        Form(sinks=True, softcap=2.0),
        Form(bias=True),
    ],
    ids=["causal", "window", "documents", "sinks, soft cap", "bias"],
)
def test_a_row_of_five_blocks(form: Form, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "QUERIES", 256)
    agree(replace(form, length=1025, rows=1, heads=2, keys=1), backend, FP32)


def in_one(form: Form, given: dict[str, Tensor]) -> Any:
    """Queries, keys and values are slices of what one product gives."""
    parts = [given.pop(name).flatten(2) for name in "qkv"]
    sizes, heads = [part.shape[-1] for part in parts], (form.heads, form.keys, form.keys)

    def views(leaves: list[Tensor]) -> Views:
        slices = leaves[0].split(sizes, dim=-1)
        made = [x.unflatten(-1, (h, -1)) for x, h in zip(slices, heads, strict=True)]
        return dict(zip([*"qkv", *given], [*made, *leaves[1:]], strict=True))

    return [torch.cat(parts, dim=-1), *given.values()], views


def heads_first(form: Form, given: dict[str, Tensor]) -> Any:
    """(B, H, S, E) in memory."""
    leaves = [x.transpose(1, 2).contiguous() if name in "qkv" else x for name, x in given.items()]
    return leaves, lambda leaves: {
        name: x.transpose(1, 2) if name in "qkv" else x for name, x in zip(given, leaves, strict=True)
    }


def widths_first(form: Form, given: dict[str, Tensor]) -> Any:
    """(E, H, S, B) in memory: neighbours are rows."""
    leaves = [x.permute(3, 2, 1, 0).contiguous() if name in "qkv" else x for name, x in given.items()]
    return leaves, lambda leaves: {
        name: x.permute(3, 2, 1, 0) if name in "qkv" else x for name, x in zip(given, leaves, strict=True)
    }


def with_gaps(form: Form, given: dict[str, Tensor]) -> Any:
    """Every second token and some of the heads and columns of something larger, which holds NaN elsewhere."""
    inside = (slice(None), slice(1, None, 2), slice(1, -1), slice(3, -2))

    def around(x: Tensor) -> Tensor:
        rows, length, heads, width = x.shape
        large = torch.full((rows, 2 * length + 1, heads + 2, width + 5), torch.nan, dtype=x.dtype)
        large[inside] = x
        return large

    leaves = [around(x) if name in "qkv" else x for name, x in given.items()]
    return leaves, lambda leaves: {
        name: x[inside] if name in "qkv" else x for name, x in zip(given, leaves, strict=True)
    }


def repeated(form: Form, given: dict[str, Tensor]) -> Any:
    """One key and value head, and one row of queries, that stand for all: stride 0."""
    heads, rows = form.keys, form.rows
    leaves = [given[name][:1] if name == "q" else given[name][:, :, :1] for name in "qkv"]
    return [*leaves, *list(given.values())[3:]], lambda leaves: {
        "q": leaves[0].expand(rows, -1, -1, -1),
        "k": leaves[1].expand(-1, -1, heads, -1),
        "v": leaves[2].expand(-1, -1, heads, -1),
        **dict(zip(list(given)[3:], leaves[3:], strict=True)),
    }


@BACKENDS
@EVERY
@pytest.mark.parametrize("layout", [in_one, heads_first, widths_first, with_gaps, repeated])
def test_inputs_that_are_not_contiguous(layout: Layout, form: Form, backend: str) -> None:
    leaves, views = layout(form, form.tensors())
    made = views(leaves)
    assert not any(made[name].is_contiguous() for name in "qkv")
    agree(form, backend, FP32, layout=layout)


UPSTREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "one number": lambda x: torch.randn(1, 1, 1, 1, dtype=x.dtype).expand_as(x),
    "one for all heads": lambda x: torch.randn_like(x[:, :, :1]).expand_as(x),
    "one row": lambda x: torch.randn_like(x[:1]).expand_as(x),
    "heads first": lambda x: torch.randn_like(x.transpose(1, 2).contiguous()).transpose(1, 2),
    "widths first": lambda x: torch.randn_like(x.permute(3, 1, 2, 0).contiguous()).permute(3, 1, 2, 0),
}


@BACKENDS
@EVERY
@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_gradients_that_come_expanded_or_transposed(upstream: str, form: Form, backend: str) -> None:
    given = UPSTREAMS[upstream](torch.empty(form.rows, form.length, form.heads, form.value_width))
    assert not given.is_contiguous()
    agree(form, backend, FP32, upstream=UPSTREAMS[upstream])


@BACKENDS
@EVERY
@pytest.mark.parametrize(
    "frozen", [(1, 2), (0,), (0, 1)], ids=["keys and values", "queries", "all but values"]
)
def test_what_needs_no_gradient_gets_none(frozen: tuple[int, ...], form: Form, backend: str) -> None:
    agree(form, backend, FP32, frozen=frozen)


@BACKENDS
@EVERY
def test_without_gradients(form: Form, backend: str) -> None:
    given = {name: x.requires_grad_() for name, x in form.tensors().items()}
    with torch.no_grad():
        got = form.computed(backend, given)
        assert not got.requires_grad and off(got, form.definition(given)) < tolerance(FP64)


@BACKENDS
@EVERY
@pytest.mark.parametrize("widens", [False, True])
def test_in_bf16(widens: bool, form: Form, backend: str) -> None:
    agree(form, backend, BF16, widens=widens)


@BACKENDS
@EVERY
def test_dropout_has_the_keyed_masks(form: Form, backend: str) -> None:
    form = replace(form, dropout=0.3)
    kept = form.kept().float().mean().item()
    assert kept == pytest.approx(0.7, abs=0.02)
    agree(form, backend)
    without = replace(form, dropout=0.0)
    given = form.tensors()
    module = form.module(backend).eval()
    more = {name: given[name] for name in ("sinks", "bias") if name in given}
    rows = torch.arange(form.rows) + 11
    found = module(given["q"], given["k"], given["v"], form.positions, rows, **more)
    assert off(found, without.definition(given)) < tolerance(FP64)


def memory(form: Form, backend: str) -> tuple[int, int]:
    """(elements of the largest tensor of both passes, bytes that the forward pass keeps for the other)."""
    given = {name: x.float().requires_grad_() for name, x in form.tensors().items()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = form.computed(backend, given)
        saved = sum(x.untyped_storage().nbytes() for x in kept.values())
        out.sum().backward()
    return largest.elements, saved


LINEAR = {
    "narrow values": Form(value_width=10),
    "wide values, documents": Form(value_width=40, documents=True),
    "narrow values, window": Form(value_width=10, seen=WINDOW),
    "window": Form(seen=WINDOW),
    "documents": Form(documents=True),
    "documents, window": Form(documents=True, seen=WINDOW),
    "soft cap": Form(softcap=5.0),
    "sinks": Form(sinks=True),
    "dropout": Form(dropout=0.1),
    "all but a window": Form(softcap=5.0, sinks=True, dropout=0.1, documents=True),
    "all": Form(softcap=5.0, sinks=True, dropout=0.1, documents=True, seen=WINDOW),
}


@pytest.mark.parametrize("form", LINEAR.values(), ids=LINEAR)
def test_memory_is_linear_in_the_length(form: Form) -> None:
    """Twice the tokens need twice of it, within a tenth; with all scores in memory four times, as a check."""
    short, long = (
        replace(form, rows=1, heads=4, keys=2, width=8, value_width=form.value_width * 8 // 20, length=n)
        for n in (256, 512)
    )
    for less, more in zip(memory(short, "blocked"), memory(long, "blocked"), strict=True):
        assert more <= 2.1 * less
    for less, more in zip(memory(short, "whole"), memory(long, "whole"), strict=True):
        assert more >= 3.5 * less


class Softmaxes(TorchDispatchMode):
    """The numbers that softmax is taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "softmax" in function.overloadpacket.__name__:
            self.dtypes.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@EVERY
def test_probabilities_of_bf16_are_made_in_fp32(form: Form) -> None:
    """Forward and backward; the tolerance of bf16 is too wide to show it."""
    given = {name: x.bfloat16().requires_grad_() for name, x in form.tensors().items()}
    with Softmaxes() as seen:
        form.computed("whole", given).sum().backward()
    assert seen.dtypes == {FP32}

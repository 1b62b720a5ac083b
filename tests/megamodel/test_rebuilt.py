"""Attention whose backward pass makes the scores again, against the definition in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megamodel.attend import Attend, Seen
from megamodel.dropout import Clock, KeyedDropout
from megamodel.kernels import compiler
from megamodel.kernels.rebuilt import LONGEST, attention, fits
from tests import layouts

SCALE = 0.3
# bf16: scores, weights and their gradients are each rounded to 2^-9, and summed over the keys.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-5}

LAYOUTS = {**layouts.LAYOUTS, "by place": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (SCALE * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    length: int,
    width: int,
    dtype: torch.dtype,
    *,
    layout: str = "contiguous",
    heads: tuple[int, int] = (4, 2),
    function: Callable[..., Tensor] = attention,
) -> None:
    arranged = LAYOUTS["contiguous" if layout == "expanded" else layout]
    shapes = [(2, count, length, width) for count in (heads[0], heads[1], heads[1])]
    made = [random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    inputs = [arranged(x).detach().requires_grad_() for x in made]
    upstream = LAYOUTS[layout](random(*shapes[0], seed=9, dtype=dtype))
    out = function(*inputs, SCALE)
    found = [out, *torch.autograd.grad(out, inputs, upstream)]
    exact = [x.double().requires_grad_() for x in made]
    wanted_out = definition(*exact)
    wanted = [wanted_out, *torch.autograd.grad(wanted_out, exact, upstream.double())]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        size = max(float(want.detach().abs().max()), 1.0)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * size)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [20, 96])
@pytest.mark.parametrize("length", [1, 3, 17, 127, 300, 600])
def test_any_length_and_width(length: int, width: int, dtype: torch.dtype) -> None:
    check(length, width, dtype)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_any_layout_and_grouping(heads: tuple[int, int], layout: str) -> None:
    check(130, 16, torch.float32, layout=layout, heads=heads)


def test_compiled_it_is_the_same() -> None:
    if compiler.problem(cuda=False) is not None:
        pytest.skip(f"{compiler.problem(cuda=False)}")
    torch._dynamo.reset()
    check(300, 16, torch.bfloat16, function=torch.compile(attention, dynamic=False, fullgraph=True))


@pytest.mark.parametrize(
    ("shape", "value_width", "dtype", "fitting"),
    [
        ((1, 2, 5, 8), 8, torch.bfloat16, True),
        ((1, 2, 5, 8), 8, torch.float32, False),  # torch's own backward pass is as fast
        ((1, 2, 5, 8), 4, torch.bfloat16, False),
        ((1, 2, LONGEST, 8), 8, torch.bfloat16, True),
        ((1, 2, LONGEST + 1, 8), 8, torch.bfloat16, False),
        ((1, 2, 0, 8), 8, torch.bfloat16, False),
    ],
)
def test_what_it_is_for(shape: tuple[int, ...], value_width: int, dtype: torch.dtype, fitting: bool) -> None:
    q = torch.zeros(shape, dtype=dtype)
    assert fits(q, torch.zeros(*shape[:3], value_width, dtype=dtype)) is fitting


@pytest.mark.parametrize("grad", [True, False])
def test_plain_rows_go_there_where_there_is_a_backward_pass(grad: bool) -> None:
    dropout = KeyedDropout(0.0, seed=1, layer=0, site="attention", clock=Clock())
    part = Attend(scale=SCALE, seen=Seen(), documents=False, dropout=dropout, first_head=0)
    part.backend = "rebuilt"
    q = random(1, 9, 2, 8, seed=0, dtype=torch.bfloat16).requires_grad_()
    with torch.set_grad_enabled(grad):
        out = part(q, q, q, torch.arange(9)[None], torch.zeros(1, dtype=torch.long))
    names = []
    node = out.grad_fn
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert ("_RebuiltBackward" in names) is grad

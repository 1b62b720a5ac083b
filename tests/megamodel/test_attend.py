"""Every way to compute attention against the formula in fp64, forward and all gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from megamodel import attend
from megamodel.attend import Attend, Seen
from megamodel.dropout import Clock, KeyedDropout
from megamodel.kernels import flex

ROWS, LENGTH, HEADS, WIDTH = 2, 50, 6, 20
POSITIONS = torch.stack(
    (torch.cat([torch.arange(n) for n in (7, 30, 13)]), torch.cat([torch.arange(n) for n in (1, 49)]))
)
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"seen": Seen(window=9)},
    "window of one": {"seen": Seen(window=1)},
    "documents": {"documents": True},
    "documents, window": {"documents": True, "seen": Seen(window=5)},
    "documents, strided": {"documents": True, "seen": Seen(sparse="strided", stride=4)},
    "fixed": {"seen": Seen(sparse="fixed", stride=8, summary=2)},
    "soft cap": {"softcap": 0.7},
    "soft cap, window, documents": {"softcap": 0.7, "seen": Seen(window=9), "documents": True},
    "sinks": {"sinks": True},
    "sinks, window, soft cap": {"sinks": True, "seen": Seen(window=9), "softcap": 0.9},
    "bias": {"bias": True},
    "bias, documents": {"bias": True, "documents": True},
}


def inputs(keys: int, *, sinks: bool, bias: bool) -> list[Tensor]:
    torch.manual_seed(3)
    made = [torch.randn(ROWS, LENGTH, h, WIDTH, dtype=torch.float64) for h in (HEADS, keys, keys)]
    made += [torch.randn(HEADS, dtype=torch.float64)] if sinks else []
    made += [torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)] if bias else []
    return made


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Seen, documents: bool, softcap: float | None, **more: Any
):
    """One query at a time, from the words of the specification."""
    sinks, bias, out = more.get("sinks"), more.get("bias"), torch.empty_like(q)
    for b in range(ROWS):
        for h in range(HEADS):
            group = h * k.shape[2] // HEADS
            for i in range(LENGTH):
                first = i - int(POSITIONS[b, i]) if documents else 0
                keys = [j for j in range(first, i + 1) if sees(seen, i - first, j - first)]
                s = k[b, keys, group] @ q[b, i, h] * WIDTH**-0.5
                s = s if softcap is None else softcap * torch.tanh(s / softcap)
                s = s if bias is None else s + bias[0, h, i, keys]
                total = s.exp().sum() + (0 if sinks is None else sinks[h].exp())
                out[b, i, h] = (s.exp() / total) @ v[b, keys, group]
    return out


def sees(seen: Seen, i: int, j: int) -> bool:
    if seen.window is not None and i - j >= seen.window:
        return False
    if seen.sparse == "strided":
        return i - j < seen.stride or (i - j) % seen.stride == 0
    if seen.sparse == "fixed":
        return i // seen.stride == j // seen.stride or j % seen.stride >= seen.stride - seen.summary
    return True


def computed(case: dict[str, Any], backend: Any, tensors: list[Tensor], p: float = 0.0) -> Tensor:
    q, k, v, *rest = tensors
    dropout = KeyedDropout(p, seed=1, layer=0, site="attention", clock=Clock())
    module = Attend(
        scale=WIDTH**-0.5,
        seen=case.get("seen", Seen()),
        documents=case.get("documents", False),
        dropout=dropout,
        first_head=0,
        softcap=case.get("softcap"),
    )
    module.backend = backend
    sinks = rest.pop(0) if case.get("sinks") else None
    bias = rest.pop(0) if case.get("bias") else None
    return module(q, k, v, POSITIONS, torch.arange(ROWS), bias=bias, sinks=sinks)


def expected(case: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    q, k, v, *rest = tensors
    more = {name: rest.pop(0) for name in ("sinks", "bias") if case.get(name)}
    return formula(
        q,
        k,
        v,
        seen=case.get("seen", Seen()),
        documents=case.get("documents", False),
        softcap=case.get("softcap"),
        **more,
    )


@pytest.mark.parametrize("name", CASES)
def test_every_backend_equals_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 16 queries; fp64 to 1e-10, fp32 to 1e-5, with the gradients of everything."""
    monkeypatch.setattr(attend, "QUERIES", 16)
    case = CASES[name]
    for keys in (6, 3, 1):
        given = inputs(keys, sinks=case.get("sinks", False), bias=case.get("bias", False))
        exact = [x.clone().requires_grad_() for x in given]
        want = expected(case, exact)
        upstream = torch.randn_like(want)
        gradients = torch.autograd.grad(want, exact, upstream)
        for backend in ("whole", "sdpa", "blocked"):
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
                ours = [x.to(dtype).requires_grad_() for x in given]
                got = computed(case, backend, ours)
                found = torch.autograd.grad(got, ours, upstream.to(dtype))
                for a, b in zip((got, *found), (want, *gradients), strict=True):
                    error = (a.double() - b).abs().max() / b.abs().max().clamp(min=0.1)
                    assert error < tolerance, (backend, dtype, keys, float(error))


@pytest.mark.parametrize("name", [name for name in CASES if "bias" not in name])
@torch.no_grad()
def test_flex_attention_has_the_same_rules(name: str) -> None:
    """Forward only: on a CPU torch has no backward for it."""
    case = CASES[name]
    given = inputs(3, sinks=case.get("sinks", False), bias=False)
    got = computed(case, "flex", [x.float() for x in given])
    torch.testing.assert_close(got.double(), expected(case, given), rtol=1e-4, atol=1e-5)


def test_flex_attention_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would pass as well if the choice were ignored."""

    def refuse(*args: object, **more: object) -> None:
        raise RuntimeError("asked")

    monkeypatch.setattr(flex, "attention", refuse)
    with pytest.raises(RuntimeError, match="asked"):
        computed({"documents": True}, "flex", inputs(3, sinks=False, bias=False))
    computed({}, "flex", inputs(3, sinks=False, bias=False))  # plain rows: torch's flash attention


def test_a_mask_is_made_once_for_all_layers_and_anew_for_other_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(*arguments: Any, **more: Any) -> Any:
        made.append(1)
        return create_block_mask(*arguments, **more)

    monkeypatch.setattr(flex, "create_block_mask", counted)
    flex._of_any_row.cache_clear()
    flex._latest.clear()
    seen, positions = Seen(), torch.arange(12).repeat(1, 1)

    def visible_block() -> Tensor:
        mask = flex.block_mask(seen, positions, documents=True)
        zero = torch.zeros((), dtype=torch.int64)
        return mask.mask_mod(zero, zero, torch.tensor(8), torch.arange(12))

    one = [visible_block() for _ in range(3)]
    assert len(made) == 1 and int(one[0].sum()) == 9
    positions[:, 5:] -= 5  # in place, as a buffer that is filled again
    assert int(visible_block().sum()) == 4 and len(made) == 2
    for _ in range(3):
        flex.block_mask(Seen(window=4), positions, documents=False)
    assert len(made) == 3


def test_dropout_has_the_same_masks_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "QUERIES", 16)
    case = {"seen": Seen(window=20)}
    given = inputs(3, sinks=False, bias=False)
    whole, blocked = (computed(case, backend, given, p=0.3) for backend in ("whole", "blocked"))
    torch.testing.assert_close(blocked, whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(whole, computed(case, "whole", given), atol=1e-3)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return made


@pytest.mark.parametrize(
    "case",
    [
        {"seen": Seen(window=64)},
        {"documents": True},
        {"documents": True, "seen": Seen(window=64)},
        {"seen": Seen(window=64), "softcap": 5.0},
        {"seen": Seen(window=64), "sinks": True},
        {"seen": Seen(window=64), "dropout": 0.1},
        {"seen": Seen(window=64), "documents": True, "softcap": 5.0, "sinks": True, "dropout": 0.1},
    ],
)
def test_nothing_of_length_squared_is_made(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads of 1,024 tokens with a window, or documents, of 64: no tensor has even a tenth of S x S."""
    monkeypatch.setattr(attend, "QUERIES", 64)
    length = 1024
    q, k, v = (torch.randn(1, length, 4, 8, requires_grad=True) for _ in range(3))
    dropout = KeyedDropout(case.get("dropout", 0.0), seed=1, layer=0, site="attention", clock=Clock())
    sinks = torch.zeros(4, requires_grad=True) if case.get("sinks") else None
    module = Attend(
        scale=1.0,
        seen=case.get("seen", Seen()),
        documents=case.get("documents", False),
        dropout=dropout,
        first_head=0,
        softcap=case.get("softcap"),
    )
    positions = (torch.arange(length) % 64)[None]
    with Largest() as largest:
        module(q, k, v, positions, torch.arange(1), sinks=sinks).sum().backward()
    assert largest.elements < length**2 / 10
    module.backend = "whole"
    with Largest() as largest:
        module(q, k, v, positions, torch.arange(1), sinks=sinks).sum().backward()
    assert largest.elements >= length**2

"""How often torch.compile compiles: bounded, counted and told."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from launcher.telling import compiled_text
from megamodel.kernels import compiler


@pytest.fixture(autouse=True)
def from_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if compiler.problem(cuda=False) is not None:
        pytest.skip(f"{compiler.problem(cuda=False)}")
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiler, "LIMIT", 2)
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()
    counters.clear()


def test_forms_beyond_the_limit_run_as_they_are_and_are_told() -> None:
    function = compiler.compiled(lambda x: x.sin() + 1)
    for length in (2, 3):
        assert torch.equal(function(torch.zeros(length)), torch.ones(length))
    assert compiler.counted() == compiler.Compiled(graphs=2, breaks=0, beyond_limit=False)
    assert compiled_text(compiler.counted()) == "torch.compile made 2 graphs, with 0 breaks"
    for length in (4, 5):
        assert torch.equal(function(torch.zeros(length)), torch.ones(length))
    found = compiler.counted()
    assert (found.graphs, found.beyond_limit) == (2, True)
    assert "the rest ran uncompiled" in compiled_text(found)


def test_a_break_is_counted() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1

    compiler.compiled(broken)(torch.zeros(2))
    assert compiler.counted().breaks == 1

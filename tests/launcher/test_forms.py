"""What ranks would compute with: the same on all, or no run at all."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from conf.typed import parse
from launcher import forms
from launcher.config import Config, plan
from launcher.forms import Own, by_name, check_same, difference
from megamodel.choose import Machine, choose
from megamodel.kernels.config import Kernels
from parallel.exchange import exchange_over
from parallel.mesh import build_mesh
from tests.spawn import Ranks

ALIKE = [
    Own(rank, "ab"[rank // 2], {"norm": "triton", "head": "chunked"}, {"torch": "2.13.0", "triton": "3.7"})
    for rank in range(4)
]


def other(**values: Any) -> list[Own]:
    return [*ALIKE[:3], replace(ALIKE[3], **values)]


def test_ranks_that_are_alike_have_no_problem() -> None:
    assert difference(ALIKE) is None


def test_another_form_is_named_with_its_ranks_and_both_ways_out() -> None:
    found = difference(other(forms={"norm": "plain", "head": "chunked"}))
    assert found is not None
    assert "norm is triton, but plain on rank 3 (b)" in found and "kernels.norm=..." in found
    assert "kernels.head" not in found


def test_another_version_needs_the_same_environment() -> None:
    found = difference(other(forms={"norm": "plain", "head": "chunked"}, versions={"torch": "2.13.0"}))
    assert found is not None and "triton is 3.7, but missing on rank 3 (b)" in found
    # Naming a form would hide the cause.
    assert "same environment" in found and "kernels.norm=..." not in found


def test_what_stands_beside_compiled_graphs_counts_too() -> None:
    gpu = Machine(cuda=True, matrix_units=False, triton=None, compiler=None)
    compiles = Kernels(compile="block")
    there = by_name(choose(compiles, gpu, "bf16"))
    without = by_name(choose(compiles, replace(gpu, triton="not installed"), "bf16"))
    assert there["gate"] == "plain (triton beside)" and without["gate"] == "plain (plain beside)"
    assert there["norm"] == "plain (triton beside)"
    assert there["rotate"] == "plain", "blocks alone turn anything"


def test_a_whole_head_needs_no_form_of_what_it_does_not_do() -> None:
    """kernels.entropy cannot be named beside it, so that nodes must not differ in it."""
    gpu = Machine(cuda=True, matrix_units=False, triton=None, compiler=None)
    machines = (gpu, replace(gpu, triton="not installed"))
    assert {by_name(choose(Kernels(head="whole"), one, "bf16"))["entropy"] for one in machines} == {"plain"}


def test_a_gpu_without_triton_says_once_what_is_slower_and_the_way_out() -> None:
    why = "triton is not installed; pip install 'megamodel[gpu]'"
    gpu = Machine(cuda=True, matrix_units=False, triton=why, compiler=why)
    said = forms.told(choose(Kernels(), gpu, "bf16"))
    assert said == (
        "head chunked, attention blocked, experts grouped; plain entropy, plain norm, plain rotate, "
        f"plain gate, blocked attention: {why}"
    )
    for silent in (replace(gpu, triton=None), replace(gpu, cuda=False)):
        assert why not in forms.told(choose(Kernels(), silent, "bf16"))


def checked(odd: bool) -> str:
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    config = parse(Config, {"run": {"name": "x"}, "train": {"steps": 9, "precision": "bf16"}})
    settled = plan(config, world_size=2, cuda=False)
    machine = Machine(cuda=False, matrix_units=odd and mesh.world.rank == 1, triton="none", compiler=None)
    with patch.object(forms, "this_machine", lambda device: machine):
        check_same(settled, mesh, exchange_over(mesh.world))
    return "alike"


def test_a_node_with_other_units_is_refused_on_every_rank(ranks: Ranks) -> None:
    assert ranks.run(2, checked, False) == ["alike", "alike"]
    with pytest.raises(AssertionError, match=r"products is widened, but native on rank 1") as caught:
        ranks.run(2, checked, True)
    assert "kernels.products=..." in str(caught.value)


def test_the_chosen_forms_are_those_of_the_machine() -> None:
    config = parse(Config, {"run": {"name": "x"}, "train": {"steps": 9}, "kernels": {"head": "whole"}})
    settled = plan(config, world_size=1, cuda=False)
    found = forms.chosen(settled, torch.device("cpu"))
    assert found["head"].form == "whole" and "head whole" in forms.told(found)
    assert "norm" not in forms.told(found)

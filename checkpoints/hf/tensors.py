"""Tensors of transformers and logical tensors of ours: one rule a pattern, used in both directions.

i layer, e expert, h head. H query heads, K key/value heads, G = H / K, E head width, n experts, F width.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamodel.config import Model

Split = Callable[[Tensor, Model, int], list[Tensor]]
Join = Callable[[list[Tensor], Model], Tensor]


@dataclass(frozen=True)
class Form:
    """How one of their tensors falls apart into ours, and how ours make theirs again."""

    split: Split
    join: Join


def _sizes(model: Model, parts: int) -> list[int]:
    attention = model.attention
    if parts == 3:
        width = attention.query_width
        return [attention.n_heads * width, *[attention.n_kv_heads * width] * 2]
    return []


def _rows(x: Tensor, model: Model, parts: int) -> list[Tensor]:
    return list(x.split(_sizes(model, parts))) if parts == 3 else list(x.chunk(parts))


def _per_group(x: Tensor, model: Model, parts: int) -> list[Tensor]:
    """[G q heads, k, v] for each key/value head; with K = H [q k v] a head."""
    heads, groups, width = model.attention.n_heads, model.attention.n_kv_heads, model.attention.query_width
    shape = x.shape[1:]
    x = x.view(groups, heads // groups + 2, width, *shape)
    q, k, v = x[:, :-2], x[:, -2], x[:, -1]
    return [part.reshape(-1, *shape) for part in (q, k, v)]


def _join_groups(parts: list[Tensor], model: Model) -> Tensor:
    groups, width = model.attention.n_kv_heads, model.attention.query_width
    shape = parts[0].shape[1:]
    q, k, v = (part.view(groups, -1, width, *shape) for part in parts)
    return torch.cat((q, k, v), dim=1).reshape(-1, *shape)


def _interleaved(x: Tensor, model: Model, parts: int) -> list[Tensor]:
    """All experts at once, (n, D, 2 F) or (n, 2 F) with gate and up in turns -> gate and up of each."""
    x = x.transpose(1, 2) if x.dim() == 3 else x
    return [part for expert in x for part in (expert[0::2], expert[1::2])]


def _join_interleaved(parts: list[Tensor], model: Model) -> Tensor:
    pairs = [torch.stack(parts[i : i + 2], dim=1).flatten(0, 1) for i in range(0, len(parts), 2)]
    x = torch.stack(pairs)
    return x.transpose(1, 2).contiguous() if x.dim() == 3 else x


def _stacked(x: Tensor, model: Model, parts: int) -> list[Tensor]:
    return list(x.transpose(1, 2)) if x.dim() == 3 else list(x)


def _join_stacked(parts: list[Tensor], model: Model) -> Tensor:
    x = torch.stack(parts)
    return x.transpose(1, 2).contiguous() if x.dim() == 3 else x


def _flat(x: Tensor, model: Model, parts: int) -> list[Tensor]:
    return [x.reshape(-1)]


def _join_heads(parts: list[Tensor], model: Model) -> Tensor:
    return parts[0].view(-1, model.attention.query_width)


def _transposed(x: Tensor, model: Model, parts: int) -> list[Tensor]:
    return _rows(x.T, model, parts) if parts > 1 else [x.T]


FORMS = {
    "same": Form(lambda x, m, n: [x], lambda p, m: p[0]),
    "rows": Form(_rows, lambda p, m: torch.cat(p)),
    "transposed": Form(_transposed, lambda p, m: torch.cat(p).T.contiguous()),
    "groups": Form(_per_group, _join_groups),
    "interleaved": Form(_interleaved, _join_interleaved),
    "stacked": Form(_stacked, _join_stacked),
    "heads": Form(_flat, _join_heads),
}


@dataclass(frozen=True)
class Rule:
    """theirs: a name with {i}, {e}, {h}; ours: the logical names it is made of, in the order of the form."""

    theirs: str
    ours: tuple[str, ...]
    form: str = "same"


def rules(table: Mapping[str, Any]) -> tuple[Rule, ...]:
    """{theirs: ours | (form, ours, ...)} -> rules. `*` at the end stands for weight and bias."""
    found = []
    for theirs, value in table.items():
        form, ours = ("same", (value,)) if isinstance(value, str) else (value[0], tuple(value[1:]))
        if not theirs.endswith("*"):
            found.append(Rule(theirs, ours, form))
            continue
        for kind in ("weight", "bias"):
            plain = "rows" if len(ours) > 1 else "same"
            shaped = form if kind == "weight" or form != "transposed" else plain
            found.append(Rule(theirs[:-1] + kind, tuple(name[:-1] + kind for name in ours), shaped))
    return tuple(found)


@dataclass(frozen=True)
class Use:
    """A rule at one place: the names of both sides. part: (h, H) where theirs is one head's share of ours."""

    theirs: str
    ours: tuple[str, ...]
    form: str
    part: tuple[int, int] | None = None


def uses(table: Sequence[Rule], model: Model, logical: set[str]) -> Iterator[Use]:
    """Every rule at every place where the model has all that it is made of."""
    experts = getattr(model.experts, "n_experts", 0)
    for rule in table:
        for i in range(model.n_layers) if "{i}" in rule.theirs else [0]:
            ours = tuple(name.replace("{i}", str(i)) for name in rule.ours)
            theirs = rule.theirs.replace("{i}", str(i))
            if "{e}" in theirs:
                for e in range(experts):
                    names = tuple(name.replace("{e}", str(e)) for name in ours)
                    if logical.issuperset(names):
                        yield Use(theirs.replace("{e}", str(e)), names, rule.form)
                continue
            if "{h}" in theirs:
                heads = model.attention.n_kv_heads if ".k_" in theirs else model.attention.n_heads
                if logical.issuperset(ours):
                    for h in range(heads):
                        yield Use(theirs.replace("{h}", str(h)), ours, rule.form, (h, heads))
                continue
            names = ours
            if any("{e}" in name for name in ours):  # all experts in one tensor
                names = tuple(n.replace("{e}", str(e)) for e in range(experts) for n in ours)
            if names and logical.issuperset(names):
                yield Use(theirs, names, rule.form)


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern with {i}, {e}, {h}."""
    return re.fullmatch(re.sub(r"\\\{[ieh]\\\}", r"\\d+", re.escape(pattern)), name) is not None

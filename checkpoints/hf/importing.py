"""A model directory of transformers -> our model. Nothing but JSON and safetensors is read."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints.hf.beside import CONFIG, Beside, read_beside, read_json
from checkpoints.hf.families import FAMILIES
from checkpoints.hf.family import Family
from checkpoints.hf.tensors import FORMS, Use, rules, uses
from megamodel.config import Model
from megamodel.model import Transformer
from parallel.piece import Piece, pieces_of

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class Imported(Transformer):
    """A model from a directory of transformers, which remembers what stood beside it there."""

    def __init__(self, settings: Model, beside: Beside) -> None:
        super().__init__(settings, initial=False)
        self.beside = beside


def import_hf(directory: str | Path, dtype: torch.dtype | None = None) -> Imported:
    """The model of a directory that transformers saved, in one process: model(tokens) -> logits.

    dtype None keeps that of each stored tensor. ValueError names every field of config.json and every tensor
    that is not understood, missing or of another shape.
    """
    directory = Path(directory)
    settings, family = read_settings(directory)
    model = Imported(settings, read_beside(directory))
    load_tensors(model, family, directory, dtype=dtype)
    return model.eval()


def read_settings(directory: Path) -> tuple[Model, Family]:
    """The settings of a directory's config.json, and its family."""
    raw = read_json(directory / CONFIG)
    name = raw.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        raise ValueError(
            f"{directory}: model_type {name!r} is not supported; there are {', '.join(FAMILIES)}"
        )
    return family.model(raw), family


def files_of(directory: Path) -> list[Path]:
    """The safetensors files of a model directory."""
    if (directory / INDEX).exists():
        held = read_json(directory / INDEX).get("weight_map")
        if not isinstance(held, dict) or not held or any(not isinstance(n, str) for n in held.values()):
            raise ValueError(
                f"{directory / INDEX} has no weight_map from names of tensors to files; fetch it again"
            )
        names = sorted(set(held.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{directory / INDEX} names a file outside of its directory")
    else:
        names = [SINGLE_FILE]
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ValueError(
            f"{directory} has no {', '.join(missing)}; only safetensors are read, never pickled .bin files"
        )
    return [directory / name for name in names]


def stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model directory, one at a time."""
    for path in files_of(directory):
        try:
            with safe_open(str(path), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dictionary
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file ({error}); fetch it again") from None


def load_tensors(
    model: Transformer, family: Family, directory: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Overwrite all weights of the model by those of a directory."""
    target = Target(model, dtype)
    table = rules(family.tensors(model.settings))
    places = {use.theirs: use for use in uses(table, model.settings, set(target.places))}
    head: Tensor | None = None
    unknown: list[str] = []
    for name, tensor in stored(directory):
        use = places.get(name) or places.get(family.prefix + name)
        if use is not None:
            target.fill(use, tensor)
        elif model.settings.tie_embeddings and _is_head(table, name):
            head = tensor  # files may repeat the embedding there
        elif not any(re.fullmatch(pattern, name) for pattern in family.ignored):
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{directory} has tensors that are not understood for {family.model_type}: {_listed(unknown)}; "
            "reading the model without them might give other logits"
        )
    target.finish(directory)
    if head is not None and not torch.equal(
        target.logical("embedding.weight"), head.to(target.at("embedding"))
    ):
        raise ValueError(
            f"{directory}: config.json ties the head to the embedding, but the file has another head; "
            "set tie_word_embeddings to false in its config.json"
        )


def _is_head(table: Any, name: str) -> bool:
    return any(rule.theirs == name and rule.ours == ("head.weight",) for rule in table)


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


class Target:
    """The logical tensors of a model in one process, each to be filled exactly once."""

    def __init__(self, model: Transformer, dtype: torch.dtype | None) -> None:
        self.settings = model.settings
        self.dtype = dtype
        self.places: dict[str, tuple[torch.nn.Parameter, Piece]] = {
            piece.name: (parameter, piece)
            for parameter in model.parameters()
            for piece in pieces_of(parameter)
        }
        self.filled: set[str] = set()
        self.begun: set[int] = set()

    def at(self, word: str) -> torch.dtype:
        """The dtype of the first logical tensor whose name begins so."""
        return next(p.dtype for name, (p, _) in self.places.items() if name.startswith(word))

    def logical(self, name: str) -> Tensor:
        """A view of one logical tensor."""
        parameter, piece = self.places[name]
        return parameter.data.view(-1)[piece.start : piece.start + piece.numel].view(piece.extent)

    @torch.no_grad()
    def fill(self, use: Use, tensor: Tensor) -> None:
        """Put what one of their tensors holds into ours."""
        try:
            parts = FORMS[use.form].split(tensor, self.settings, len(use.ours))
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"{use.theirs} has the shape {tuple(tensor.shape)}: {error}") from None
        for name, part in zip(use.ours, parts, strict=True):
            mark = name if use.part is None else f"{name}#{use.part[0]}"
            if mark in self.filled:
                raise ValueError(f"{use.theirs}: {name} is given twice")
            self._take_dtype(name, part.dtype)
            view = self.logical(name)
            if use.part is not None:
                h, count = use.part
                view = view.view(count, -1)[h]
            if view.shape != part.shape:
                raise ValueError(
                    f"{use.theirs}: shape {tuple(part.shape)} instead of {tuple(view.shape)} for {name}"
                )
            view.copy_(part)
            self.filled.add(mark)
            if use.part is None or all(f"{name}#{i}" in self.filled for i in range(use.part[1])):
                self.filled.add(name)

    def _take_dtype(self, name: str, stored_dtype: torch.dtype) -> None:
        """A parameter has the dtype asked for, or that of what is stored (the wider one, where they mix)."""
        parameter, _ = self.places[name]
        if not stored_dtype.is_floating_point:
            raise ValueError(f"{name} is stored as {stored_dtype}, which is no plain number")
        wanted = self.dtype or stored_dtype
        if id(parameter) in self.begun:
            wanted = torch.promote_types(wanted, parameter.dtype)
        else:
            self.begun.add(id(parameter))
            parameter.data = torch.zeros_like(parameter.data, dtype=wanted)
            return
        if parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)

    def finish(self, directory: Path) -> None:
        """ValueError when something was not given."""
        missing = [name for name in self.places if name not in self.filled]
        if missing:
            raise ValueError(f"{directory} has no tensors for {_listed(missing)}")


def logical_tensors(model: Transformer) -> Mapping[str, Tensor]:
    """Views of all logical tensors of a model in one process."""
    target = Target(model, None)
    return {name: target.logical(name) for name in target.places}

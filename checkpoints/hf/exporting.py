"""Our model -> a directory that AutoModelForCausalLM loads."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints import manifest
from checkpoints.files import LocalFiles
from checkpoints.hf.beside import (
    CONFIG,
    GENERATION,
    IDS,
    Beside,
    beside_of,
    copy_tokenizer,
    write_json,
)
from checkpoints.hf.families import FAMILIES
from checkpoints.hf.family import Family
from checkpoints.hf.importing import INDEX, SINGLE_FILE, Imported, logical_tensors
from checkpoints.hf.tensors import FORMS, rules, uses
from checkpoints.weights import load_weights
from conf.typed import parse
from megamodel.config import Model
from megamodel.model import Transformer


def export_hf(
    model: Transformer | str | Path,
    directory: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    context: int | None = None,
    tokenizer: str | Path | None = None,
    special_tokens: Mapping[str, Any] | None = None,
    beside: Beside | None = None,
    shard_bytes: int = 5 << 30,
) -> str:
    """Write config.json, safetensors in shards with an index, generation_config.json; returns the family.

    model: one in this process, or the directory of a checkpoint's step. family: a model_type; None takes the
    first that can say the architecture exactly, or ValueError tells why none can. dtype: None keeps each
    tensor's. context: max_position_embeddings. tokenizer: a tokenizer.json or a directory with one. beside:
    what stood beside a model that was imported, which is remembered by import_hf's and by its checkpoint;
    context and special_tokens go before it.
    """
    directory = Path(directory)
    if not isinstance(model, Transformer):
        beside = beside or beside_of(Path(model))
        model = from_checkpoint(Path(model))
    elif isinstance(model, Imported):
        beside = beside or model.beside
    beside = beside or Beside(dict.fromkeys(IDS))
    chosen, config = choose(model.settings, family, context=context or beside.context)
    if any(directory.glob("*.safetensors")) or (directory / "config.json").exists():
        raise ValueError(f"{directory} holds a model already; give another directory")
    directory.mkdir(parents=True, exist_ok=True)
    # Said even where there is none: the defaults of some classes are ids beyond a smaller vocabulary.
    asked = special_tokens or {}
    tokens = {**beside.tokens, **asked}
    stored = str(dtype or _usual_dtype(model)).removeprefix("torch.")
    write_json(directory / CONFIG, {**config, **tokens, "dtype": stored})
    said = {**tokens, **beside.generation, **asked}
    write_json(directory / GENERATION, {key: value for key, value in said.items() if value is not None})
    _write_tensors(directory, model, chosen, dtype=dtype, shard_bytes=shard_bytes)
    if tokenizer is not None:
        copy_tokenizer(Path(tokenizer), directory)
    return chosen.model_type


def _usual_dtype(model: Transformer) -> torch.dtype:
    """The dtype of most numbers."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in logical_tensors(model).values():
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def from_checkpoint(path: Path) -> Transformer:
    """The model of a checkpoint's step, with its masters in fp32."""
    content, _ = manifest.read(LocalFiles(), path)
    settings = parse(Model, content.configuration["model"])
    model = Transformer(settings, initial=False)
    load_weights(path, model)
    return model.eval()


def choose(settings: Model, name: str | None, *, context: int | None) -> tuple[Family, dict[str, Any]]:
    """The family and the config.json of an architecture."""
    if name is not None:
        if name not in FAMILIES:
            raise ValueError(f"there is no family {name!r}; there are {', '.join(FAMILIES)}")
        return FAMILIES[name], FAMILIES[name].config(settings, context=context)
    reasons = {}
    for family in FAMILIES.values():
        try:
            return family, family.config(settings, context=context)
        except (ValueError, AttributeError, KeyError, TypeError, AssertionError) as error:
            reasons[family.model_type] = str(error)
    nearest = min(reasons, key=lambda key: reasons[key].count(";") + 1e3 * ("attribute" in reasons[key]))
    raise ValueError(
        f"no family of transformers has this architecture; the nearest is {nearest}: {reasons[nearest]}"
    )


def _theirs(model: Transformer, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, one at a time; AssertionError when one of ours is in none or in two."""
    logical = logical_tensors(model)
    used: list[str] = []
    parts: set[str] = set()
    for use in uses(rules(family.tensors(model.settings)), model.settings, set(logical)):
        tensors = [logical[name] for name in use.ours]
        if use.part is not None:
            h, count = use.part
            tensors = [tensor.view(count, -1)[h] for tensor in tensors]
            parts.update(use.ours)
        else:
            used += use.ours
        yield use.theirs, FORMS[use.form].join(tensors, model.settings)
    assert sorted([*used, *parts]) == sorted(logical), "every weight has exactly one place"


def _write_tensors(
    directory: Path, model: Transformer, family: Family, *, dtype: torch.dtype | None, shard_bytes: int
) -> None:
    names: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in _theirs(model, family):
        tensor = tensor.detach().cpu().to(dtype or tensor.dtype).contiguous().clone()
        amount = tensor.numel() * tensor.element_size()
        if shard and size + amount > shard_bytes:
            names.append(_save(directory, len(names) + 1, shard))
            shard, size = {}, 0
        shard[name] = tensor
        size, total = size + amount, total + amount
    names.append(_save(directory, len(names) + 1, shard))
    if len(names) == 1:
        (directory / _part(1)).rename(directory / SINGLE_FILE)
        return
    weight_map = {}
    for number, held in enumerate(names, 1):
        name = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        (directory / _part(number)).rename(directory / name)
        weight_map.update(dict.fromkeys(held, name))
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _part(number: int) -> str:
    return f"model-{number:05d}.safetensors.part"


def _save(directory: Path, number: int, shard: dict[str, Tensor]) -> list[str]:
    save_file(shard, str(directory / _part(number)), metadata={"format": "pt"})
    return list(shard)

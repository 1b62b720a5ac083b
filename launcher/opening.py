"""A model and its tokenizer from wherever they lie: a run, a step of one, or a directory of transformers."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from checkpoints import manifest, store
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.hf import import_hf
from checkpoints.hf.beside import Beside, beside_of, tokenizer_file
from checkpoints.imported import IMPORTED
from checkpoints.manager import where
from checkpoints.weights import load_weights
from conf.typed import parse
from launcher.cluster import placement
from launcher.config import Config
from launcher.hardware import Hardware
from launcher.joining import join
from megamodel.data.prepare import prepare as prepare_data
from megamodel.model import Transformer
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load
from parallel.mesh import build_mesh
from parallel.start import pick_device, stop
from parallel.tensor import TensorParallel

TIMEOUT = timedelta(minutes=30)  # a rank may still be building the tokenizer while the others wait


@dataclass(frozen=True)
class Opened:
    """A model ready to be asked. context: tokens that it was trained on at once, where that is known."""

    model: Transformer
    tokenizer: Tokenizer
    tokenizer_file: Path | None
    where: Path
    context: int | None


@dataclass(frozen=True)
class Weights:
    """A model alone. tree: the configuration of a run; tokenizer_file: that came with an import, if one did.

    beside: what stood beside it where it was imported from.
    """

    model: Transformer
    where: Path
    context: int | None
    tokenizer_file: Path | None = None
    tree: Config | None = None
    beside: Beside | None = None


TOKENIZERS = "tokenizer"  # in the target of import-hf, the copy of the source's tokenizer


@contextmanager
def asked(hardware: Hardware) -> Iterator[tuple[torch.device, TensorParallel]]:
    """(device, tensor parallelism) of this process for asking a model: all processes share its heads."""
    if hardware.threads:
        torch.set_num_threads(hardware.threads)
    place = placement(os.environ)
    device = pick_device(hardware.device, place.local_rank)
    if place.world_size == 1:
        yield device, TensorParallel()
        return
    join(place, device, TIMEOUT)
    try:
        yield device, TensorParallel(build_mesh(tp=place.world_size, pp=1, device=device).tp)
    finally:
        stop()


def open_model(
    source: str,
    *,
    tokenizer: str | None = None,
    device: torch.device,
    parallel: TensorParallel | None = None,
) -> Opened:
    """source: the directory of a run, of a checkpoint's step, or of a model of transformers.

    parallel: this rank's share of the model alone. tokenizer: a tokenizer.json or .model instead of the
    source's own. ValueError says what is missing.
    """
    given = Path(tokenizer).expanduser() if tokenizer else None
    weights = open_weights(source, parallel=parallel, tokenizer_needed=given is None)
    found, file = tokenizer_of(weights, given)
    return Opened(weights.model.eval().to(device), found, file, weights.where, weights.context)


def open_weights(
    source: str, *, parallel: TensorParallel | None = None, tokenizer_needed: bool = False
) -> Weights:
    """The model of a source without its tokenizer.

    tokenizer_needed: ValueError, before anything is read, when the source has none.
    """
    path = Path(source).expanduser()
    parallel = parallel or TensorParallel()
    if (path / "config.json").exists():
        if parallel.group.size > 1:
            raise ValueError(
                f"{path} is a model of transformers, which {parallel.group.size} processes cannot share; "
                "use one process, or import-hf it and give the checkpoint"
            )
        file = tokenizer_file(path)
        _check_tokenizer(path, file, needed=tokenizer_needed)
        model = import_hf(path)
        return Weights(model, path, model.beside.context, file, beside=model.beside)
    path = step_directory(path)
    content, _ = manifest.read(LocalFiles(), path)
    tree = trained_with(content.configuration)
    context, beside = tree.train.sequence_length, beside_of(path)
    file = Path(tree.tokenizer.path).expanduser() if tree.tokenizer.path else None
    if content.extra.get(IMPORTED):
        file = tokenizer_file(path.parent.parent / TOKENIZERS) or (file if file and file.is_file() else None)
        _check_tokenizer(path, file, needed=tokenizer_needed)
        context = beside.context if beside else None
    elif file is None or beside is None or not _is_same(file, content.tokenizer):
        file = None  # the copy beside the tokenised data is the one that it was trained with
    model = Transformer(tree.model, initial=False, parallel=parallel)
    load_weights(path, model)
    return Weights(model, path, context, file, None if content.extra.get(IMPORTED) else tree, beside)


def trained_with(saved: Mapping[str, Any]) -> Config:
    """The configuration of a checkpoint, for its weights: how they were computed and split says nothing."""
    return parse(Config, {name: saved[name] for name in saved if name not in ("kernels", "parallel")})


def tokenizer_of(weights: Weights, given: Path | None = None) -> tuple[Tokenizer, Path | None]:
    """The tokenizer of what was opened, or another one that is given, and its file."""
    file = given or weights.tokenizer_file
    if file is None and weights.tree is not None:
        prepared = prepare_data(weights.tree.data, weights.tree.tokenizer)
        return prepared.tokenizer, prepared.tokenizer_path
    assert file is not None, "looked for before the weights were read"
    if weights.tree is not None and given is None:
        return load(file, weights.tree.tokenizer), file
    return load(file, parse(TokenizerConfig, {"path": str(file)})), file


def step_directory(path: Path) -> Path:
    """The directory of a checkpoint's step: the path itself, or the newest of a run."""
    if (path / manifest.NAME).exists():
        return path
    files, directory = where(path, parse(Checkpoint, {}))
    found = store.latest(files, directory) if directory.exists() else None
    if found is None:
        raise ValueError(
            f"{path} holds no checkpoint and no model of transformers; give source=DIRECTORY of a run, "
            "of a step of one, or one with a config.json"
        )
    return found


def _is_same(file: Path, digest: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest


def _check_tokenizer(path: Path, file: Path | None, *, needed: bool) -> None:
    if needed and file is None:
        raise ValueError(f"{path} has no tokenizer (tokenizer.json or tokenizer.model); give tokenizer=FILE")

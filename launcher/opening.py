"""A model and its tokenizer from wherever they lie: a run, a step of one, or a directory of transformers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from checkpoints import manifest, store
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.hf import import_hf
from checkpoints.manager import where
from checkpoints.weights import load_weights
from conf.typed import parse
from launcher.cluster import placement
from launcher.config import Config
from launcher.hardware import Hardware
from megamodel.data.prepare import prepare as prepare_data
from megamodel.model import Transformer
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load
from parallel.mesh import build_mesh
from parallel.start import pick_device, start, stop
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
    start(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        address=place.master_addr,
        port=place.master_port,
        device=device,
        timeout=TIMEOUT,
    )
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
    path = Path(source).expanduser()
    file = Path(tokenizer).expanduser() if tokenizer else None
    parallel = parallel or TensorParallel()
    if (path / "config.json").exists():
        if parallel.group.size > 1:
            raise ValueError(
                f"{path} is a model of transformers, which {parallel.group.size} processes cannot share; "
                "use one process, or import-hf it and give the checkpoint"
            )
        model, context = import_hf(path), None
        file = file or _tokenizer_file(path)
    else:
        path = step_directory(path)
        content, _ = manifest.read(LocalFiles(), path)
        tree = parse(Config, content.configuration)
        model, context = Transformer(tree.model, initial=False, parallel=parallel), tree.train.sequence_length
        load_weights(path, model)
        if file is None:
            prepared = prepare_data(tree.data, tree.tokenizer)
            found, file = prepared.tokenizer, prepared.tokenizer_path
            return Opened(model.eval().to(device), found, file, path, context)
    setting = parse(TokenizerConfig, {"path": str(file)})
    return Opened(model.eval().to(device), load(file, setting), file, path, context)


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


def _tokenizer_file(directory: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (directory / name).exists():
            return directory / name
    raise ValueError(f"{directory} has no tokenizer.json or tokenizer.model; give tokenizer=FILE")

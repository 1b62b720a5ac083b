"""A model and its tokenizer from wherever they lie: a run, a step of one, or a directory of transformers."""

from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints import manifest, store
from checkpoints.config import Checkpoint
from checkpoints.files import LocalFiles
from checkpoints.hf import import_hf
from checkpoints.manager import where
from checkpoints.weights import load_weights
from conf.typed import parse
from launcher.config import Config
from megamodel.data.prepare import prepare as prepare_data
from megamodel.model import Transformer
from megamodel.tokenizer import Tokenizer, TokenizerConfig, load


@dataclass(frozen=True)
class Opened:
    """A model ready to be asked. context: tokens that it was trained on at once, where that is known."""

    model: Transformer
    tokenizer: Tokenizer
    tokenizer_file: Path | None
    where: Path
    context: int | None


def open_model(source: str, *, tokenizer: str | None = None, device: torch.device) -> Opened:
    """source: the directory of a run, of a checkpoint's step, or of a model of transformers.

    ValueError says what is missing. tokenizer: a tokenizer.json or .model instead of the source's own.
    """
    path = Path(source).expanduser()
    file = Path(tokenizer).expanduser() if tokenizer else None
    if (path / "config.json").exists():
        model, context = import_hf(path), None
        file = file or _tokenizer_file(path)
    else:
        path = step_directory(path)
        content, _ = manifest.read(LocalFiles(), path)
        tree = parse(Config, content.configuration)
        model, context = Transformer(tree.model, initial=False), tree.train.sequence_length
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

"""What stands beside a model of transformers: files of its tokenizer, special tokens, how it generates."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoints import manifest
from checkpoints.files import LocalFiles

CONFIG, GENERATION = "config.json", "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # a number, a list of numbers or null
LENGTHS = ("max_position_embeddings", "n_positions")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # either one will do; the first is preferred
SIDECARS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template*")
KEPT = (
    "beside.json"  # `Beside` as a file, with a tokenizer's copy: runs that go on from an import have it there
)
EXTRA = "beside"  # and in `extra` of the imported checkpoint


@dataclass(frozen=True)
class Beside:
    """tokens: the ids in config.json; generation: generation_config.json; context: the longest input."""

    tokens: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None

    def plain(self) -> dict[str, Any]:
        return {
            "tokens": dict(self.tokens),
            "generation": dict(self.generation),
            "context": self.context,
        }


def beside_of(step: Path) -> Beside | None:
    """What stood beside the model that a checkpoint's step was imported from, or was trained on from."""
    content, _ = manifest.read(LocalFiles(), step)
    if EXTRA in content.extra:
        return Beside(**content.extra[EXTRA])
    tokenizer = (content.configuration.get("tokenizer") or {}).get("path")
    kept = Path(tokenizer).expanduser().with_name(KEPT) if tokenizer else None
    if kept is None or not kept.is_file():
        return None
    return replace(Beside(**read_json(kept)), context=None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError when there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the directory of a model of transformers") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_beside(directory: Path) -> Beside:
    """What a directory of transformers says beside its model."""
    raw = read_json(directory / CONFIG)
    lengths = [raw[name] for name in LENGTHS if isinstance(raw.get(name), int) and raw[name] > 0]
    generation = read_json(directory / GENERATION) if (directory / GENERATION).exists() else {}
    return Beside({name: raw[name] for name in IDS if name in raw}, generation, next(iter(lengths), None))


def tokenizer_file(directory: Path) -> Path | None:
    """The tokenizer of a directory, or None."""
    return next((directory / name for name in TOKENIZERS if (directory / name).is_file()), None)


def copy_tokenizer(source: Path, directory: Path) -> list[str]:
    """A tokenizer, a file or those of a directory, with what belongs to it; the names of the copies.

    A tokenizer.json alone also gets the class that transformers loads it with.
    """
    directory.mkdir(parents=True, exist_ok=True)
    folder = source if source.is_dir() else source.parent
    wanted = {name: folder / name for name in TOKENIZERS} if source.is_dir() else {}
    if not source.is_dir():
        wanted[f"tokenizer{source.suffix}"] = source
    wanted |= {path.name: path for pattern in SIDECARS for path in sorted(folder.glob(pattern))}
    copied = [name for name, path in wanted.items() if path.is_file()]
    for name in copied:
        shutil.copyfile(wanted[name], directory / name)
    for name in (name for name, path in wanted.items() if path.is_dir()):  # several chat templates
        shutil.copytree(wanted[name], directory / name, dirs_exist_ok=True)
    if "tokenizer.json" in copied and "tokenizer_config.json" not in copied:
        write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return copied

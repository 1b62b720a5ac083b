"""Text to token numbers and back: a byte-level BPE trained here, or a given tokenizer.

No tokenizer adds anything by itself: EOS and BOS are put around documents by whoever packs them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from conf.typed import config, setting

TRAINED_VOCABULARY = 2048
EOS = "<|endoftext|>"
BOS = "<|beginoftext|>"
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|endofsequence|>", "[EOS]", "<|eos|>")
_BOS_NAMES = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[BOS]", "<|bos|>")


@config
class TokenizerConfig:
    """Which tokenizer: trained on the data (path=null), a file, or none but ready ids (eos_id given)."""

    path: str | None = setting(
        None,
        on_resume="needs_override",
        help="a tokenizer.json or a SentencePiece .model; null: train a byte-level BPE on the training data",
    )
    vocab_size: int | None = setting(
        None,
        on_resume="must_equal",
        help=f"entries; null: the file's own, or {TRAINED_VOCABULARY} when trained here",
    )
    add_bos: bool = setting(False, on_resume="must_equal", help="put BOS before each document")
    eos: str | None = setting(
        None, on_resume="must_equal", help="text of the EOS token; null: found in the tokenizer"
    )
    bos: str | None = setting(
        None, on_resume="must_equal", help="text of the BOS token; null: found in the tokenizer"
    )
    eos_id: int | None = setting(
        None,
        on_resume="must_equal",
        help="set only to feed ready token files without a tokenizer, together with vocab_size",
    )
    train_bytes: int = setting(
        1 << 26, on_resume="must_equal", help="about how many bytes of text a tokenizer is trained on at most"
    )

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"tokenizer.vocab_size ({self.vocab_size}) must be at least 1")
        if self.eos_id is not None:
            if self.path is not None or self.vocab_size is None:
                raise ValueError(
                    f"tokenizer.eos_id ({self.eos_id}) is for ready token files without a tokenizer: it "
                    f"needs tokenizer.vocab_size (it is {self.vocab_size}) and no tokenizer.path (it is "
                    f"{self.path})"
                )
            if not 0 <= self.eos_id < self.vocab_size:
                raise ValueError(
                    f"tokenizer.eos_id ({self.eos_id}) must be in 0 .. vocab_size - 1 ({self.vocab_size - 1})"
                )
            if self.add_bos:
                raise ValueError("tokenizer.add_bos=true adds to text; ready token files hold what they hold")
        elif self.path is None and self.vocab_size is not None and self.vocab_size < 258:
            raise ValueError(
                f"tokenizer.vocab_size ({self.vocab_size}) must be at least 258 to train one: 256 bytes, EOS "
                "and BOS"
            )
        if self.train_bytes < 1:
            raise ValueError(f"tokenizer.train_bytes ({self.train_bytes}) must be at least 1")


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer; bos_id is None when documents get no BOS; hash is of its file."""

    vocab_size: int
    eos_id: int
    bos_id: int | None
    hash: str

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of the text alone; special tokens in it stay text unless allow_special."""
        ...

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class JsonTokenizer:
    """A tokenizer.json, run by the `tokenizers` library."""

    def __init__(self, path: Path, setting: TokenizerConfig) -> None:
        content = _read(path)
        try:
            self._plain = tokenizers.Tokenizer.from_buffer(content)
            self._special = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
        self._plain.encode_special_tokens = True
        for inner in (self._plain, self._special):
            inner.no_padding()
            inner.no_truncation()
        self.hash = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._plain.get_vocab(with_added_tokens=True).values()) + 1
        given = _neighbour_config(path)
        self.eos_id = self._find("eos", setting.eos or given.get("eos_token"), _EOS_NAMES, path)
        self.bos_id = (
            self._find("bos", setting.bos or given.get("bos_token"), _BOS_NAMES, path)
            if setting.add_bos
            else None
        )
        _check_vocabulary(setting, self.vocab_size, path)

    def _find(self, role: str, name: str | None, usual: Sequence[str], path: Path) -> int:
        """The id of a given name; else that of the one usual name that is a special token, not a merge."""
        added = {token.content: number for number, token in self._plain.get_added_tokens_decoder().items()}
        if name is not None and (number := self._plain.token_to_id(name)) is not None:
            return number
        names = [name] if name is not None else usual
        found = {n: added[n] for n in names if n in added}
        if len(found) == 1:
            return next(iter(found.values()))
        raise ValueError(
            f"{path} has {'none' if not found else 'more than one'} of the {role.upper()} tokens "
            f"{list(found or names)}; name the right one with tokenizer.{role}=TEXT"
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return self.encode_batch([text], allow_special=allow_special)[0]

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        inner = self._special if allow_special else self._plain
        return [e.ids for e in inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._plain.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer:
    """A SentencePiece .model; its control symbols never match text, so allow_special changes nothing."""

    def __init__(self, path: Path, setting: TokenizerConfig) -> None:
        try:
            import sentencepiece  # optional: only those who bring a .model need it
        except ImportError:
            raise ValueError(
                f"tokenizer.path={path} needs the package sentencepiece; run `pip install sentencepiece`, "
                "or give a tokenizer.json"
            ) from None
        content = _read(path)
        self._inner: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._inner.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise ValueError(f"tokenizer.path: {path} is not a SentencePiece model ({error})") from None
        self.hash = hashlib.sha256(content).hexdigest()
        self.vocab_size = int(self._inner.GetPieceSize())
        self.eos_id = self._find("eos", setting.eos, int(self._inner.eos_id()), path)
        self.bos_id = (
            self._find("bos", setting.bos, int(self._inner.bos_id()), path) if setting.add_bos else None
        )
        _check_vocabulary(setting, self.vocab_size, path)

    def _find(self, role: str, name: str | None, default: int, path: Path) -> int:
        if name is not None:
            default = int(self._inner.PieceToId(name))
            if self._inner.IdToPiece(default) != name:
                default = -1
        if default < 0:
            raise ValueError(
                f"{path} has no {role.upper()} token{f' {name!r}' if name else ''}; "
                f"name one that it has with tokenizer.{role}=TEXT"
            )
        return default

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return self._inner.EncodeAsIds(text)

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        return [self._inner.EncodeAsIds(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.DecodeIds([int(i) for i in ids])


class Ids:
    """No tokenizer: the data are ready token numbers; decode writes the numbers."""

    def __init__(self, vocab_size: int, eos_id: int) -> None:
        self.vocab_size = vocab_size
        self.eos_id = eos_id
        self.bos_id: int | None = None
        self.hash = hashlib.sha256(f"ids {vocab_size} {eos_id}".encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        raise ValueError("there is no tokenizer to encode text with; give tokenizer.path=FILE")

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


def load(path: Path | None, setting: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a file (None: the ids of the setting); ValueError names what is wrong with it."""
    if path is None:
        assert setting.vocab_size is not None and setting.eos_id is not None
        return Ids(setting.vocab_size, setting.eos_id)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, setting)
    if path.suffix == ".json":
        return JsonTokenizer(path, setting)
    raise ValueError(f"tokenizer.path={path} must be a tokenizer.json or a SentencePiece .model file")


def train(texts: Iterable[str], setting: TokenizerConfig) -> str:
    """A byte-level BPE of the texts, as the text of its tokenizer.json. The same texts give the same bytes.

    Any text is encoded without loss: no normalisation, the 256 bytes are the alphabet. EOS is id 0; BOS is
    id 1 where it is asked for.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    specials = [setting.eos or EOS] + ([setting.bos or BOS] if setting.add_bos else [])
    trainer = trainers.BpeTrainer(
        vocab_size=setting.vocab_size or TRAINED_VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner.to_str(pretty=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"tokenizer.path: cannot read {path} ({error.strerror})") from None


def _neighbour_config(path: Path) -> dict[str, str]:
    """The names of EOS and BOS in a tokenizer_config.json beside the file; there a name may be an object."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return {}
    try:
        raw = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{beside} is not JSON ({error})") from None
    names = {key: raw.get(key) for key in ("eos_token", "bos_token")}
    names = {key: value["content"] if isinstance(value, dict) else value for key, value in names.items()}
    return {key: value for key, value in names.items() if isinstance(value, str)}


def _check_vocabulary(setting: TokenizerConfig, size: int, path: Path) -> None:
    """A trained one may end below what was asked (a tiny corpus has few merges); a given one must match."""
    if setting.path is not None and setting.vocab_size not in (None, size):
        raise ValueError(
            f"tokenizer.vocab_size ({setting.vocab_size}) is not that of {path} ({size}); "
            "leave it null to take the file's own"
        )

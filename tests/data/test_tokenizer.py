"""Tokenizers: nothing is lost, special tokens stay text unless asked, the wrong file is named."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megamodel.tokenizer import BOS, EOS, TokenizerConfig, load, train

TEXTS = ["def f(x):\n    return x + 1\n" * 5, "The quick brown fox, 1234567890.\n" * 5, "</s> <s> " * 9]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train(TEXTS, TokenizerConfig(vocab_size=300, add_bos=True)), encoding="utf-8")
    return path


@given(text=st.text(max_size=60))
def test_any_text_comes_back(trained: Path, text: str) -> None:
    tokenizer = load(trained, TokenizerConfig())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "b"]) == [tokenizer.encode(text), tokenizer.encode("b")]


def test_a_trained_tokenizer_has_bytes_merges_and_its_specials(trained: Path) -> None:
    tokenizer = load(trained, TokenizerConfig(add_bos=True))
    assert tokenizer.vocab_size == 300
    assert (tokenizer.eos_id, tokenizer.bos_id) == (0, 1)
    assert load(trained, TokenizerConfig()).bos_id is None
    assert tokenizer.hash == hashlib.sha256(trained.read_bytes()).hexdigest()
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert sorted({i for b in range(128) for i in tokenizer.encode(chr(b))})[0] >= 2


def test_literal_special_tokens_stay_text_unless_asked(trained: Path) -> None:
    tokenizer = load(trained, TokenizerConfig(add_bos=True))
    text = f"a{EOS}b{BOS}"
    plain = tokenizer.encode(text)
    assert not {0, 1} & set(plain)
    assert tokenizer.decode(plain) == text
    asked = tokenizer.encode(text, allow_special=True)
    assert [i for i in asked if i in (0, 1)] == [0, 1]


def test_training_gives_the_same_bytes_with_any_number_of_threads(trained: Path) -> None:
    """More distinct words than one batch of the library, in processes of different hash seeds."""
    program = (
        "import hashlib; from megamodel.tokenizer import *;"
        "texts = [' '.join(f'w{k * 7919 % 5003} {k % 97}' for k in range(n, n + 50)) for n in range(2000)];"
        "print(hashlib.sha256(train(texts, TokenizerConfig(vocab_size=600)).encode()).hexdigest())"
    )
    seen = set()
    for threads in ("1", "2", "5"):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        seen.add(done.stdout)
    assert len(seen) == 1 and len(seen.pop().strip()) == 64


def test_the_end_of_document_token_is_found_or_asked_for(tmp_path: Path, trained: Path) -> None:
    raw = json.loads(trained.read_text(encoding="utf-8"))
    path = tmp_path / "tokenizer.json"

    def write(*names: str) -> None:
        raw["added_tokens"] = [
            raw["added_tokens"][0] | {"id": 300 + k, "content": name} for k, name in enumerate(names)
        ]
        path.write_text(json.dumps(raw), encoding="utf-8")

    write("</s>", "<|odd|>")
    assert load(path, TokenizerConfig()).eos_id == 300
    assert load(path, TokenizerConfig(eos="<|odd|>")).eos_id == 301
    assert load(path, TokenizerConfig()).vocab_size == 302
    write("<|odd|>")
    with pytest.raises(ValueError, match=r"has none of the EOS tokens.*tokenizer\.eos=TEXT"):
        load(path, TokenizerConfig())
    write("</s>", "<eos>")
    with pytest.raises(ValueError, match=r"more than one of the EOS tokens \['</s>', '<eos>'\]"):
        load(path, TokenizerConfig())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<eos>"}}', encoding="utf-8")
    assert load(path, TokenizerConfig()).eos_id == 301
    with pytest.raises(ValueError, match=r"none of the BOS tokens"):
        load(path, TokenizerConfig(add_bos=True))


def test_a_given_vocabulary_must_be_that_of_the_file(trained: Path) -> None:
    assert load(trained, TokenizerConfig(path=str(trained), vocab_size=300)).vocab_size == 300
    with pytest.raises(ValueError, match=r"vocab_size \(301\) is not that of .*tokenizer\.json \(300\)"):
        load(trained, TokenizerConfig(path=str(trained), vocab_size=301))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"no": 1}', "is not a tokenizer.json"),
        ("tokenizer.json", b"\x80\x04cos\nsystem\n(S'false'\ntR.", "is not a tokenizer.json"),
        ("spm.model", b"\x80\x04cos\nsystem\n(S'false'\ntR.", "is not a SentencePiece model"),
        ("tokenizer.bin", b"", r"must be a tokenizer\.json or a SentencePiece \.model"),
        ("missing.json", None, "cannot read .*No such file"),
    ],
)
def test_what_is_no_tokenizer_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name, TokenizerConfig())


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"hello world number {k} and more" for k in range(500)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.Train(
        input=str(corpus),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=320,
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = load(tmp_path / "spm.model", TokenizerConfig(add_bos=True))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (320, 1, 2)
    assert tokenizer.decode(tokenizer.encode("hello world \u20ac")) == "hello world \u20ac"
    assert not {1, 2} & set(tokenizer.encode("a</s>b<s>", allow_special=True))
    with pytest.raises(ValueError, match=r"no EOS token '<none>'"):
        load(tmp_path / "spm.model", TokenizerConfig(eos="<none>"))


def test_a_missing_sentencepiece_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "a.model").write_bytes(b"")
    with pytest.raises(ValueError, match="pip install sentencepiece"):
        load(tmp_path / "a.model", TokenizerConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 257}, "at least 258"),
        ({"vocab_size": 0}, "at least 1"),
        ({"eos_id": 3}, "needs tokenizer.vocab_size"),
        ({"eos_id": 3, "vocab_size": 10, "path": "a.json"}, "no tokenizer.path"),
        ({"eos_id": 10, "vocab_size": 10}, r"0 \.\. vocab_size - 1 \(9\)"),
        ({"eos_id": 3, "vocab_size": 10, "add_bos": True}, "ready token files hold what they hold"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(**settings)  # type: ignore[arg-type]

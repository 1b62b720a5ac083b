"""Text with a memory equals text by full passes, for every attention, position and window."""

from typing import Any

import pytest
import torch

from conf.typed import parse
from megamodel.accounting import cache_bytes
from megamodel.config import Model
from megamodel.generate import Sampling, filtered, generate, generate_batch
from megamodel.model import Transformer
from tests.parallel.variants import EXPERTS

ATTENTIONS: dict[str, dict[str, Any]] = {
    "MHA": {"n_heads": 4, "n_kv_heads": 4, "head_width": 8},
    "GQA": {"n_heads": 4, "n_kv_heads": 2, "head_width": 8, "qk_norm": {"scope": "projection"}, "bias": True},
    "MQA": {"n_heads": 4, "n_kv_heads": 1, "head_width": 8, "sinks": True, "softcap": 3.0},
    "MLA": {
        "kind": "latent",
        "n_heads": 4,
        "query_rank": 10,
        "kv_rank": 12,
        "nope_width": 6,
        "rope_width": 4,
        "value_width": 8,
    },
}
POSITIONS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "rope": {"kind": "rope"},
    "dynamic": {"kind": "rope", "scaling": {"kind": "dynamic", "original_length": 9, "factor": 3.0}},
    "longrope": {
        "kind": "rope",
        "fraction": 0.5,
        "scaling": {
            "kind": "longrope",
            "original_length": 14,
            "factor": 2.0,
            "short": [1.0, 1.1],
            "long": [2.0, 3.0],
        },
    },
    "sinusoidal": {"kind": "sinusoidal"},
    "learned": {"kind": "learned", "max_positions": 32},
    "alibi": {"kind": "alibi"},
    "buckets": {"kind": "buckets", "buckets": 8, "max_distance": 12},
    "shaw": {"kind": "relative_keys", "clip": 5},
    "xl": {"kind": "transformer_xl"},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"kinds": {"local": {"window": 5}}, "pattern": ["local"]},
    "pattern": {"kinds": {"local": {"window": 5}, "global": {}}, "pattern": ["local", "global"]},
    "strided": {"kinds": {"sparse": {"sparse": "strided"}}, "pattern": ["sparse"]},
}


def build(attention: str, position: str, window: str, **changes: Any) -> Transformer:
    settings = dict(POSITIONS[position])
    if attention == "MLA" and position == "longrope":
        settings["fraction"] = 1.0
    return Transformer(
        parse(
            Model,
            {
                "vocab_size": 97,
                "d_model": 32,
                "n_layers": 2,
                "attention": {**ATTENTIONS[attention], "stride": 3, "summary": 1},
                "feedforward": {"d_ff": 48},
                "position": settings,
                **WINDOWS[window],
                **changes,
            },
        ),
        seed=4,
    ).eval()


PROMPT = [5, 17, 96, 3, 44, 8, 61]
LENGTH = 12


def by_full_passes(model: Transformer, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_with_a_memory_as_without(attention: str, position: str, window: str) -> None:
    """Greedy tokens, and the logits of the last step, on prompts of unequal length in one batch."""
    model = build(attention, position, window)
    prompts = [PROMPT, PROMPT[2:5], PROMPT[1:]]
    greedy = Sampling(temperature=0)
    expected = [by_full_passes(model, prompt, LENGTH) for prompt in prompts]
    assert generate_batch(model, prompts, max_tokens=LENGTH, sampling=greedy) == expected
    caches = model.caches(len(PROMPT) + LENGTH)
    whole = torch.tensor([PROMPT + expected[0]])
    positions = torch.arange(whole.shape[1])[None]
    cut = len(PROMPT) + 2  # several tokens after the first pass, too
    parts = [slice(0, 4), slice(4, cut), *[slice(n, n + 1) for n in range(cut, whole.shape[1])]]
    logits = torch.cat([model(whole[:, p], positions[:, p], caches=caches) for p in parts], dim=1)
    if "scaling" not in POSITIONS[position]:  # those turn earlier tokens otherwise, once it is longer
        torch.testing.assert_close(logits, model(whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_a_memory_takes_exactly_its_bytes(attention: str, window: str) -> None:
    """Sum over layers of B min(T, w) c numbers: by hand 2 layers, B = 2, T = 19, w = 5."""
    model = build(attention, "rope", window)
    caches = model.caches(len(PROMPT) + LENGTH)
    model(torch.tensor([PROMPT] * 2), torch.arange(len(PROMPT)).repeat(2, 1), caches=caches)
    entries = {"all": 19 + 19, "window": 5 + 5, "pattern": 5 + 19, "strided": 19 + 19}[window]
    width = {"MHA": 64, "GQA": 32, "MQA": 16, "MLA": 16}[attention]
    assert sum(cache.memory_bytes for cache in caches) == 2 * entries * width * 4
    assert cache_bytes(model.settings, rows=2, length=19, number_bytes=4) == 2 * entries * width * 4


def test_published_sizes_of_memories() -> None:
    """Llama-2-70B at 4096 in 16 bit: 1.25 GiB; a 7B: 2 GiB."""
    from tests.megamodel.test_accounting import preset

    assert cache_bytes(preset("llama2_70b"), rows=1, length=4096, number_bytes=2) == 1.25 * 2**30
    assert cache_bytes(preset("llama2_7b"), rows=1, length=4096, number_bytes=2) == 2 * 2**30
    assert cache_bytes(preset("deepseek_v3"), rows=1, length=1, number_bytes=1) == 61 * 576


@torch.no_grad()
def test_experts_write_with_a_memory_too() -> None:
    model = build("GQA", "rope", "all", experts=EXPERTS)
    expected = by_full_passes(model, PROMPT, LENGTH)
    assert generate_batch(model, [PROMPT], max_tokens=LENGTH, sampling=Sampling(temperature=0)) == [expected]


def test_draws_depend_on_the_seed_and_the_row_alone() -> None:
    model = build("GQA", "rope", "all")
    once = generate_batch(model, [PROMPT, PROMPT], max_tokens=LENGTH, sampling=Sampling(seed=3))
    assert once == generate_batch(model, [PROMPT, PROMPT], max_tokens=LENGTH, sampling=Sampling(seed=3))
    assert once[0] == list(generate(model, PROMPT, max_tokens=LENGTH, seed=3)) != once[1]
    assert once != generate_batch(model, [PROMPT, PROMPT], max_tokens=LENGTH, sampling=Sampling(seed=4))


def test_a_row_stops_at_its_stop_token_and_the_others_go_on() -> None:
    model = build("GQA", "rope", "all")
    greedy = Sampling(temperature=0)
    rows = generate_batch(model, [PROMPT, PROMPT[:3]], max_tokens=LENGTH, sampling=greedy)
    stop = next(t for t in rows[0] if t not in rows[1])
    cut = rows[0].index(stop)
    found = generate_batch(model, [PROMPT, PROMPT[:3]], max_tokens=LENGTH, sampling=greedy, stop=[stop])
    assert found == [rows[0][:cut], rows[1]]


def test_odds_by_hand() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    torch.testing.assert_close(
        filtered(logits, temperature=1.0, top_p=0.6), torch.tensor([0.625, 0.375, 0.0, 0.0])
    )
    torch.testing.assert_close(
        filtered(logits, temperature=1.0, top_k=3), torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    )
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(filtered(logits, temperature=0.5), squared / squared.sum())
    torch.testing.assert_close(filtered(logits, temperature=1.0, top_p=1.0), logits.exp())


def test_beyond_learned_positions_is_an_error() -> None:
    model = build("GQA", "learned", "all")
    with pytest.raises(ValueError, match="ask for at most 25"):
        generate_batch(model, [PROMPT], max_tokens=26)
    with pytest.raises(ValueError, match="position 32 is beyond"):
        model(torch.zeros(1, 33, dtype=torch.long))

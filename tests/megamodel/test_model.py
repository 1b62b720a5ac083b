"""The decoder against transformers, and its parts against their formulas."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from conf.typed import parse
from megamodel.config import Model
from megamodel.model import Transformer
from megamodel.position import Rope, longest_wavelength
from parallel.piece import pieces_of


def small(**changes: object) -> Model:
    """Odd shapes: heads x width is not d_model."""
    raw: dict[str, object] = {
        "vocab_size": 250,
        "d_model": 48,
        "n_layers": 3,
        "attention": {"n_heads": 6, "n_kv_heads": 3, "head_width": 20},
        "feedforward": {"d_ff": 100},
        "tie_embeddings": False,
        "position": {"kind": "rope", "base": 5000.0},
    }
    return parse(Model, raw | changes)


NAMES = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feedforward_norm",
    "self_attn.o_proj": "attention.output",
    "self_attn": "attention",
    "mlp": "feedforward",
    "layers": "blocks",
}


def copy_weights(model: Transformer, theirs: torch.nn.Module) -> None:
    """Ours into a Llama of transformers."""
    ours = {}
    for parameter in model.parameters():
        for piece in pieces_of(parameter):
            flat = parameter.detach().reshape(-1)[piece.start : piece.start + piece.numel]
            ours[piece.name] = flat.view(piece.extent)
    state = theirs.state_dict()
    for name, tensor in state.items():
        logical = name.removeprefix("model.").replace("_proj", "")
        for theirs_word, word in NAMES.items():
            logical = logical.replace(theirs_word.replace("_proj", ""), word)
        if logical == "norm.weight":
            logical = "final_norm.weight"
        if logical == "head.weight" and "head.weight" not in ours:
            logical = "embedding.weight"
        tensor.copy_(ours[logical])


def randomise_norms(model: Transformer) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_transformers_llama(tied: bool) -> None:
    settings = small(tie_embeddings=tied)
    model = Transformer(settings, seed=1)
    randomise_norms(model)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=250,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=20,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )
    copy_weights(model, theirs)
    tokens = torch.randint(250, (2, 33), generator=torch.Generator().manual_seed(5))
    ours, expected = model(tokens), theirs(tokens).logits
    assert expected.std() > 0.5
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    ours.square().mean().backward()
    expected.square().mean().backward()
    (matrix,) = [p for p in model.parameters() if pieces_of(p)[0].name == "embedding.weight"]
    wanted = theirs.get_input_embeddings().weight.grad
    assert matrix.grad is not None and wanted is not None
    torch.testing.assert_close(matrix.grad[:250], wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))


def test_a_window_equals_transformers_mistral() -> None:
    attention = {"n_heads": 6, "n_kv_heads": 3, "head_width": 20, "window": 9}
    model = Transformer(small(attention=attention), seed=1)
    theirs = MistralForCausalLM(
        MistralConfig(
            vocab_size=250,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=20,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            sliding_window=9,
            attn_implementation="eager",
        )
    )
    copy_weights(model, theirs)
    tokens = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours, expected = model(tokens), theirs(tokens).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_window_of_w_sees_exactly_w_keys() -> None:
    """One layer: the logits of the last token change with token n - w + 1 and not with the one before."""
    window, length = 5, 12
    attention = {"n_heads": 6, "n_kv_heads": 3, "head_width": 20, "window": window}
    model = Transformer(small(attention=attention, n_layers=1), seed=1)
    tokens = torch.randint(250, (1, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = model(tokens)[0, -1]
        for place, seen in ((length - window, True), (length - window - 1, False)):
            other = tokens.clone()
            other[0, place] = (other[0, place] + 1) % 250
            assert bool((model(other)[0, -1] != before).any()) is seen


def test_isolated_documents_equal_documents_alone() -> None:
    """Two documents in one row: each gives the logits it gives alone; changing A moves no logit of B."""
    model = Transformer(small(), seed=1, documents=True)
    tokens = torch.randint(250, (1, 20), generator=torch.Generator().manual_seed(5))
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    alone = Transformer(small(), seed=1)
    with torch.no_grad():
        packed = model(tokens, positions)
        torch.testing.assert_close(packed[:, :8], alone(tokens[:, :8]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed[:, 8:], alone(tokens[:, 8:]), rtol=1e-5, atol=1e-5)
        changed = tokens.clone()
        changed[:, :8] = (changed[:, :8] + 7) % 250
        torch.testing.assert_close(model(changed, positions)[:, 8:], packed[:, 8:], rtol=0, atol=1e-5)
        plain = alone(tokens)
        assert (plain[:, 8:] - packed[:, 8:]).abs().max() > 1e-2, "without isolation they do see each other"


def test_rotated_products_depend_on_the_distance_only() -> None:
    for pairs in ("half", "interleaved"):
        rope = Rope(Rope.Config(pairs=pairs, fraction=0.5), 32)
        generator = torch.Generator().manual_seed(1)
        q, k = torch.randn(2, 1, 9, 4, 32, generator=generator)
        rope.tables(2048, torch.device("cpu"))
        scores = []
        for shift in (0, 1000):
            a, b = rope.rotate(q, k, torch.arange(9)[None] + shift)
            scores.append(torch.einsum("bihe,bjhe->bhij", a, b))
        torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a[..., 16:], q[..., 16:], rtol=0, atol=0)


def test_rotation_follows_the_formula_in_both_pair_layouts() -> None:
    """Pair t of 2 is turned by m base^(-2 t / 4): by m and by m / 10 for base 100."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4).expand(1, 3, 1, 4)
    positions = torch.arange(3)[None]

    def turned(a: float, b: float, angle: float) -> tuple[float, float]:
        return a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)

    half, _ = Rope(Rope.Config(base=100.0), 4).rotate(x, x, positions)
    interleaved, _ = Rope(Rope.Config(base=100.0, pairs="interleaved"), 4).rotate(x, x, positions)
    for m in range(3):
        a0, b0 = turned(1.0, 3.0, m)
        a1, b1 = turned(2.0, 4.0, m / 10)
        assert half[0, m, 0].tolist() == pytest.approx([a0, a1, b0, b1], rel=1e-6)
        a0, b0 = turned(1.0, 2.0, m)
        a1, b1 = turned(3.0, 4.0, m / 10)
        assert interleaved[0, m, 0].tolist() == pytest.approx([a0, b0, a1, b1], rel=1e-6)


def test_longest_wavelengths() -> None:
    """54,410 positions for base 1e4 and width 128; 2.559e6 for base 5e5."""
    assert longest_wavelength(Rope.Config(base=1e4), 128) == pytest.approx(54410, abs=1)
    assert longest_wavelength(Rope.Config(base=5e5), 128) == pytest.approx(2.559e6, rel=1e-3)


def test_tables_stay_fp32_and_exact_in_a_bf16_model() -> None:
    settings = small()
    model = Transformer(settings, seed=1)
    model(torch.zeros(1, 64, dtype=torch.long))
    model.bfloat16()
    model(torch.zeros(1, 64, dtype=torch.long))
    attention = model.layers[1].attention
    cos, sin = attention.position.tables(64, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[63, 1].item() == pytest.approx(math.cos(63 * 5000.0 ** (-2 / 20)), abs=1e-6)


def test_a_zeroed_head_gives_the_logarithm_of_the_vocabulary() -> None:
    from megamodel.loss import cross_entropy

    model = Transformer(small(), seed=1)
    (head,) = [p for p in model.parameters() if pieces_of(p)[0].name == "head.weight"]
    head.data.zero_()
    tokens = torch.randint(250, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        loss, _, _ = cross_entropy(model(tokens), tokens)
    assert loss.mean().item() == pytest.approx(5.52146, abs=1e-5)

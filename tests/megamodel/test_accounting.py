"""Parameter counts against published numbers and transformers; FLOPs against a sum written out by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from checkpoints.hf.exporting import choose
from conf.typed import parse
from megamodel.accounting import flops_per_token, mean_keys, parameter_count
from megamodel.attention import GroupedAttention
from megamodel.config import Model
from megamodel.feedforward import FeedForward
from megamodel.model import Transformer
from megamodel.norm import Norm
from megamodel.position import Rope

PRESETS = Path(__file__).resolve().parents[2] / "conf" / "model"
PUBLISHED = {
    "transformer2017": 37_846_016,
    "gpt2": 124_439_808,
    "gpt3_175b": 174_604_259_328,
    "gptj_6b": 6_050_882_784,
    "gpt_neox_20b": 20_554_567_680,
    "opt_6b7": 6_658_473_984,
    "bloom_7b1": 7_069_016_064,
    "palm_540b": 540_356_474_880,
    "llama1_7b": 6_738_415_616,
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "qwen2_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "gemma1_7b": 8_537_680_896,
    "gemma2_9b": 9_241_705_984,
    "gemma3_12b": 11_766_034_176,
    "olmo1_7b": 6_888_095_744,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "falcon_7b": 6_921_720_704,
    "command_r": 34_980_831_232,
    "command_a": 111_057_580_032,
    "phi3_mini": 3_821_079_552,
    "nemotron4_15b": 15_628_775_424,
    "smollm2_135m": 134_515_008,
    "smollm3_3b": 3_075_098_624,
    "gpt_oss_20b": 20_914_757_184,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "olmoe_7b": 6_919_161_856,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
}
NOT_IN_TRANSFORMERS = ("transformer2017", "palm_540b")
OURS = {"tiny": (950_000, 1_050_000), "small": (9_500_000, 10_600_000)}

# The model of the speed benchmark.
FIXED = Model(
    vocab_size=32000,
    d_model=512,
    n_layers=8,
    tie_embeddings=False,
    attention=GroupedAttention.Config(n_heads=8, n_kv_heads=4, head_width=64),
    feedforward=FeedForward.Config(d_ff=1376),
)


def preset(name: str) -> Model:
    raw: Any = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    return parse(Model, raw)


def reference(model: Model, device: str = "meta") -> torch.nn.Module:
    """transformers' model of the same settings."""
    assert isinstance(model.position, Rope.Config)
    fields = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.attention.n_heads,
        "num_key_value_heads": model.attention.n_kv_heads,
        "head_dim": model.attention.head_width,
        "intermediate_size": model.feedforward.d_ff,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "eager",
    }
    with torch.device(device):
        if model.attention.window is None:
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
        fields["sliding_window"] = model.attention.window
        return transformers.MistralForCausalLM(transformers.MistralConfig(**fields))


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == {*PUBLISHED, *OURS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    assert parameter_count(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in NOT_IN_TRANSFORMERS])
def test_the_size_is_that_of_transformers(name: str) -> None:
    """The preset as a config.json, and the model that transformers makes of it."""
    _, fields = choose(preset(name), None, context=None)
    config = transformers.AutoConfig.for_model(**fields)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in theirs.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", OURS)
def test_small_presets_have_their_size_and_it_is_the_models(name: str) -> None:
    model = preset(name)
    low, high = OURS[name]
    assert low <= parameter_count(model) <= high
    assert sum(p.numel() for p in Transformer(model).parameters()) == parameter_count(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_count_is_that_of_the_weights(tied: bool, norm: Any, gated: bool) -> None:
    model = Model(
        vocab_size=64,
        d_model=24,
        n_layers=3,
        tie_embeddings=tied,
        norm=Norm(kind=norm),
        attention=GroupedAttention.Config(n_heads=4, n_kv_heads=2, head_width=10),
        feedforward=FeedForward.Config(d_ff=40, gated=gated),
    )
    assert sum(p.numel() for p in Transformer(model).parameters()) == parameter_count(model)


def test_architectures_are_the_published_ones() -> None:
    """What a parameter count cannot tell: the rotary base, the window, the epsilon."""
    expected = {
        "llama2_7b": (10000, None, 1e-5),
        "llama3_8b": (500000, None, 1e-5),
        "llama3_70b": (500000, None, 1e-5),
        "mistral_7b": (10000, 4096, 1e-5),
        "smollm2_135m": (100000, None, 1e-5),
    }
    for name, values in expected.items():
        model = preset(name)
        assert isinstance(model.position, Rope.Config)
        assert (model.position.base, model.attention.window, model.norm.eps) == values
        assert (model.position.fraction, model.position.pairs) == (1.0, "half")
        assert (model.norm.kind, model.layout, model.feedforward.activation) == ("rmsnorm", "pre", "silu")


def test_flops_of_one_model_by_hand() -> None:
    """q and output 2 x 512 x 512, k and v 2 x 512 x 256, feed-forward 3 x 512 x 1376, head 32000 x 512."""
    flops = flops_per_token(FIXED, 512)
    assert flops.projections == 2 * 8 * (2 * 262_144 + 2 * 131_072) == 12_582_912
    assert flops.feedforward == 2 * 8 * 2_113_536 == 33_816_576
    assert flops.attention == 8 * 2 * (2 * 8 * 64) * 256 == 4_194_304
    assert flops.head == 2 * 16_384_000 == 32_768_000
    assert flops.forward == 83_361_792
    assert flops.training == 250_085_376  # 250.1 MFLOP


def test_flops_agree_with_a_counted_forward_pass() -> None:
    """torch counts every product of transformers' model; eager attention computes the masked half too."""
    model = Model(
        vocab_size=200,
        d_model=64,
        n_layers=3,
        attention=GroupedAttention.Config(n_heads=4, n_kv_heads=2, head_width=24),
        feedforward=FeedForward.Config(d_ff=112),
    )
    length = 96
    with FlopCounterMode(display=False) as counter:
        reference(model, "cpu")(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    flops = flops_per_token(model, length)
    assert counter.get_total_flops() == length * (flops.forward + flops.attention)


def test_a_window_is_counted_where_it_is_smaller_than_the_sequence() -> None:
    assert mean_keys(1000, None) == mean_keys(1000, 1000) == mean_keys(1000, 5000) == 500
    # 100 queries fill the window up (50 keys on average), 900 have all of its 100 keys.
    assert mean_keys(1000, 100) == pytest.approx((100 * 50 + 900 * 100) / 1000)
    mistral = preset("mistral_7b")
    assert flops_per_token(mistral, 4096).attention == 4 * 32 * 4096 * 2048
    assert flops_per_token(mistral, 8192).attention == pytest.approx(4 * 32 * 4096 * (4096 * 0.75))

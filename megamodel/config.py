"""The architecture: every choice that published models made is a setting here or in an axis file."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from conf.typed import config, setting, union
from megamodel.attend import Sparse
from megamodel.attention import GroupedAttention, narrowed
from megamodel.dropout import Dropout
from megamodel.feedforward import FeedForward
from megamodel.latent import LatentAttention
from megamodel.moe import Dense, ExpertsConfig, Routed
from megamodel.norm import Norm
from megamodel.position import Buckets, Learned, PositionConfig, Rope, rotated_width

AttentionConfig = Annotated[GroupedAttention.Config | LatentAttention.Config, union("kind")]
Layout = Literal["pre", "post", "double", "output", "parallel_shared", "parallel_two"]


@config
class Initial:
    """Initial weights: normal, fixed std or by fan-in; each logical tensor from its own key."""

    std: float | None = setting(
        None, on_resume="free", help="standard deviation of all matrices; null: 1 / sqrt(fan-in)"
    )
    scale_outputs: bool = setting(
        True, on_resume="free", help="divide the sublayers' output matrices by sqrt(2 n_layers)"
    )


@config
class Embedding:
    """What happens to an embedding before the first block: x scale, + position, norm, dropout."""

    scale: float = setting(1.0, on_resume="must_equal", help="factor on the embedding (Gemma: sqrt(d_model))")
    norm: bool = setting(False, on_resume="must_equal", help="a norm right after the embedding (BLOOM)")


@config
class Logits:
    """What happens to the product with the head: + bias, x scale, cap."""

    scale: float = setting(1.0, on_resume="must_equal", help="factor on the logits")
    softcap: float | None = setting(None, on_resume="must_equal", help="c tanh(logit / c); null: none")
    bias: bool = setting(False, on_resume="must_equal", help="a bias for each token of the vocabulary")

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"model.logits.softcap ({self.softcap}) must be above 0, or null for none")


@config
class LayerKind:
    """How a layer of this kind differs from model.attention and model.position."""

    window: int | None = setting(None, on_resume="must_equal", help="their window; null: all keys")
    sparse: Sparse = setting("none", on_resume="must_equal", help="the sparse pattern of its layers")
    position: PositionConfig | None = setting(
        None, on_resume="must_equal", help="the positions of its layers; null: model.position"
    )

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"the window of a layer kind ({self.window}) must be at least 1, or null")


@dataclass(frozen=True)
class LayerSettings:
    """One layer, all told. experts: None for the dense feed-forward."""

    attention: GroupedAttention.Config | LatentAttention.Config
    position: PositionConfig
    experts: Routed | None


@config
class Model:
    """A decoder. The defaults are the demo model of about 10M parameters, conf/model/small.yaml."""

    vocab_size: int = setting(2048, on_resume="must_equal", help="true vocabulary, without padding")
    d_model: int = setting(384, on_resume="must_equal", help="width of the residual stream")
    n_layers: int = setting(6, on_resume="must_equal", help="blocks")
    layout: Layout = setting("pre", on_resume="must_equal", help="where the norms and the sums stand")
    attention: AttentionConfig = setting(
        factory=GroupedAttention.Config, on_resume="must_equal", help="attention"
    )
    feedforward: FeedForward.Config = setting(
        factory=FeedForward.Config, on_resume="must_equal", help="feed-forward"
    )
    experts: ExpertsConfig = setting(
        factory=Dense, on_resume="must_equal", help="mixture of experts instead of the feed-forward"
    )
    norm: Norm = setting(factory=Norm, on_resume="must_equal", help="norms of the blocks and the last one")
    position: PositionConfig = setting(factory=Rope.Config, on_resume="must_equal", help="positions")
    kinds: dict[str, LayerKind] = setting(
        factory=dict, on_resume="must_equal", help="kinds of layers by name, for model.pattern"
    )
    pattern: list[str] = setting(
        factory=list, on_resume="must_equal", help="kind of each layer, repeated; []: all by model.attention"
    )
    residual_scale: float = setting(
        1.0, on_resume="must_equal", help="factor on every sublayer's output before its sum"
    )
    embedding: Embedding = setting(factory=Embedding, on_resume="must_equal", help="after the embedding")
    logits: Logits = setting(factory=Logits, on_resume="must_equal", help="after the head")
    tie_embeddings: bool = setting(True, on_resume="must_equal", help="the head is the embedding matrix")
    z_loss: float = setting(0.0, on_resume="free", help="weight of (log Z)^2 per valid token; 1e-4 is usual")
    dropout: Dropout = setting(factory=Dropout, on_resume="needs_override", help="dropout; 0 by default")
    initial: Initial = setting(factory=Initial, on_resume="free", help="initial weights")

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.d_model, self.n_layers) < 1:
            raise ValueError(
                f"model.vocab_size ({self.vocab_size}), model.d_model ({self.d_model}) and model.n_layers "
                f"({self.n_layers}) must be at least 1"
            )
        if self.z_loss < 0:
            raise ValueError(f"model.z_loss ({self.z_loss}) must not be negative; 0 is off")
        for problem in _impossible(self):
            raise ValueError(problem)

    def layer(self, number: int) -> LayerSettings:
        """The settings of a layer, from 0."""
        attention, position = self.attention, self.position
        if self.pattern:
            kind = self.kinds[self.pattern[number % len(self.pattern)]]
            attention = narrowed(attention, window=kind.window, sparse=kind.sparse)
            position = position if kind.position is None else kind.position
        routed = isinstance(self.experts, Routed) and number not in self.experts.dense_layers
        return LayerSettings(attention, position, self.experts if routed else None)  # type: ignore[arg-type]

    @property
    def layers(self) -> list[LayerSettings]:
        """The settings of all layers."""
        return [self.layer(number) for number in range(self.n_layers)]

    @property
    def has_final_norm(self) -> bool:
        return self.layout != "post"

    @property
    def longest(self) -> int | None:
        """The longest sequence that the positions can tell apart; None: any."""
        return self.position.max_positions if isinstance(self.position, Learned.Config) else None

    @property
    def shares_over_layers(self) -> bool:
        """Whether layers share parameters, so that they cannot stand on several stages."""
        return any(isinstance(x.position, Buckets.Config) and x.position.shared for x in self.layers)


def _impossible(model: Model) -> Iterator[str]:
    """What cannot be, one line each."""
    unknown = sorted(set(model.pattern) - set(model.kinds))
    if unknown:
        yield (
            f"model.pattern names {', '.join(unknown)}, but model.kinds has "
            f"{', '.join(model.kinds) or 'none'}; define it there"
        )
        return
    unused = sorted(set(model.kinds) - set(model.pattern))
    if unused:
        yield f"model.kinds defines {', '.join(unused)}, which model.pattern does not use; leave it out"
    attention = model.attention
    for name in ("window", "sparse"):
        if model.pattern and getattr(attention, name) != getattr(GroupedAttention.Config, name):
            yield (
                f"model.attention.{name} ({getattr(attention, name)}) has no effect beside model.pattern; "
                "give it to the kinds of layers"
            )
    for name, kind in model.kinds.items():
        if kind.position is not None and kind.position.kind in ("learned", "sinusoidal"):
            yield (
                f"model.kinds.{name}.position ({kind.position.kind}) is added to the embedding, which no "
                "layer has to itself; set model.position instead"
            )
    for settings in model.layers:
        if isinstance(settings.position, Rope.Config):
            rotated_width(settings.position, attention.rotary_width)
    if isinstance(model.experts, Routed):
        beyond = [i for i in model.experts.dense_layers if not 0 <= i < model.n_layers]
        if beyond:
            yield f"model.experts.dense_layers {beyond} are not among the {model.n_layers} layers"

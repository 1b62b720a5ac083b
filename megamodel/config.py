"""The architecture: every choice that published models made is a setting here or in an axis file."""

from typing import Annotated, Literal

from conf.typed import config, setting, union
from megamodel.attention import GroupedAttention
from megamodel.dropout import Dropout
from megamodel.feedforward import FeedForward
from megamodel.norm import Norm
from megamodel.position import Position, Rope

AttentionConfig = GroupedAttention.Config  # a union by `kind` as variants arrive
PositionConfig = Annotated[Rope.Config | Position.Config, union("kind")]


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
class Model:
    """A decoder. The defaults are the demo model of about 10M parameters, conf/model/small.yaml."""

    vocab_size: int = setting(2048, on_resume="must_equal", help="true vocabulary, without padding")
    d_model: int = setting(384, on_resume="must_equal", help="width of the residual stream")
    n_layers: int = setting(6, on_resume="must_equal", help="blocks")
    layout: Literal["pre"] = setting(
        "pre", on_resume="must_equal", help="where the norms stand: h = x + A(N1 x); y = h + F(N2 h)"
    )
    attention: AttentionConfig = setting(
        factory=GroupedAttention.Config, on_resume="must_equal", help="attention"
    )
    feedforward: FeedForward.Config = setting(
        factory=FeedForward.Config, on_resume="must_equal", help="feed-forward"
    )
    norm: Norm = setting(factory=Norm, on_resume="must_equal", help="norms of the blocks and the last one")
    position: PositionConfig = setting(factory=Rope.Config, on_resume="must_equal", help="positions")
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

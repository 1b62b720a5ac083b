"""The fields of a config.json: each is used exactly once, and what nobody used is an error that names it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

REQUIRED = object()

# No influence on the logits: bookkeeping, text generation, training hints, names of special tokens.
WITHOUT_EFFECT = frozenset(
    """
    _name_or_path _commit_hash architectures auto_map model_type transformers_version dtype torch_dtype
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id prefix
    use_cache initializer_range init_std output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux
    pretraining_tp torchscript return_dict return_dict_in_generate output_attentions output_hidden_states
    output_scores id2label label2id problem_type finetuning_task task_specific_params tokenizer_class
    use_bfloat16 pruned_heads chunk_size_feed_forward summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj classifier_dropout layerdrop max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values begin_suppress_tokens
    suppress_tokens exponential_decay_length_penalty gradient_checkpointing attn_implementation
    _attn_implementation cache_implementation is_decoder n_ctx rope_ratio ep_size head_type
    """.split()
)
ONLY = {  # fields of the base class that must have these values, where they are given at all
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "quantization_config": (None,),
    "tf_legacy_loss": (False,),
    "per_layer_config": (None,),
}


class Fields:
    """A config.json that knows what was taken from it."""

    def __init__(
        self,
        family: str,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """aliases: other names of fields -> the names that are taken, as transformers' class has them."""
        self.family, self.defaults = family, defaults
        self.raw = renamed(raw, aliases)
        self.taken: set[str] = set()
        self.last = "model_type"  # the field that was taken last, for an error that knows no name

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, or the default of its class; ValueError when it has neither."""
        self.taken.add(name)
        self.last = name
        if name in self.raw:
            return self.raw[name]
        if name in self.defaults:
            return self.defaults[name]
        if default is REQUIRED:
            raise ValueError(
                f"config.json of a {self.family} model has no field {name}; it cannot be guessed"
            )
        return default

    def count(self, name: str, default: Any = REQUIRED) -> int:
        """A field that counts: a whole number of at least 1; ValueError names any other."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {name} = {value!r} must be a whole number of at least 1")
        return value

    def agree(self, name: str, value: Any, meant: str) -> None:
        """Refuse a field that transformers does not read here, unless it says what holds anyway."""
        if name in self.taken or name not in self.raw:
            return
        said = self.take(name)
        if said is not None and said != value:
            raise ValueError(
                f"config.json: {name} = {said!r} is not read for {self.family} by transformers, which takes "
                f"{meant} = {value!r}; remove {name}, or make it the same"
            )

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse any other value, where one is given."""
        self.taken.add(name)
        if name in self.raw and self.raw[name] not in allowed:
            values = " or ".join(repr(value) for value in allowed)
            raise ValueError(
                f"config.json: {name} = {self.raw[name]!r} is not supported for {self.family}, only {values}"
            )

    def finish(self) -> None:
        """Refuse what nobody took."""
        for name, allowed in ONLY.items():
            if name not in self.taken:
                self.only(name, allowed)
        left = sorted(set(self.raw) - self.taken - WITHOUT_EFFECT)
        if left:
            listed = ", ".join(f"{name} = {self.raw[name]!r}" for name in left)
            raise ValueError(
                f"config.json has fields that are not understood for {self.family}: {listed}; "
                "reading the model without them might give other logits"
            )


def renamed(raw: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """config.json with one name for each thing; ValueError when two names say different things."""
    found = dict(raw)
    for alias, name in aliases.items():
        if (value := found.pop(alias, None)) is None:
            continue
        if found.setdefault(name, value) != value:
            raise ValueError(
                f"config.json: {alias} = {value!r} and {name} = {found[name]!r} are two names of the same "
                "field; remove one"
            )
    return found


def put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path of a nested dictionary."""
    *parents, last = path.split(".")
    for name in parents:
        raw = raw.setdefault(name, {})
    raw[last] = value


def get(tree: Any, path: str) -> Any:
    """The value at a dotted path of a tree of settings."""
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree

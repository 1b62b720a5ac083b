"""All families, by the model_type of their config.json; exports try them in this order."""

from checkpoints.hf.families import classic, experts, llama_like
from checkpoints.hf.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*llama_like.FAMILIES, *classic.FAMILIES, *experts.FAMILIES)
}

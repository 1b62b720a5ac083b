"""All families, by the model_type of their config.json; exports try them in this order."""

from checkpoints.hf.families import classic, deepseek, experts, layer_norm, llama_like
from checkpoints.hf.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for table in (llama_like, layer_norm, classic, experts, deepseek)
    for family in table.FAMILIES
}

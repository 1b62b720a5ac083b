"""The commands `import-hf` and `export-hf`: models to and from transformers."""

import json
from pathlib import Path
from typing import Literal

import torch

from checkpoints.hf import export_hf, import_hf
from checkpoints.imported import save_imported
from conf.saved import to_yaml
from conf.schema import plain
from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.opening import open_model
from launcher.rundirectory import write_atomic
from megamodel.accounting import parameter_count

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@config
class Import:
    """A model of transformers as a checkpoint."""

    source: str = setting("", on_resume="free", help="directory with config.json and safetensors")
    target: str = setting("", on_resume="free", help="new directory for the checkpoint")
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)


@config
class Export:
    """A checkpoint as a model of transformers."""

    source: str = setting("runs/run", on_resume="free", help="directory of a run or of a step of one")
    target: str = setting("", on_resume="free", help="new directory for the model")
    family: str | None = setting(
        None, on_resume="free", help="model_type; null: the first that can say the architecture"
    )
    dtype: Literal["fp32", "bf16", "fp16"] = setting("fp32", on_resume="free", help="of the stored tensors")
    context: int | None = setting(
        None, on_resume="free", help="max_position_embeddings; null: the training's sequence length"
    )
    tokenizer: str | None = setting(
        None, on_resume="free", help="tokenizer file or directory to put beside it; null: the run's own"
    )
    format: Format = setting("text", on_resume="free", help=FORMAT_HELP)


def import_model(config: Import) -> int:
    """The command import-hf."""
    if not config.source or not config.target:
        raise ValueError("import-hf needs source=DIRECTORY of a model and target=DIRECTORY to write")
    target = Path(config.target).expanduser()
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"target={target} is not empty; give another directory")
    model = import_hf(config.source, torch.float32)
    values = {"model": plain(model.settings)}
    path = save_imported(model, target, values)
    file = Path(config.source).expanduser() / "tokenizer.json"
    if file.exists():
        values["tokenizer"] = {"path": str(file.absolute())}
    write_atomic(target / "config.yaml", to_yaml(values))
    count = parameter_count(model.settings)
    facts = {"checkpoint": str(path), "config": str(target / "config.yaml"), "parameters": count}
    go_on = f"python -m launcher train config={target / 'config.yaml'} resume={path} run.name=NAME data=..."
    print(json.dumps(facts) if config.format == "json" else f"{count:,} parameters in {path}\ngo on: {go_on}")
    return DONE


def export_model(config: Export) -> int:
    """The command export-hf."""
    if not config.target:
        raise ValueError("export-hf needs target=DIRECTORY for the model")
    opened = open_model(config.source, device=torch.device("cpu"))
    tokenizer = opened.tokenizer
    family = export_hf(
        opened.model,
        config.target,
        family=config.family,
        dtype=DTYPES[config.dtype],
        context=config.context or opened.context,
        tokenizer=config.tokenizer or opened.tokenizer_file,
        special_tokens={"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id},
    )
    facts = {"directory": config.target, "family": family, "source": str(opened.where)}
    print(json.dumps(facts) if config.format == "json" else f"{opened.where} as {family} in {config.target}")
    return DONE

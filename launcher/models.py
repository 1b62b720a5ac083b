"""The commands `import-hf` and `export-hf`: models to and from transformers."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoints.hf import export_hf, import_hf
from checkpoints.hf.beside import EXTRA, KEPT, copy_tokenizer, tokenizer_file, write_json
from checkpoints.imported import save_imported
from conf.saved import to_yaml
from conf.schema import plain
from conf.typed import config, setting
from launcher.config import FORMAT_HELP, Format
from launcher.failure import DONE
from launcher.opening import TOKENIZERS, open_weights, tokenizer_of
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
    source = Path(config.source).expanduser()
    model = import_hf(source, torch.float32)
    values: dict[str, Any] = {"model": plain(model.settings)}
    context = model.beside.context or model.settings.longest
    if context is not None:
        values["train"] = {"sequence_length": context}
    tokenizer = tokenizer_file(source)
    if tokenizer is not None:
        copies = target / TOKENIZERS
        copy_tokenizer(source, copies)
        write_json(copies / KEPT, model.beside.plain())
        values["tokenizer"] = {"path": str((copies / tokenizer.name).absolute())}
    path = save_imported(model, target, values, {EXTRA: model.beside.plain()})
    write_atomic(target / "config.yaml", to_yaml(values))
    count = parameter_count(model.settings)
    facts = {"checkpoint": str(path), "config": str(target / "config.yaml"), "parameters": count}
    given = "" if tokenizer else " tokenizer=file tokenizer.path=FILE"
    go_on = f"python -m launcher train config={target / 'config.yaml'} resume={path} run.name=NAME data=..."
    if config.format == "json":
        print(json.dumps(facts))
        return DONE
    print(f"{count:,} parameters in {path}")
    if tokenizer is None:
        print(f"{source} has no tokenizer: whatever reads text needs tokenizer=FILE")
    print(f"go on: {go_on}{given}")
    return DONE


def export_model(config: Export) -> int:
    """The command export-hf."""
    if not config.target:
        raise ValueError("export-hf needs target=DIRECTORY for the model")
    opened = open_weights(config.source)
    tokenizer = Path(config.tokenizer).expanduser() if config.tokenizer else opened.tokenizer_file
    if tokenizer is not None and not tokenizer.exists():
        raise ValueError(f"tokenizer={tokenizer} does not exist; give a file or a directory with one")
    special = None
    if opened.tree is not None and opened.beside is None:
        own, file = tokenizer_of(opened)
        special, tokenizer = {"eos_token_id": own.eos_id, "bos_token_id": own.bos_id}, tokenizer or file
    elif opened.tree is not None:
        tokenizer = tokenizer or tokenizer_of(opened)[1]
    family = export_hf(
        opened.model.eval(),
        config.target,
        family=config.family,
        dtype=DTYPES[config.dtype],
        context=config.context or opened.context,
        tokenizer=tokenizer,
        special_tokens=special,
        beside=opened.beside,
    )
    facts = {
        "directory": config.target,
        "family": family,
        "source": str(opened.where),
        "tokenizer": str(tokenizer) if tokenizer else None,
    }
    if config.format == "json":
        print(json.dumps(facts))
        return DONE
    print(f"{opened.where} as {family} in {config.target}")
    if tokenizer is None:
        print(
            f"{config.target} has no tokenizer, as {opened.where} has none; tokenizer=FILE puts one beside it"
        )
    return DONE

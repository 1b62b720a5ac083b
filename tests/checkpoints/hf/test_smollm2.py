"""A real pretrained model: in from transformers' format, the same numbers, and on with training, split."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer

from checkpoints.hf import import_hf
from launcher.__main__ import main
from megamodel.generate import Sampling, generate_batch
from tests.checkpoints.hf.smollm2 import FILE, model_directory
from tests.spawn import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.exists(), reason="the model is not there; `make data-smollm2` fetches it"),
]
ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("smollm2") / "hf")


@pytest.fixture(scope="module")
def peer(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_loss_and_greedy_continuation_equal_transformers(
    directory: Path, peer: transformers.PreTrainedModel
) -> None:
    model = import_hf(directory).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        ours, theirs = model(ids), peer(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())
    losses = [float(F.cross_entropy(logits[0, :-1], ids[0, 1:])) for logits in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] < 4
    prompt = tokenizer.encode("The capital of France is").ids
    (written,) = generate_batch(model, [prompt], max_tokens=24, sampling=Sampling(temperature=0.0))
    wanted = peer.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    assert written == wanted[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(written)


@pytest.mark.parametrize(("world", "layout"), [(3, "parallel.tp=3"), (2, "parallel.pp=2")])
def test_training_goes_on_from_it(
    world: int, layout: str, directory: Path, peer: transformers.PreTrainedModel, ranks: Ranks
) -> None:
    """Nine heads and three key/value heads over three ranks; the first loss is the pretrained one."""
    place = directory.parent
    (place / "text.txt").write_text(TEXT)
    imported = place / "imported"
    if not imported.exists():
        assert main(["import-hf", f"source={directory}", f"target={imported}"]) == 0
    name = layout.replace("parallel.", "").replace("=", "")
    arguments = ["train", "model=smollm2_135m", f"resume={imported}", f"run.dir={place / name}", layout]
    arguments += ["data=files", f"data.paths=[{place / 'text.txt'}]", f"data.cache={place / 'cache'}"]
    arguments += ["data.held_out_fraction=0", "tokenizer=file", f"tokenizer.path={directory}/tokenizer.json"]
    arguments += ["train.steps=20", "train.sequence_length=64", "train.global_batch=4", "optim.lr=1e-4"]
    arguments += ["schedule.warmup_steps=2", "evaluate.batches=0", "sample.max_tokens=0", "hardware=cpu"]
    arguments += ["checkpoint.every=0", "checkpoint.snapshot_every=0", "monitor=skip"]
    for finished in ranks.launch(world, arguments, place):
        assert finished.code == 0, finished.stderr
    lines = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/train"] for line in lines]
    assert len(losses) == 20 and 2 < losses[0] < 6  # from nothing it would be ln 49152 = 10.8
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5

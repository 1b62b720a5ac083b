"""A run written by hand, so that all of its times, fates and events are known."""

import json
from pathlib import Path
from typing import Any

from conf.saved import to_yaml
from conf.schema import plain
from conf.typed import parse
from launcher.config import Config

MODEL = {
    "vocab_size": 64,
    "d_model": 32,
    "n_layers": 1,
    "attention": {"n_heads": 2, "n_kv_heads": 2, "head_width": 16},
}
HOSTILE = "</script><script>alert(1)</script><img src=http://evil/x.png onerror=alert(2)>'\"&\u2028"


def line(step: int, attempt: int, segment: int, wall: float, verdict: int = 0, **more: Any) -> dict[str, Any]:
    """A record whose step took two seconds. Names in `more` have __ for the slash."""
    known = {
        "step": step,
        "attempt": attempt,
        "segment": segment,
        "monitor/verdict": verdict,
        "lr": 1e-3 / 3,
        "tokens/total": 8 * step,
        "time/step_seconds": 2.0,
        "time/wall": 1000.0 + wall,
        "loss/train": 5.0 - 0.1 * attempt,
        "norm/grad": 1.0 / attempt,
        "speed/tokens_per_second": 100.0 + attempt,
        "memory/peak_bytes": 1 << 20,
    }
    return known | {name.replace("__", "/"): value for name, value in more.items()}


# Started at 1000; a rewind after attempt 4, to step 1; killed after attempt 6, started again at 1040 from
# step 2; the last save is complete at 1053.
LINES = [
    line(1, 1, 0, 7, time__startup_seconds=5.0),
    line(2, 2, 0, 10),  # one second of something else before its two
    line(3, 3, 0, 16, time__evaluate_seconds=3.0, time__checkpoint_stall_seconds=0.5, loss__eval=4.5),
    line(4, 4, 0, 18, verdict=3, loss__train="NaN", norm__grad="Infinity"),
    line(2, 5, 1, 25),  # five seconds of going back
    line(3, 6, 1, 28),
    line(3, 7, 2, 48, time__startup_seconds=6.0),
    line(4, 8, 2, 51, verdict=1, time__sample_seconds=1.0, loss__eval=4.25),
]
FATES = [0, 2, 2, 1, 0, 3, 0, 0]  # counts, not applied: 1, undone by the rewind: 2, by the restart: 3
SECONDS = {
    "training": 8.0,
    "rewound": 4.0,
    "restarted": 2.0,
    "skipped": 2.0,
    "responding": 5.0,
    "checkpoints": 0.5 + 2.0,
    "evaluation": 3.0,
    "samples": 1.0,
    "startup": 11.0,
    "down": 12.0,
    "other": 1.0 + 0.5 + 1.0,
}
EVENTS: list[dict[str, Any]] = [
    {
        "time": 1018.1,
        "attempt": 4,
        "step": 4,
        "event": "rewind",
        "verdict": "REWIND",
        "reason": f"jump: loss +3.97 {HOSTILE}",
        "onset": 3,
        "alarm": 4,
        "signals": {"loss": "NaN", "norm": 3.5},
        "worst": [{"sample": 24, "loss": 9.5, "text": HOSTILE}],
        "sources": [{"path": f"/data/{HOSTILE}.txt", "record": 1, "byte_start": 0, "byte_stop": 9}],
        "snapshot_step": 1,
        "snapshot": "memory",
        "skipped": [16, 40],
        "lr_before": 1e-3,
        "lr_after": 5e-4,
        "budget_left": 9,
        "budget": None,
    },
    {"time": 1046.0, "attempt": 6, "step": 2, "event": "resume", "reason": "from step-2"},
    {"time": 1053.0, "attempt": 8, "step": 4, "event": "save", "path": "x", "reason": "complete"},
]


def write_run(path: Path, lines: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    """The run in a directory; its last record is half written, as while it goes on."""
    path.mkdir(parents=True)
    tree = parse(Config, {"run": {"name": path.name}, "model": MODEL} | settings)
    (path / "config.yaml").write_text(to_yaml(plain(tree)))
    text = "".join(json.dumps(each) + "\n" for each in (LINES if lines is None else lines))
    (path / "metrics.jsonl").write_text(text + '{"step": 99, "monitor/verd')
    events = [{k: v for k, v in event.items() if v is not None} for event in EVENTS]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "status.json").write_text('{"state": "finished", "reason": "", "step": 4}')
    (path / "versions.json").write_text(
        json.dumps({"python": "3.11", "device": "cpu", "processes": 1, "command": ["train", HOSTILE]})
    )
    sample = {"time": 1052.0, "step": 4, "attempt": 8, "tokens": 32, "prompt": "", "text": HOSTILE}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    layers = {"step": 2, "attempt": 2, "layers": ["embedding", "blocks.0"]}
    norms = {"gradient_norm": [0.5, "NaN"], "weight_norm": [2.0, 3.0]}
    (path / "layers.jsonl").write_text(json.dumps(layers | norms) + "\n")
    return path

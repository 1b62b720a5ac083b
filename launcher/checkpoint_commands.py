"""The commands that work on checkpoints alone: checkpoints, verify, inspect, reshape."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from checkpoints import examine
from checkpoints.examine import Listed, Row
from checkpoints.objects import place
from checkpoints.reshape import reshape as move
from conf.schema import plain
from conf.typed import config, parse, setting
from launcher.failure import DONE, FAILED
from launcher.layouts import pieces_by_rank
from launcher.metrics import encoded
from launcher.progress import duration
from megamodel.config import Model
from parallel.config import Parallel

SOURCE = "a step's directory, a run's, or that of its checkpoints; a path or a URL"
Format = Literal["text", "json"]
FORMAT = "what is printed: text for people, or one JSON object"
KINDS = ("master", "exp_avg", "exp_avg_sq", "parameter")


@config
class ListCheckpoints:
    """What lies there."""

    source: str = setting(on_resume="free", help=SOURCE)
    format: Format = setting("text", on_resume="free", help=FORMAT)


@config
class Verify:
    """Reading everything."""

    source: str = setting(on_resume="free", help=f"{SOURCE}; of several steps each is read")
    format: Format = setting("text", on_resume="free", help=FORMAT)


@config
class Inspect:
    """One tensor, or the list of them."""

    source: str = setting(on_resume="free", help=f"{SOURCE}; of several steps the newest")
    tensor: str | None = setting(None, on_resume="free", help="name of a tensor; null: list them")
    kind: Literal["master", "exp_avg", "exp_avg_sq", "parameter"] | None = setting(
        None, on_resume="free", help="weights, first or second moment; null: all that there are"
    )
    format: Format = setting("text", on_resume="free", help=FORMAT)


@config
class Reshape:
    """From one layout to another."""

    source: str = setting(on_resume="free", help=f"{SOURCE}; of several steps the newest")
    target: str = setting(on_resume="free", help="directory or URL that gets the new checkpoint")
    parallel: Parallel = setting(factory=Parallel, on_resume="free", help="the new layout; dp is 1")
    format: Format = setting("text", on_resume="free", help=FORMAT)


def list_checkpoints(settings: ListCheckpoints) -> int:
    """The command `checkpoints`."""
    files, path = place(settings.source)
    found = [listed for root in (path / "checkpoints", path) for listed in examine.listing(files, root)]
    if not found:
        examine.directories(files, path)  # says what is wrong with the path
        found = [one for one in examine.listing(files, path.parent) if one.path == path]
    if settings.format == "json":
        print(json.dumps({"checkpoints": [_plain(listed) for listed in found]}))
    else:
        print("\n".join(table(("step", "size", "layout", "age", "held-out", "health"), map(_line, found))))
    return DONE


def _plain(listed: Listed) -> dict[str, Any]:
    return encoded({**dataclasses.asdict(listed), "path": str(listed.path)})


def _line(listed: Listed) -> tuple[str, ...]:
    layout = " ".join(f"{axis}{listed.layout[axis]}" for axis in ("tp", "pp", "dp")) if listed.layout else ""
    loss = "" if listed.held_out_loss is None else f"{listed.held_out_loss:.4f}"
    health = listed.health + (" (latest)" if listed.latest else "")
    return (
        str(listed.step),
        "" if listed.bytes is None else size_text(listed.bytes),
        layout,
        "" if listed.age_seconds is None else duration(listed.age_seconds),
        loss,
        health + (f": {listed.detail}" if listed.detail else ""),
    )


def verify(settings: Verify) -> int:
    """The command `verify`: 1 when anything is damaged."""
    files, path = place(settings.source)
    steps = examine.directories(files, path)
    root = steps[0].parent
    siblings = examine.directories(files, root) if len(steps) == 1 else steps
    sums = examine.sums_of(files, siblings)
    found = {str(step): examine.verify(files, step, sums) for step in steps}
    damaged = [step for step, rows in found.items() if any(row.state != examine.SOUND for row in rows)]
    if settings.format == "json":
        steps_plain = [
            {"path": step, "damaged": step in damaged, "files": [dataclasses.asdict(row) for row in rows]}
            for step, rows in found.items()
        ]
        print(json.dumps({"damaged": bool(damaged), "checkpoints": steps_plain}))
    else:
        print("\n".join(line for step, rows in found.items() for line in _verified(step, rows)))
        sound = len(found) - len(damaged)
        print(f"{sound} of {len(found)} checkpoints sound")
    return FAILED if damaged else DONE


def _verified(step: str, rows: Sequence[Row]) -> list[str]:
    bad = any(row.state != examine.SOUND for row in rows)
    lines = [f"{step}: {'damaged' if bad else 'sound'}"]
    body = [(row.file, f"{row.bytes:,}", row.state, row.detail) for row in rows]
    lines += [f"  {line}" for line in table(("file", "bytes", "state", ""), body)]
    for row in rows:
        if row.tensors:
            shown = ", ".join(row.tensors[:4])
            more = f" and {len(row.tensors) - 4} more" if len(row.tensors) > 4 else ""
            lines.append(f"  {row.file} touches {shown}{more}")
    return lines


def inspect(settings: Inspect) -> int:
    """The command `inspect`: statistics of one tensor, of each kind that there is."""
    files, path = place(settings.source)
    found = examine.newest(files, path)
    names = examine.tensors(found)
    if settings.tensor is None:
        listed = [
            {"name": name, "shape": list(next(iter(kinds.values())).shape), "kinds": list(kinds)}
            for name, kinds in names.items()
        ]
        rows = [(t["name"], "x".join(map(str, t["shape"])), " ".join(t["kinds"])) for t in listed]
        as_json = {"path": str(found.path), "tensors": listed}
        text = "\n".join(table(("tensor", "shape", "kinds"), rows))
        print(json.dumps(as_json) if settings.format == "json" else text)
        return DONE
    if settings.tensor not in names:
        raise ValueError(f"{found.path} has no tensor {settings.tensor}; inspect without tensor= lists them")
    there = names[settings.tensor]
    kinds = [kind for kind in KINDS if kind in there and settings.kind in (None, kind)]
    if not kinds:
        raise ValueError(f"{settings.tensor} has no {settings.kind} in {found.path}; it has {list(there)}")
    facts = {}
    for kind in kinds:
        tensor = examine.whole(files, found, settings.tensor, kind)
        facts[kind] = {"dtype": there[kind].dtype, "shape": list(tensor.shape), **examine.statistics(tensor)}
    if settings.format == "json":
        whole = {"path": str(found.path), "step": found.manifest.step, "tensor": settings.tensor}
        print(json.dumps(encoded({**whole, "kinds": facts})))
    else:
        print(f"{settings.tensor} of {found.path}")
        keys = list(dict.fromkeys(key for values in facts.values() for key in values))
        rows = [(key, *(_shown(values.get(key)) for values in facts.values())) for key in keys]
        print("\n".join(table(("", *facts), rows)))
    return DONE


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "x".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def reshape(settings: Reshape) -> int:
    """The command `reshape`."""
    files, path = place(settings.source)
    found = examine.newest(files, path)
    saved = found.manifest.configuration
    if "model" not in saved:
        raise ValueError(f"{found.path} does not say of which model it is; it cannot be reshaped")
    ranks = pieces_by_rank(parse(Model, saved["model"]), settings.parallel)
    target_files, target = place(settings.target)
    if target.absolute() == found.path.absolute().parent:
        raise ValueError(f"target ({settings.target}) holds the source; give another directory")
    layout = {"tp": settings.parallel.tp, "pp": settings.parallel.pp, "dp": 1}
    configuration = {**saved, "parallel": plain(settings.parallel)}
    written = move(files, found, target_files, target, ranks, layout=layout, configuration=configuration)
    facts = {"source": str(found.path), "target": str(written), "step": found.manifest.step, "layout": layout}
    if settings.format == "json":
        print(json.dumps(facts))
    else:
        print(f"{found.path} is in {written} at tp {layout['tp']} x pp {layout['pp']}; resume={target}")
    return DONE


def size_text(count: int) -> str:
    """Bytes in the unit that fits."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def table(head: Sequence[str], rows: Any) -> list[str]:
    """Lines with columns of equal width."""
    body = [tuple(head), *rows]
    widths = [max(len(row[i]) for row in body) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body
    ]

"""A plan for people, as tables, and for programs, as JSON with these keys.

{model: {parameters, active_parameters}, hardware, gpus, precision, sequence_length, flops_per_token: {...},
best: [layout as in `as_json`], cost, comments, serving}; published: {rows, summary}.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from launcher.plan import published
from launcher.plan.advice import TOKENS_CAVEAT, number
from launcher.plan.search import Estimate, best, faster_but_too_big, layout_dict, why_it_loses

if TYPE_CHECKING:
    from launcher.plan.command import Report

WIDTH = 118  # of tables where the terminal does not say
MOST_STAGES = 10  # that the table of memory lists before it leaves out the middle
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    return next((f"{value / size:.3g}{unit}" for size, unit in UNITS if value >= size), f"{value:.3g}")


def count(value: float) -> str:
    """Of parameters and tokens: 1.23B."""
    return next((f"{value / size:.3g}{unit}" for size, unit in COUNTS if value >= size), f"{value:.3g}")


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def as_json(report: "Report") -> dict[str, Any]:
    """Everything; bytes, seconds, FLOPs and shares as plain numbers."""
    tree, winner = report.tree, report.winner
    shown = best(report.found, tree.best)
    return {
        "model": {"parameters": report.parameters, "active_parameters": report.active},
        "hardware": dataclasses.asdict(report.machine),
        "gpus": tree.gpus,
        "precision": winner.layout.precision,
        "sequence_length": tree.train.sequence_length,
        "flops_per_token": {
            **dataclasses.asdict(report.flops),
            "forward": report.flops.forward,
            "training": report.flops.training,
        },
        "layouts_tried": len(report.found),
        "best": [estimate_json(estimate, winner) for estimate in shown],
        "cost": dataclasses.asdict(report.cost),
        "bound_by": bound_by(winner),
        "comments": [dataclasses.asdict(comment) for comment in report.comments],
        "serving": dataclasses.asdict(report.serving),
    }


def estimate_json(estimate: Estimate, winner: Estimate) -> dict[str, Any]:
    return {
        "layout": layout_dict(estimate.layout),
        "fits": estimate.verdict.fits,
        "verdict": str(estimate.verdict),
        "short_bytes": estimate.verdict.short_bytes,
        "stages": [{**stage.kinds(), "total": stage.total} for stage in estimate.stages],
        "step_seconds": estimate.time.total,
        "seconds": {**estimate.time.parts(), "data_parallel_hidden": estimate.time.hidden},
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "why": why_it_loses(estimate, winner),
    }


def bound_by(estimate: Estimate) -> str:
    """computation or communication: which of the two takes longer in a step."""
    time = estimate.time
    spoken = time.tensor + time.transfer + time.data
    return "computation" if time.compute >= spoken else "communication"


def print_report(report: "Report") -> None:
    """The plan from what was asked to what follows from it."""
    console = Console()
    console.width = max(console.width, WIDTH)

    def say(text: str = "") -> None:
        console.print(text, highlight=False, markup=False)

    tree, winner = report.tree, report.winner
    active = f" ({count(report.active)} active)" if report.active != report.parameters else ""
    say(
        f"{count(report.parameters)} parameters{active}, {report.parameters:,}; {tree.gpus} x "
        f"{report.machine.name}, {winner.layout.precision}, sequences of {tree.train.sequence_length}, "
        f"{winner.layout.global_batch} in a step "
        f"({count(winner.layout.global_batch * tree.train.sequence_length)} tokens)"
    )
    flops = report.flops
    say(
        f"{short(flops.training)}FLOP a token (forward: projections {short(flops.projections)}, attention "
        f"{short(flops.attention)}, feed-forward {short(flops.feedforward)}, head {short(flops.head)})"
    )
    say()
    if report.searched:
        console.print(layouts_table(report))
        bigger = faster_but_too_big(report.found)
        if bigger is not None:
            faster = bigger.tokens_per_second / winner.tokens_per_second - 1
            say(f"{faster:.0%} faster if it fitted: {bigger.layout}: {bigger.verdict}")
        say()
    say(f"{winner.layout}: {winner.verdict}")
    console.print(memory_table(winner))
    console.print(time_table(winner))
    say_cost(report, say)
    say()
    console.print(comments_table(report))
    say_serving(report, say)


def layouts_table(report: "Report") -> Table:
    title = f"the best of {len(report.found)} layouts, one for each tp and pp"
    table = Table(title=title, title_justify="left")
    columns = ("tp", "pp", "dp", "micro", "seq par", "recompute", "tokens/s", "MFU", "memory", "why")
    for name in columns:
        table.add_column(name, justify="left" if name in ("recompute", "why") else "right")
    for estimate in best(report.found, report.tree.best):
        layout = estimate.layout
        table.add_row(
            str(layout.tp),
            str(layout.pp),
            str(layout.dp),
            str(layout.micro_batch),
            "yes" if layout.sequence_parallel else "no",
            layout.recompute,
            count(estimate.tokens_per_second),
            f"{estimate.mfu:.1%}",
            f"{max(stage.total for stage in estimate.stages) / 1e9:.1f} GB",
            why_it_loses(estimate, report.winner),
        )
    return table


def memory_table(estimate: Estimate) -> Table:
    """Each stage; of many the first, the last and the fullest."""
    size, unit = (1e9, "GB") if estimate.stages[0].total >= 1e9 else (1e6, "MB")
    table = Table(title=f"memory of one rank, {unit} (snapshots: in host memory)", title_justify="left")
    for name in ("stage", *estimate.stages[0].kinds(), "total"):
        table.add_column(name, justify="right")
    stages = len(estimate.stages)
    listed = list(range(stages))
    if stages > MOST_STAGES:
        listed = sorted({0, 1, 2, estimate.verdict.stage, stages - 2, stages - 1})
    for index in listed:
        stage = estimate.stages[index]
        sizes = [f"{kind / size:.2f}" for kind in stage.kinds().values()]
        table.add_row(str(index), *sizes, f"{stage.total / size:.2f}")
    return table


def time_table(estimate: Estimate) -> Table:
    time = estimate.time
    title = (
        f"a step of {seconds(time.total)}: {count(estimate.tokens_per_second)} tokens/s, "
        f"MFU {estimate.mfu:.1%}, bound by {bound_by(estimate)}"
    )
    table = Table(title=title, title_justify="left")
    for name in (*time.parts(), "hidden reduction"):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*[seconds(part) for part in time.parts().values()], seconds(time.hidden))
    table.add_row(*[f"{part / time.total:.1%}" for part in time.parts().values()], "")
    return table


def say_cost(report: "Report", say: Any) -> None:
    cost, machine = report.cost, report.machine
    money = f", {cost.money:,.0f} at {machine.price_per_gpu_hour:g} a GPU-hour" if cost.money else ""
    say(
        f"{count(cost.tokens)} tokens ({cost.why}): {cost.days:.3g} days, {cost.gpu_hours:,.0f} "
        f"GPU-hours{money}"
    )
    if "active" in cost.why:
        say(f"  ({TOKENS_CAVEAT})")


def comments_table(report: "Report") -> Table:
    table = Table(title="the shape beside published ones", title_justify="left")
    for name in ("", "rule", "here", "usual", "evidence"):
        table.add_column(name)
    for comment in report.comments:
        mark = "" if comment.kept else "!"
        table.add_row(mark, comment.rule, number(comment.value), comment.usual, comment.evidence)
    return table


def say_serving(report: "Report", say: Any) -> None:
    own = report.serving
    say(
        f"serving {own.rows} x {own.length} tokens: cache {own.cache_bytes_16_bit / 2**30:.4g} GiB in 16 bit "
        f"({own.cache_bytes_of_token / 1024:.4g} KiB a token); operations a number: prefill "
        f"{own.prefill_intensity:.4g} ({own.prefill_bound_by} bound), writing {own.decode_intensity:.3g} "
        f"({own.decode_bound_by} bound); this machine balances at {own.balance:.0f}"
    )


def published_json(rows: list[published.Comparison]) -> dict[str, Any]:
    return {
        "rows": [{**dataclasses.asdict(row), "error": row.error} for row in rows],
        "summary": dataclasses.asdict(published.summary(rows)),
    }


def published_text(rows: list[published.Comparison]) -> str:
    """A table in Markdown, which the documentation takes as it is."""
    lines = [
        "| source | model | GPU | GPUs | layout | published | predicted | error | | assumed |",
        "|---|---|---|---:|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.source} | {row.model} | {row.gpu} | {row.gpus} | {row.layout} | "
            f"{row.published / 1e12:.0f} | {row.predicted / 1e12:.0f} | {row.error:+.1%} | "
            f"{'fitted' if row.fitted else 'held out'} | {row.assumed or 'nothing'} |"
        )
    found = published.summary(rows)
    said = (
        "TFLOP/s of a GPU, counted as each source counts. Error without its sign: median "
        f"{found.median:.1%}, worst {found.worst:.1%}; of the rows held out median "
        f"{found.median_held_out:.1%}, worst {found.worst_held_out:.1%}."
    )
    return "\n".join([*lines, "", said])

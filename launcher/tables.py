"""Tables for people: in the terminal, and as Markdown for a page."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def shown(heads: Sequence[str], body: Sequence[Sequence[str]], *, width: int) -> None:
    """Print a table, at least so many columns wide: a narrow terminal folds lines, it cuts no words."""
    made = Table(*heads, box=None)
    for line in body:
        made.add_row(*line)
    console = Console()
    console.width = max(console.width, width)
    console.print(made)


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The same as Markdown."""
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

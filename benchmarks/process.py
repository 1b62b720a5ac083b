"""A turn in a process of its own."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def numbers(
    what: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The last JSON object that the command prints; RuntimeError with all that it wrote where it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the turn of {what} failed:\n{done.stdout}{done.stderr}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])

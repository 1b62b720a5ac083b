"""events.jsonl as it is read at the next start: nothing that a rewind depends on is forgotten in silence."""

import json
from pathlib import Path

import pytest

from launcher.events import records
from launcher.recovery import Budget

REWIND = {"event": "rewind", "attempt": 9, "snapshot_step": 4, "skipped": [8, 16]}


def test_whole_lines_are_read_and_an_unfinished_last_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert list(records(file)) == []
    found = [
        {"event": "warn"},
        REWIND,
        REWIND | {"budget": Budget().as_json()},
        {"event": "stop", "attempt": 3},
    ]
    text = "".join(json.dumps(record) + "\n" for record in found)
    file.write_text(text + '{"event": "rewi')
    assert list(records(file)) == found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "is no JSON object"),
        ("[1]", "is no JSON object"),
        ('{"event": "fault"}', "is a fault without its description"),
        ('{"event": "rewind", "snapshot_step": 4}', "without attempt"),
        ('{"event": "rewind", "attempt": 3}', "without attempt, snapshot_step"),
        ('{"event": "stop", "attempt": 3, "snapshot_step": "x"}', "without attempt, snapshot_step"),
        (json.dumps(REWIND | {"skipped": 5}), "skipped: [first, stop)"),
        (json.dumps(REWIND | {"skipped": [7]}), "skipped: [first, stop)"),
        (json.dumps(REWIND | {"budget": {"a": 1}}), "with a budget that is not"),
    ],
)
def test_a_strange_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(f'{{"event": "warn"}}\n{line}\n{{"event": "warn"}}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2") as caught:
        list(records(file))
    assert said in str(caught.value)

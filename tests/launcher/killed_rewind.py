"""The command line in a process that dies at a point of its first rewind, as if the machine had stopped."""

import os
import sys
from typing import Any

from launcher.events import Events
from launcher.rewind import Rewinder

DEAD = 9


def die(*_: Any, **__: Any) -> None:
    os._exit(DEAD)


def main() -> int:
    point, *arguments = sys.argv[1:]
    write, rewind = Events.write, Rewinder.rewind
    rewound = False

    def writing(self: Events, event: str, *given: Any, **facts: Any) -> None:
        nonlocal rewound
        if event == "rewind" and point == "before the record":
            die()
        write(self, event, *given, **facts)
        if event == "rewind" and point == "after the record":
            die()
        if event == "diagnosis" and point == "diagnosed" and rewound:
            die()
        rewound = rewound or event == "rewind"

    def rewinding(self: Rewinder, *given: Any, **more: Any) -> Any:
        cursor = rewind(self, *given, **more)
        if point == "restored":
            die()
        return cursor

    Events.write, Rewinder.rewind = writing, rewinding  # type: ignore[method-assign]
    if point == "saved":
        import launcher.train

        save = launcher.train._save

        def saving(run: Any, *given: Any) -> None:
            save(run, *given)
            if rewound:
                run.checkpoints.wait()
                die()

        launcher.train._save = saving
    from launcher.__main__ import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())

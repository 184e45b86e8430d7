"""Run one process from its launch settings: `python -m holdfast.roles ROLE JSON|@FILE [PARENT]`.

A file, because settings may hold API keys and everyone on the machine can read a command line. The supervisor starts
its processes this way. Kept free of the command line's libraries, so that a killed frontend is back in well under a
second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.core.errors import REFUSED
from holdfast.core.log_files import say
from holdfast.roles.run import run
from holdfast.spec.launch import ROLES


def main(argv: list[str]) -> int:
    if len(argv) not in (2, 3) or argv[0] not in ROLES:
        print(f"usage: python -m holdfast.roles {'|'.join(ROLES)} JSON|@FILE [PARENT]", file=sys.stderr)
        return 2
    settings = Path(argv[1][1:]).read_bytes() if argv[1].startswith("@") else argv[1]
    try:
        launch = msgspec.json.decode(settings, type=ROLES[argv[0]])
    except msgspec.ValidationError as error:
        say(f"holdfast {argv[0]}: its settings cannot be: {error}")
        return REFUSED
    os.environ.update(launch.env)  # before anything is imported that looks at it
    return run(msgspec.structs.replace(launch, parent=int(argv[2])) if len(argv) == 3 else launch)


def leave(status: int) -> NoReturn:
    """End without Python's own farewell. `run` has put everything in order; what is left is memory, which the kernel
    takes back at once and Python object by object: seconds with vLLM's modules, longer than a supervisor waits."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or the disk is full
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

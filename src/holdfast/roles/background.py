"""The detached supervisor: `python -m holdfast.roles.background LOCK_FD KIND`, with what is kept on stdin.

Started by `holdfast up --detach`, which hands it the lock it already holds. It logs to `STATE_DIR/logs/up.log`. When it
is killed its processes live on, and the next `up` adopts them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from msgspec.structs import replace

from holdfast.core.errors import exit_status
from holdfast.core.log_files import log_path, say, turn_over
from holdfast.roles.joined import Joined
from holdfast.roles.planned import Planned
from holdfast.roles.rolled import Rolled
from holdfast.roles.running import keep_up
from holdfast.supervise.lock import sign, signed

KINDS: dict[str, type[Planned | Rolled | Joined]] = {kind.kind: kind for kind in (Planned, Rolled, Joined)}


def main(argv: list[str]) -> int:
    lock, kind = int(argv[0]), KINDS[argv[1]]
    kept = kind.decoded(sys.stdin.buffer.read())  # by then it is signed, with what only its starter knows
    mine = replace(signed(lock), pid=os.getpid(), detached=True)
    log = log_path()

    def tell(line: str) -> None:
        if log is not None:
            turn_over(log)
        say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    async def shown(lack: str) -> None:
        tell(lack or "everything is up")
        sign(lock, replace(mine, up=not lack, lack=lack))

    trouble = asyncio.run(keep_up(kept, lock=lock, tied=False, tell=tell, shown=shown))
    if trouble:
        say(str(trouble))
        sign(lock, replace(mine, trouble=str(trouble)))
    return exit_status(trouble)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

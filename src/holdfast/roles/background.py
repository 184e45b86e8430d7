"""The detached supervisor: `python -m holdfast.roles.background LOCK_FD STATE_DIR WAIT_S`, with its launches on stdin.

Started by `holdfast up --detach`, which hands it the lock it already holds. It logs to `STATE_DIR/logs/up.log`. When it
is killed its processes live on, and the next `up` adopts them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from holdfast.core.errors import exit_status
from holdfast.core.log_files import log_path, turn_over
from holdfast.core.unwritten import say
from holdfast.roles.running import keep_up, log_dir
from holdfast.roles.starting import Start
from holdfast.spec.launch import decode_launches
from holdfast.supervise.lock import Holder, sign
from holdfast.supervise.processes import LocalProcesses


def main(argv: list[str]) -> int:
    lock, state_dir = int(argv[0]), Path(argv[1])
    sign(lock, Holder(os.getpid(), detached=True))
    log = log_path()

    def tell(line: str) -> None:
        if log is not None:
            turn_over(log)
        say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    async def shown(lack: str) -> None:
        tell(lack or "everything is up")
        sign(lock, Holder(os.getpid(), detached=True, up=not lack, lack=lack))

    launches = decode_launches(sys.stdin.buffer.read())
    start = Start.of(state_dir, LocalProcesses(log_dir(state_dir)), launches)
    trouble = asyncio.run(keep_up(start, lock=lock, tied=False, wait_s=float(argv[2]), tell=tell, shown=shown))
    if trouble:
        say(str(trouble))
        sign(lock, Holder(os.getpid(), detached=True, trouble=str(trouble)))
    return exit_status(trouble)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

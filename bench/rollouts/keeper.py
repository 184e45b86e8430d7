"""A supervisor of one manifest, as `holdfast up -f … --detach` starts it: `python -m bench.rollouts.keeper SETTINGS`.

It is one that may die by itself, at the moment that matters most: when a step of a rollout is written down and nothing
of it is done yet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from holdfast.roles.rolled import Rolled, Site
from holdfast.roles.running import keep_up
from holdfast.rollout.records import OwnedRecord
from holdfast.supervise.lock import take_lock


class Keeping(msgspec.Struct, frozen=True):
    """What a keeper is told."""

    site: Site
    dies_at: int = 0  # this write of a state or traffic record, of all of them; 0: never


def tell(text: str) -> None:
    print(text, flush=True)


async def shown(lack: str) -> None:
    tell(lack or "everything is up")


def mortal(dies_at: int) -> None:
    """From now on this process ends right after that write of a state or traffic record, before what follows."""
    write, written = OwnedRecord.write, 0

    async def counted(self: OwnedRecord, value: bytes) -> None:
        nonlocal written
        before = self.held
        await write(self, value)
        written += self.held != before
        if written == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    OwnedRecord.write = counted  # type: ignore[method-assign]


def main(words: list[str]) -> None:
    told = msgspec.json.decode(Path(words[0]).read_bytes(), type=Keeping)
    if told.dies_at:
        mortal(told.dies_at)
    lock = take_lock(Path(told.site.state_dir))
    assert lock is not None, "there is no other supervisor"
    trouble = asyncio.run(keep_up(Rolled(told.site), lock=lock, tied=False, tell=tell, shown=shown))
    sys.exit(str(trouble) if trouble is not None else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

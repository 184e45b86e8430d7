"""What others find a supervisor and its processes by, put back where somebody removed it: the lock, records, launches.

Always true: looking costs a few system calls and stops nobody; what cannot be put back is told once, and tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast.supervise.lock import keep
from holdfast.supervise.loop import Supervisor

LOOK_S = 0.1  # for a lock that was moved away a second `up` sees nobody this long; one that was deleted it sees
RECORDS_LOOKS = 10  # looks at the lock for each at the records: there are many of them, and `ps` can wait a second


class Keeping:
    """Of one supervisor that holds `lock`. `run` it beside the supervisor, until that has stopped everything."""

    def __init__(self, supervisor: Supervisor, lock: int, state_dir: Path, tell: Callable[[str], None]) -> None:
        self._supervisor, self._lock, self._state_dir, self._tell = supervisor, lock, state_dir, tell
        self._said = ""
        self._looks = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        self._looks += 1
        words = keep(self._lock, self._state_dir)
        if words or self._looks % RECORDS_LOOKS == 0:
            self._supervisor.put_back()
        if words and words != self._said:
            self._tell(words)
        self._said = words

"""What is to be written down, and what may be done once it is.

Always true: of one key the latest value is written, one put at a time; what follows from a value is done after it
stands in the store, and never if it does not; while the store is away everything waits, and nothing is lost; once the
lock is lost nothing more is written, whoever wakes up late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from holdfast.store.contract import Store, StoreUnavailable

log = logging.getLogger("holdfast.control")

PUT_S = 2.0  # a store that lives answers in milliseconds
RETRY_S_MIN, RETRY_S_MAX = 0.1, 1.0  # when it is back a verdict waits a second at most
# What waits for one key's writing: a few verdicts' consequences. More is a store that is away for hours.
ACTS_MAX = 100

Act = Callable[[], None]


class Outbox:
    """The keys of one who leads. `lost`: it does no longer."""

    def __init__(self, store: Store, lost: asyncio.Event) -> None:
        self._store = store
        self._lost = lost
        self._wanted: dict[str, bytes | None] = {}  # None: it is to be removed
        self._unwritten: dict[str, list[Act]] = {}  # in the order they are written in, with what waits for it
        self._changed = asyncio.Event()
        self._closed = False
        self.failing = ""  # why the store does not take what is written

    def __len__(self) -> int:
        return len(self._unwritten)

    def wanted(self, key: str) -> bytes | None:
        return self._wanted.get(key)

    def stands(self, key: str, value: bytes) -> None:
        """Another wrote this, and it is gone on from: should the store forget it, it is written again."""
        self._wanted.setdefault(key, value)

    def close(self) -> None:
        """Nothing more is written: somebody else does."""
        self._closed = True

    def put(self, key: str, value: bytes | None) -> None:
        """Write this down, in place of whatever was to be written there."""
        if key in self._wanted and self._wanted[key] == value:
            return
        self._wanted[key] = value
        self._unwritten.setdefault(key, [])
        self._changed.set()

    def after(self, keys: Sequence[str], act: Act) -> None:
        """Do it when what is now to stand at all of them does; at once if it does already."""
        key = next((key for key in keys if key in self._unwritten), "")
        if not key:
            self._do(act)
            return
        waiting = self._unwritten[key]
        if len(keys) > 1:
            act = partial(self.after, [one for one in keys if one != key], act)
        if len(waiting) < ACTS_MAX:
            waiting.append(act)
        else:
            log.error("%s: %d acts wait for its writing; this one is dropped", key, ACTS_MAX)

    def check(self, values: Mapping[str, bytes]) -> None:
        """This stands in the store: if it forgot what was written, that is written again."""
        for key, wanted in self._wanted.items():
            if key not in self._unwritten and values.get(key) != wanted:
                self._unwritten[key] = []
                self._changed.set()

    async def run(self) -> None:
        """Write until cancelled or closed, or until the lock is lost."""
        retry_s = RETRY_S_MIN
        while not (self._lost.is_set() or self._closed):
            key = next(iter(self._unwritten), None)
            if key is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                await self._write(key)
            except ValueError:
                log.exception("%s cannot be written, whatever the store does; nothing follows from it", key)
                self._unwritten.pop(key, None)
            except StoreUnavailable as error:
                if not self.failing:
                    log.warning("cannot write down what is decided: %s; trying again", error)
                self.failing = str(error)
                self._unwritten[key] = self._unwritten.pop(key)  # to the end: one bad key holds up nobody else
                await asyncio.sleep(retry_s)
                retry_s = min(RETRY_S_MAX, retry_s * 2)
            else:
                if self.failing:
                    log.info("what is decided is written down again")
                self.failing, retry_s = "", RETRY_S_MIN

    async def _write(self, key: str) -> None:
        value = self._wanted[key]
        acts = self._unwritten[key]
        due = len(acts)
        if value is None:
            await self._store.delete(key, PUT_S)
        else:
            await self._store.put(key, value, PUT_S)
        if self._lost.is_set():
            return
        done, acts[:] = acts[:due], acts[due:]
        if self._wanted[key] == value:
            del self._unwritten[key]
            done += acts
            if value is None:
                del self._wanted[key]
        for act in done:
            self._do(act)

    def _do(self, act: Act) -> None:
        """An act that fails is our own bug, and costs itself only."""
        if self._lost.is_set():
            return
        try:
            act()
        except Exception:
            log.exception("what was to follow from a verdict failed")

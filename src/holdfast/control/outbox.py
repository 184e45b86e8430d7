"""The outbox writes the leader's records to the store, and runs actions after their records are written.

Always true:
- For each key only the latest value is written, one put at a time.
- An action that follows from a value runs only after the value is in the store.
- While the store is unavailable, writes and actions wait, and none is lost.
- Once the lock is lost nothing more is written, not even by a task that wakes up late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from holdfast.core.backoff import backoff_s
from holdfast.store.contract import Store, StoreUnavailable

log = logging.getLogger("holdfast.control")

PUT_S = 2.0  # a live store answers in milliseconds
RETRY_S_MIN, RETRY_S_MAX = 0.1, 1.0  # once the store is back, a verdict waits a second at most
# Waiting actions of one key: those of a few verdicts. More wait only if the store is unavailable for hours.
ACTS_MAX = 100

Act = Callable[[], None]


class Outbox:
    """The pending writes of one leader. `lost` is set when it loses the lock."""

    def __init__(self, store: Store, lost: asyncio.Event) -> None:
        self._store = store
        self._lost = lost
        self._wanted: dict[str, bytes | None] = {}  # None: the key is to be deleted
        self._unwritten: dict[str, list[Act]] = {}  # in the order of writing, with the actions that wait
        self._changed = asyncio.Event()
        self._closed = False
        self.failing = ""  # why the store refuses writes; empty: it does not

    def __len__(self) -> int:
        return len(self._unwritten)

    def wanted(self, key: str) -> bytes | None:
        return self._wanted.get(key)

    def adopt(self, key: str, value: bytes) -> None:
        """Adopt a value that another control wrote: it is written again if the store loses it."""
        self._wanted.setdefault(key, value)

    def close(self) -> None:
        """Write nothing more, because another control does."""
        self._closed = True

    def put(self, key: str, value: bytes | None) -> None:
        """Write this value, in place of any that waits for this key; None deletes the key."""
        if key in self._wanted and self._wanted[key] == value:
            return
        self._wanted[key] = value
        self._unwritten.setdefault(key, [])
        self._changed.set()

    def after(self, keys: Sequence[str], act: Act) -> None:
        """Run the action once the current values of all these keys are written; at once if they are."""
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
        """Compare the store's content with what was written, and write again what it lost."""
        for key, wanted in self._wanted.items():
            if key not in self._unwritten and values.get(key) != wanted:
                self._unwritten[key] = []
                self._changed.set()

    async def run(self) -> None:
        """Write until cancelled or closed, or until the lock is lost."""
        failures = 0
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
                self._unwritten[key] = self._unwritten.pop(key)  # to the end: one bad key holds up no other
                failures += 1
                await asyncio.sleep(backoff_s(failures, RETRY_S_MIN, RETRY_S_MAX))
            else:
                if self.failing:
                    log.info("what is decided is written down again")
                self.failing, failures = "", 0

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
        """Run the action, unless the lock is lost. A failure is a bug of ours and affects no other action."""
        if self._lost.is_set():
            return
        try:
            act()
        except Exception:
            log.exception("what was to follow from a verdict failed")

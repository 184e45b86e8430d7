"""The client's side of leased keys, shared by every kind of store.

A `LeasedKey` is the wish; the store that keeps it compares the wish with what the server has acknowledged and closes
the gap, at once when it can and again after every loss. Always true: at most one put of a key is under way.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from holdfast.store.contract import REGISTRATIONS_MAX, StoreUnavailable, check_key, check_value

# How long a withdrawal waits for the store before it leaves the rest to the background.
WITHDRAW_TIMEOUT_S = 2.0


class Keeper(Protocol):
    """The store client that makes wishes true."""

    def keep(self, leased: LeasedKey) -> None:
        """The wish is new or has changed; called synchronously, never waits."""

    async def drop(self, leased: LeasedKey) -> None:
        """The wish is withdrawn; bounded by `WITHDRAW_TIMEOUT_S`."""

    def unavailable(self, cause: str) -> StoreUnavailable: ...


class LeasedKey:
    """One registration: what should be in the store while this client lives."""

    def __init__(self, key: str, value: bytes, keeper: Keeper) -> None:
        check_key(key)
        check_value(value)
        self.key = key
        self.value = value
        self.in_flight = False
        self.refusal = ""  # the store's last reason for not taking it
        self._keeper = keeper
        self._withdrawn = False
        self._registered = asyncio.Event()

    def __repr__(self) -> str:
        state = "withdrawn" if self._withdrawn else "registered" if self.registered else "pending"
        return f"registration {self.key} {state}"

    @property
    def registered(self) -> bool:
        return self._registered.is_set()

    def update(self, value: bytes) -> None:
        check_value(value)
        if self._withdrawn:
            raise ValueError(f"registration {self.key} was withdrawn")
        self.value = value
        self.become_lost()
        self._keeper.keep(self)

    async def withdraw(self) -> None:
        if not self._withdrawn:
            self._withdrawn = True
            self.become_lost()
            await self._keeper.drop(self)

    async def wait_registered(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._registered.wait()
        except TimeoutError:
            why = f" ({self.refusal})" if self.refusal else ""
            raise self._keeper.unavailable(f"{self.key} not registered within {timeout_s:g} s{why}") from None

    def become_acknowledged(self, value: bytes) -> None:
        """The store holds `value`; that is the wish unless it has changed since."""
        self.refusal = ""
        if value == self.value and not self._withdrawn:
            self._registered.set()

    def become_lost(self) -> None:
        """The store does not hold the wish (any more)."""
        self._registered.clear()


def add_wish(wishes: dict[str, LeasedKey], leased: LeasedKey) -> None:
    """Take a new registration; one client holds a key once."""
    if leased.key in wishes:
        raise ValueError(f"key {leased.key} is registered by this client already; use its update()")
    if len(wishes) >= REGISTRATIONS_MAX:
        raise ValueError(f"more than {REGISTRATIONS_MAX} registrations in one client")
    wishes[leased.key] = leased

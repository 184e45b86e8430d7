"""The client's side of leased keys, shared by every kind of store.

A `LeasedKey` is the wish; the store that keeps it compares the wish with what the server has acknowledged and closes
the gap, at once when it can and again after every loss. Always true: at most one put of a key is under way.
"""

from __future__ import annotations

import logging
from typing import Protocol

from holdfast.store.contract import REGISTRATIONS_MAX, check_key, check_value

_log = logging.getLogger(__name__)

# How long a withdrawal waits for the store before it leaves the rest to the background.
WITHDRAW_TIMEOUT_S = 2.0


class Keeper(Protocol):
    """The store client that makes wishes true."""

    def keep(self, leased: LeasedKey) -> None:
        """The wish is new or has changed; called synchronously, never waits."""

    async def drop(self, leased: LeasedKey) -> None:
        """The wish is withdrawn; bounded by `WITHDRAW_TIMEOUT_S`."""


class LeasedKey:
    """One registration: what should be in the store while this client lives."""

    def __init__(self, key: str, value: bytes, keeper: Keeper) -> None:
        check_key(key)
        check_value(value)
        self.key = key
        self.value = value
        self.in_flight = False
        self.registered = False
        self._refusal = ""  # the store's last reason for not taking it
        self._keeper = keeper
        self._withdrawn = False

    def __repr__(self) -> str:
        state = "withdrawn" if self._withdrawn else "registered" if self.registered else "pending"
        return f"registration {self.key} {state}"

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

    def become_acknowledged(self, value: bytes) -> None:
        """The store holds `value`; that is the wish unless it has changed since."""
        self._refusal, self.registered = "", value == self.value and not self._withdrawn

    def become_refused(self, reason: str) -> None:
        """The store does not take it; each reason is told once."""
        if reason and reason != self._refusal:
            _log.warning("%r: refused: %s", self, reason)
            self._refusal = reason

    def become_lost(self) -> None:
        """The store does not hold the wish (any more)."""
        self.registered = False


def add_wish(wishes: dict[str, LeasedKey], leased: LeasedKey) -> None:
    """Take a new registration; one client holds a key once."""
    if leased.key in wishes:
        raise ValueError(f"key {leased.key} is registered by this client already; use its update()")
    if len(wishes) >= REGISTRATIONS_MAX:
        raise ValueError(f"more than {REGISTRATIONS_MAX} registrations in one client")
    wishes[leased.key] = leased

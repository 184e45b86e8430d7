"""What can go wrong for a client of the vault, by name. `TimeoutError` and `ConnectionError` are Python's own."""

from __future__ import annotations


class StaleMemoryLayoutError(Exception):
    """The vault keeps other weights than this process had mapped: its pointers mean nothing any more."""


class VaultRefused(Exception):
    """The vault said no; `code` names why."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason

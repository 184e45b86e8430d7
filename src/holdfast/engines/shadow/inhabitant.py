"""Whom a process's memory is for: who lives in it and hears of it, and the peers it has to agree with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from holdfast.kv.adopt import Survey


class Inhabitant(Protocol):
    """Who lives in this memory, and hears of it in the event loop. `books` guards what it knows of the pool."""

    @property
    def books(self) -> AbstractContextManager[object]: ...

    def fatal(self, why: str) -> None: ...

    def owner_gone(self, epoch: int) -> None: ...

    def memory(self, why: str) -> None: ...

    def loading(self, why: str) -> None:
        """A wake has weights to load, for `load_s` at most."""

    def room(self) -> None:
        """Blocks came free at the GPU fence, or may be taken that were spared."""


class Peers(Protocol):
    """The other seats of an engine with several pools."""

    async def agree(self, found: Survey) -> Survey:
        """What all of them may believe of what this one found."""

    async def fenced(self) -> None:
        """Wait for the GPU fence of every one of them."""

"""What a card names by its content hash, fetched from a worker: a tokenizer is megabytes, a store's value is not.

Always true: what is handed out is whole and has the right content; a wait for it is bounded and ends with the
connection.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from holdfast.wire.messages import ArtefactPart, GetArtefact

# A tokenizer of 35 MB over a slow link; nothing waits on it but the first request of its worker set.
TIMEOUT_S = 30.0
BYTES_MAX = 256 * 1024 * 1024


class Artefacts:
    """Those that one connection is asked for."""

    def __init__(self, ask: Callable[[GetArtefact], None]) -> None:
        self._ask = ask
        # Parts as they come, None when the connection is lost. Read as fast as they come; bounded by the reader.
        self._parts: dict[str, asyncio.Queue[ArtefactPart | None]] = {}

    def take(self, part: ArtefactPart) -> None:
        parts = self._parts.get(part.sha256)
        if parts is not None:
            parts.put_nowait(part)

    def lost(self) -> None:
        """The connection is over."""
        for parts in self._parts.values():
            parts.put_nowait(None)

    async def fetch(self, sha256: str) -> bytes:
        """ConnectionError or TimeoutError if it cannot be had."""
        parts: asyncio.Queue[ArtefactPart | None] = asyncio.Queue()
        self._parts[sha256] = parts
        self._ask(GetArtefact(sha256))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                gathered = await _gather(parts, sha256)
        finally:
            del self._parts[sha256]
        if hashlib.sha256(gathered).hexdigest() != sha256:
            raise ConnectionError(f"artefact {sha256} arrived with other content")
        return gathered


async def _gather(parts: asyncio.Queue[ArtefactPart | None], sha256: str) -> bytes:
    gathered = bytearray()
    while True:
        part = await parts.get()
        if part is None:
            raise ConnectionError(f"connection lost while artefact {sha256} was on its way")
        if part.total == 0 or part.total > BYTES_MAX or part.offset != len(gathered):
            raise ConnectionError(f"worker does not have the artefact {sha256} its card names")
        gathered += part.data
        if len(gathered) >= part.total:
            return bytes(gathered)

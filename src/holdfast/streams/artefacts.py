"""Fetching what a card names by its content hash (a tokenizer is megabytes, a store's value is not)."""

from __future__ import annotations

import asyncio
import hashlib

from holdfast.streams.link import DataConnection
from holdfast.wire.messages import ArtefactPart, GetArtefact

# A tokenizer of 35 MB over a slow link; nothing waits on it but the first request of its worker set.
ARTEFACT_TIMEOUT_S = 30.0
ARTEFACT_BYTES_MAX = 256 * 1024 * 1024


async def fetch_artefact(data: DataConnection, sha256: str) -> bytes:
    """The artefact, whole and with the right content; ConnectionError or TimeoutError if it cannot be had."""
    parts: asyncio.Queue[ArtefactPart | None] = asyncio.Queue()
    data.artefacts[sha256] = parts
    data.send(GetArtefact(sha256))
    try:
        async with asyncio.timeout(ARTEFACT_TIMEOUT_S):
            gathered = await _gather(parts, sha256)
    finally:
        del data.artefacts[sha256]
    if hashlib.sha256(gathered).hexdigest() != sha256:
        raise ConnectionError(f"artefact {sha256} arrived with other content")
    return gathered


async def _gather(parts: asyncio.Queue[ArtefactPart | None], sha256: str) -> bytes:
    gathered = bytearray()
    while True:
        part = await parts.get()
        if part is None:
            raise ConnectionError(f"connection lost while artefact {sha256} was on its way")
        if part.total == 0 or part.total > ARTEFACT_BYTES_MAX or part.offset != len(gathered):
            raise ConnectionError(f"worker does not have the artefact {sha256} its card names")
        gathered += part.data
        if len(gathered) >= part.total:
            return bytes(gathered)

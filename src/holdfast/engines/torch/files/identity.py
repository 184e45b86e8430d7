"""Computes the weights' content identity: a sha256 over every tensor's bytes and the configuration.

Always true: it does not depend on where the files lie, how they are sharded or what else is in them. A hash is cached
by the files' paths, sizes and times of change, so that a second start reads nothing; a cache that cannot be read or
written only costs the time of hashing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.engines.torch.files.checkpoint import FileCheckpoint, OnProgress
from holdfast.engines.torch.files.stored import read_bytes

CHUNK_BYTES = 16 * 2**20  # of a tensor at a time: small beside any model, large beside a system call

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file, under a name that counts too."""

    name: str
    path: Path
    offset: int
    size: int


def identified(looked_at: FileCheckpoint, cache: Path, progress: OnProgress) -> FileCheckpoint:
    """Return the checkpoint with its identity: known already, cached under `cache`, or found by reading everything."""
    if looked_at.identity:
        return looked_at
    pieces = [
        Piece(f"{name} {each.kind} {list(each.shape)} {each.paired_head_size}", each.path, each.offset, each.size)
        for name, each in sorted(looked_at.tensors.items())
    ]
    return replace(looked_at, identity=identity_of(pieces, repr(looked_at.config), cache, progress))


def identity_of(pieces: Sequence[Piece], config: str, cache: Path, progress: OnProgress) -> str:
    """Return the hash of these pieces in their order, and of a configuration, from the cache or computed."""
    files = sorted({piece.path.resolve() for piece in pieces})
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for path in files]
    key = json.dumps([stats, config])  # all that the hash depends on: if unchanged, the hash is the same
    note = cache / "identities" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    found = _remembered(note, key)
    if not found:
        found = _hash(pieces, config, progress)
        _remember(note, key, found)
    return found


def _hash(pieces: Sequence[Piece], config: str, progress: OnProgress) -> str:
    total, done = sum(piece.size for piece in pieces), 0
    digest = hashlib.sha256(config.encode())
    progress("hash", 0, total)
    for piece in pieces:
        digest.update(f"\n{piece.name}\n".encode())
        for at in range(0, piece.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, piece.size - at)
            digest.update(read_bytes(piece.path, piece.offset + at, size).data)
            done += size
            progress("hash", done, total)
    return f"sha256:{digest.hexdigest()}"


def _remembered(note: Path, key: str) -> str:
    try:
        cached = json.loads(note.read_bytes())
        return str(cached["identity"]) if cached["key"] == key else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remember(note: Path, key: str, found: str) -> None:
    """Write the hash to the cache, whole or not at all: two engines may start at once."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=note.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"key": key, "identity": found}, file)
            Path(name).replace(note)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        log.info("the weights' identity is not remembered: %s", error)

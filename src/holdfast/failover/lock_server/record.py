"""The lock server's record on disk: one small file, replaced whole, that only one server uses at a time.

Always true: the file holds one complete earlier or later record, never a mixture (written beside, synced, renamed, the
folder synced); a file that is damaged, cut off or edited by hand reads as unreadable, never as somebody else's record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.core.errors import UserError
from holdfast.failover.lock_server.machine import Record

FORMAT = "holdfast-lock-1"
# A record is some hundred bytes.
FILE_BYTES_MAX = 64 * 1024
RESERVED_BYTES = 4096  # a record has some three hundred


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    record: Record


@dataclass(frozen=True, slots=True)
class Found:
    """What was on disk. `trouble`: why it cannot be read; no record and no trouble: there was no file."""

    record: Record | None = None
    trouble: str = ""


class LockRecord:
    """The file at `path`; `open` it before use. Another server that uses it is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard: int | None = None

    def open(self) -> None:
        """Two servers with one record would both be sure of its content, and each grant what it keeps."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guard = os.open(f"{self.path}.guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(guard)
            raise UserError(f"another lock server uses {self.path}: stop it, or give this one its own file") from error
        self._guard = guard
        for path in (self._beside,) if self.path.exists() else (self._beside, self._old):
            self._reserve(path)

    def _reserve(self, path: Path) -> None:
        """Room for the next save, so that a full disk does not keep anybody from being elected. From then on the record
        that was replaced is the room for the next."""
        with contextlib.suppress(OSError), open(path, "r+b", opener=_made) as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)

    @property
    def _beside(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    @property
    def _old(self) -> Path:
        return self.path.with_name(self.path.name + ".old")

    def close(self) -> None:
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None

    def load(self) -> Found:
        try:
            with open(self.path, "rb") as file:
                return _read(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            return Found()
        except OSError as error:
            return Found(trouble=str(error))

    def save(self, record: Record) -> None:
        """Return once `record` would survive a power cut; raise OSError otherwise."""
        body = msgspec.json.encode(_Content(FORMAT, record))
        with open(self._beside, "r+b", opener=_made) as file:  # not truncated first: its room is reserved
            file.write(body + b"\n" + _sum(body) + b"\n")
            file.truncate()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            os.link(self.path, self._old)
        os.replace(self._beside, self.path)
        with contextlib.suppress(OSError):
            os.replace(self._old, self._beside)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(text: bytes) -> Found:
    body, _, tail = text.partition(b"\n")
    if tail != _sum(body) + b"\n":
        return Found(trouble="it is torn, or was not written by a lock server")
    try:
        content = msgspec.json.decode(body, type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Found(trouble=str(error))
    if content.format != FORMAT:
        return Found(trouble=f"its format is {content.format!r}, not {FORMAT!r}")
    return Found(content.record)


def _sum(body: bytes) -> bytes:
    return f"{zlib.crc32(body):08x}".encode()


def _made(path: str, flags: int) -> int:
    # The holder's id is in it: who knows it could come back in the holder's place.
    return os.open(path, flags | os.O_CREAT, 0o600)

"""Where the embedded store keeps its unleased keys: one file, replaced whole.

Always true: the file holds one complete earlier or later state, never a mixture (written beside, synced, renamed);
a file that cannot be read is never overwritten: the store refuses to start and says so.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from holdfast.core.errors import UserError

FORMAT = "holdfast-store-1"


class _Content(msgspec.Struct, frozen=True, array_like=True):
    format: str
    items: dict[str, bytes]


class DurableFile:
    """The unleased keys, where they outlive the store's process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, bytes]:
        mend = "restore it from a backup, or move it away to start with an empty store"
        try:
            content = msgspec.msgpack.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the store's file {self._path}: {error}; {mend}") from error
        if content.format != FORMAT:
            raise UserError(f"the store's file {self._path} has format {content.format!r}, not {FORMAT!r}; {mend}")
        return content.items

    async def save(self, items: dict[str, bytes]) -> None:
        """Return once `items` would survive a power cut; raise OSError otherwise."""
        # A sync can take long on a busy disk; pings must be answered meanwhile.
        await asyncio.to_thread(self._replace, msgspec.msgpack.encode(_Content(FORMAT, items)))

    def _replace(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(self._path.name + ".new")
        with open(beside, "wb", opener=_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

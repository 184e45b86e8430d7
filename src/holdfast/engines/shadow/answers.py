"""The known answers of a vault's engines, in a file beside its socket.

Always true: the answer that counts is that of the first engine of its kind (these weights, this arithmetic) on this
machine.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from holdfast.core.errors import UserError

KINDS_MAX = 64  # kept in one file: every new version of an engine on every kind of device is one

log = logging.getLogger("holdfast.engine")


def answers_in(folder: Path) -> Path:
    """The file with the known answers of a vault's engines."""
    return folder / "canaries.json"


def known_answer(path: Path, kind: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What the first engine of this kind answered; `tokens`, if this is the first. UserError names the file where it
    holds something else than answers."""
    known = _read(path)
    if kind not in known:
        known[kind] = list(tokens)
        _write(path, dict(list(known.items())[-KINDS_MAX:]))
    return tuple(known[kind])


def _read(path: Path) -> dict[str, list[int]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}, the known answers of canaries, cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=dict[str, list[int]])
    except msgspec.DecodeError as error:
        why = f"{path} does not hold the known answers of canaries: {error}"
        raise UserError(f"{why}; remove it, and the next engine writes it anew") from error


def _write(path: Path, known: dict[str, list[int]]) -> None:
    """Whole or not at all. An answer that cannot be kept costs the comparison with the next engine, not this one."""
    whole = path.with_name(f".canaries.{os.getpid()}")
    try:
        whole.write_bytes(msgspec.json.encode(known))
        whole.replace(path)
    except OSError as error:
        log.warning("the canary's answer could not be written to %s: %s", path, error.strerror)
        whole.unlink(missing_ok=True)

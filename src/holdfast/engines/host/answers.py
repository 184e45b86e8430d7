"""The known canary answers of a vault's engines, in a file beside the vault's socket.

The first engine of a kind (weights, arithmetic, versions) on this machine writes its answer; later engines of that kind
are compared with it. The file may be wrong: if it cannot be read, it is renamed and written again. If two processes
give the same other answer, theirs replaces the written one. Nothing here raises: a damaged file must not keep an engine
from starting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.core.procfs import read_process

KINDS_MAX = 64  # kept in one file: each engine version on each kind of device is one kind

log = logging.getLogger("holdfast.engine")

T = TypeVar("T")


class Dissent(msgspec.Struct, frozen=True):
    """An answer that contradicts the written one, and the process that gave it."""

    tokens: tuple[int, ...]
    process: str


def answers_in(folder: Path) -> Path:
    return folder / "canaries.json"


def known_answer(
    path: Path,
    kind: str,
    tokens: tuple[int, ...],
    agrees: Callable[[tuple[int, ...]], bool] | None = None,
    process: str = "",
) -> tuple[int, ...]:
    """Return the known answer for this kind of engine, after an engine answered `tokens`.

    That is the written answer, or `tokens` if none is written. `agrees` decides whether `tokens` match a written answer
    (default: equality). A contradicting answer is stored with `process` (default: this one). If another process gave
    the same one before, `tokens` replace the written answer."""
    known = _read(path, dict[str, tuple[int, ...]])
    written = known.get(kind)
    if written is not None and (agrees(written) if agrees is not None else written == tokens):
        return written
    if written is not None:
        stat = read_process(os.getpid())  # its start tells this process from an earlier one of the same number
        process = process or f"{os.getpid()} {stat.start_ticks if stat is not None else 0}"
        if not _contradicted(path, kind, tokens, process):
            return written
        alike = f"it is withdrawn, and theirs counts from now on (was {written}, is {tokens})"
        log.error("two engines contradict the known answer in %s alike: %s; %s", path, alike, kind)
    known[kind] = tokens
    _write(path, dict(list(known.items())[-KINDS_MAX:]))
    return tokens


def _contradicted(path: Path, kind: str, tokens: tuple[int, ...], process: str) -> bool:
    """Store a contradicting answer. If another process gave the same one before, return True and remove the note."""
    notes = path.with_name("canaries.against.json")
    dissents = _read(notes, dict[str, Dissent])
    before = dissents.pop(kind, None)
    alike = before is not None and before.tokens == tokens and before.process != process
    if not alike:
        dissents[kind] = Dissent(tokens, process)
        log.error("the canary's answer %s contradicts %s; a second engine's with it withdraws that", tokens, path)
    _write(notes, dict(list(dissents.items())[-KINDS_MAX:]))
    return alike


def _read(path: Path, kind: type[T]) -> T:
    """Return the file's content, empty if there is no file; rename a file that cannot be decoded."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _set_aside(path, error.strerror or str(error) if isinstance(error, OSError) else str(error))
    return kind()


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{path.name}.bad")
    try:
        path.replace(aside)
    except OSError as error:
        log.error("%s, the known answers of canaries, cannot be read (%s) nor set aside: %s", path, why, error.strerror)
    else:
        log.error("%s does not hold known answers of canaries (%s): set aside as %s, written again", path, why, aside)


def _write(path: Path, content: object) -> None:
    """Write the file atomically. A failed write costs a later comparison, not this engine."""
    whole = path.with_name(f".{path.stem}.{os.getpid()}")
    try:
        whole.write_bytes(msgspec.json.encode(content))
        whole.replace(path)
    except OSError as error:
        log.warning("the canary's answer could not be written to %s: %s", path, error.strerror)
        whole.unlink(missing_ok=True)

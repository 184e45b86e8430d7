"""The torch engine's canary: where it runs, and what it was answered the first time.

Always true: the answer that counts is that of the first engine with these weights and this arithmetic on this machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
from functools import cache
from pathlib import Path

import msgspec

from holdfast.core.errors import UserError
from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS

log = logging.getLogger("holdfast.engine")

KINDS_MAX = 64  # kept in one file: every new version of the engine on every kind of device is one


def private_blocks(block_tokens: int) -> int:
    """Three more than its text needs: the slab need not start or end at a whole block, and the last one is filler."""
    return -(-(PROMPT_TOKENS + TOKENS) // block_tokens) + 3


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


@cache
def code_identity() -> str:
    """Of the sources that compute: engines of two versions need not round alike."""
    digest = hashlib.sha256()
    engines = Path(__file__).parents[1]
    for source in sorted([*(engines / "torch").rglob("*.py"), *(engines / "paged").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]

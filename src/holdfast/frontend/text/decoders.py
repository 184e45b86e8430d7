"""Which way a tokenizer's JSON says its tokens become text.

Always true: a decoder is called byte-level or byte-fallback only when every step of it is one this package repeats
exactly; anything unknown is "window", which asks the tokenizer itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec


@dataclass(frozen=True, slots=True)
class Style:
    """`replacements` and `strip_first` belong to byte-fallback decoders."""

    kind: Literal["byte_level", "byte_fallback", "window"]
    replacements: tuple[tuple[str, str], ...] = ()
    strip_first: str = ""


class _TokenizerJson(msgspec.Struct):
    """The one part of the file that matters here; msgspec skips the megabytes of vocabulary."""

    decoder: dict[str, Any] | None = None


def read_style(tokenizer_json: bytes) -> Style:
    """The way of this tokenizer; ValueError where the JSON is none."""
    steps = _flat(msgspec.json.decode(tokenizer_json, type=_TokenizerJson).decoder)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return Style("byte_level")
    return _byte_fallback(steps) or Style("window")


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _flat(inner)]


def _byte_fallback(steps: list[dict[str, Any]]) -> Style | None:
    """Replace*, ByteFallback, Fuse, and perhaps a Strip of one character at the start."""
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0].get("type") == "Replace":
        step = rest.pop(0)
        old = step.get("pattern", {}).get("String")
        if not old:
            return None  # a regular expression, whose dialect is not Python's
        replacements.append((old, step.get("content", "")))
    names = [step.get("type") for step in rest]
    if names == ["ByteFallback", "Fuse"]:
        return Style("byte_fallback", tuple(replacements))
    if names == ["ByteFallback", "Fuse", "Strip"] and (rest[2].get("start"), rest[2].get("stop")) == (1, 0):
        return Style("byte_fallback", tuple(replacements), rest[2].get("content", ""))
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others for 256 and up, in order."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    alphabet = {chr(byte): byte for byte in themselves}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """A byte-level token's bytes; an added token with other characters stands for itself, as the reference has it."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()

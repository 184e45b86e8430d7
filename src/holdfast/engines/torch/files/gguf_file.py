"""A GGUF file's header: its metadata, and where its tensors lie.

Written out here because PyPI's `gguf` makes an array object of every string: 7 s for SmolLM2's header against 0.2 s,
at every start of every engine. Always true: nothing is believed that lies outside the file; what cannot be read is a
UserError with the file's name in it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.stored import KINDS, Stored

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file names no other

# ggml's numbers for its kinds, so that one that is refused can be refused by name.
GGML_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# GGUF's numbers for the types of metadata: scalars as struct writes them, then the two that are not.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What one file says of itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]  # under their GGUF names


class _Cut(Exception):
    """The header goes on where the file does not."""


class _Cursor:
    """Reads one value after the other."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def bytes(self, size: int) -> bytes:
        piece = self.data[self.at : self.at + size]
        if len(piece) != size:
            raise _Cut
        self.at += size
        return piece

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        if count > len(self.data):  # before a buffer of that size is asked for
            raise _Cut
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def string(self) -> str:
        return self.bytes(int.from_bytes(self.bytes(8), "little")).decode()

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_scalar(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(_scalar(inner), count))


def _scalar(kind: int) -> str:
    code = _SCALARS.get(kind)
    if code is None:
        raise ValueError(f"its metadata has a value of the unknown type {kind}")
    return code


def read_gguf(path: Path) -> GgufFile:
    """Read the header; UserError says what is wrong with it, or which kinds of tensor are not supported."""
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        # mapped only while the header is read
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data), len(data))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except _Cut as error:
        raise UserError(f"{path} is cut short: its header does not end") from error
    except (ValueError, struct.error) as error:
        raise UserError(f"{path} is not a GGUF file that can be read: {error}") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    if cursor.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}; versions {' and '.join(map(str, VERSIONS))} are known")
    tensors, pairs = cursor.numbers("Q", 2)
    metadata = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value()
    infos = [_tensor_info(cursor) for _ in range(tensors)]
    _refuse_kinds(path, [kind for _, kind, _, _ in infos])
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    found = {name: Stored(kind, shape, path, start + offset) for name, kind, shape, offset in infos}
    for name, stored in found.items():
        if stored.offset + stored.size > size:
            raise UserError(f"{path} is cut short: it ends before its tensor {name} does")
    return GgufFile(path, metadata, found)


def _tensor_info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    name = cursor.string()
    dimensions = cursor.numbers("Q", cursor.number("I"))
    kind, offset = cursor.number("I"), cursor.number("Q")
    # GGUF lists the fastest dimension first
    return name, GGML_KINDS.get(kind, f"number {kind}"), tuple(reversed(dimensions)), offset


def _refuse_kinds(path: Path, kinds: list[str]) -> None:
    odd = sorted(set(kinds) - set(KINDS))
    if odd:
        known = ", ".join(KINDS)
        raise UserError(f"{path} has {', '.join(odd)} tensors, which are not supported; supported are {known}")

"""Encodes and splits frames: a 4-byte big-endian length, then that many bytes. No I/O.

Always true: a length over the limit is refused before a byte of the body is kept (facts 17: a header must never be
trusted), and a splitter never holds more than one unfinished frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, get_args

import msgspec

# A 128k-token prompt is under 700 kB of msgpack; artefacts travel in parts of 1 MiB.
FRAME_BYTES_MAX = 8 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size


class FrameError(Exception):
    """The peer violated the protocol; the connection must be closed."""


class UnknownMessage(FrameError):
    """A message of a kind that this version does not know. Where other messages do not depend on it, the receiver may
    ignore it."""


def frame(payload: bytes | bytearray) -> bytes:
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameError(f"frame of {len(payload)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return _HEADER.pack(len(payload)) + payload


def encode(message: msgspec.Struct) -> bytes:
    return frame(_encoder.encode(message))


class _Opening(msgspec.Struct, array_like=True):
    """The first element of a message; the rest is skipped."""

    tag: int


def reader(messages: object) -> Callable[[memoryview], Any]:
    """Return a decoder for a union of message structs. It raises UnknownMessage for a message with another tag, and
    FrameError for any other payload."""
    decode = msgspec.msgpack.Decoder(messages).decode
    opening = msgspec.msgpack.Decoder(_Opening).decode
    known = {kind.__struct_config__.tag for kind in get_args(messages)}

    def read(payload: memoryview) -> Any:
        try:
            return decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            text, cause = f"cannot read message: {error}", error
        try:
            tag = opening(payload).tag
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise FrameError(text) from cause
        if tag in known:
            raise FrameError(text) from cause
        raise UnknownMessage(f"a message of unknown kind {tag}") from cause

    return read


class FrameSplitter:
    """A parser that cuts a byte stream into frames of at most `bytes_max`."""

    __slots__ = ("_bytes_max", "_parts", "_wanted_bytes", "held_bytes")

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []  # of the unfinished frame; joined once, so a large one is not copied per piece
        self.held_bytes = 0
        self._wanted_bytes = 0  # size at which the unfinished frame can be parsed again

    def feed(self, data: bytes) -> list[memoryview]:
        """Add received bytes; return the frames they complete, in order."""
        if self._parts:
            self._parts.append(data)
            self.held_bytes += len(data)
            if self.held_bytes < self._wanted_bytes:
                return []
            data = b"".join(self._parts)
            self._parts = []
        frames: list[memoryview] = []
        view = memoryview(data)
        start, end = 0, len(data)
        wanted = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            (size,) = _HEADER.unpack_from(data, start)
            if size > self._bytes_max:
                raise FrameError(_oversize(data[start : start + HEADER_BYTES], size, self._bytes_max))
            stop = start + HEADER_BYTES + size
            if stop > end:
                wanted += size
                break
            frames.append(view[start + HEADER_BYTES : stop])
            start = stop
        if start < end:
            self._parts = [data[start:] if start else data]
            self._wanted_bytes = wanted
        self.held_bytes = end - start
        return frames


def _oversize(header: bytes, size: int, bytes_max: int) -> str:
    hint = " (it looks like text: is an HTTP client talking to a wire port?)" if header.strip().isalpha() else ""
    return f"frame header announces {size} bytes, over the limit of {bytes_max}{hint}"

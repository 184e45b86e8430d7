"""Frames: a 4-byte big-endian length, then that many bytes. Pure; no sockets.

Always true: a length over the limit is refused before a byte of the body is kept (facts 17: a header must
never be trusted), and a splitter never holds more than one unfinished frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

# A 128k-token prompt is under 700 kB of msgpack; artefacts travel in parts of 1 MiB.
FRAME_BYTES_MAX = 8 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size


class FrameError(Exception):
    """The peer sent something that is not our protocol; the connection cannot go on."""


def frame(payload: bytes | bytearray) -> bytes:
    """One frame around `payload`."""
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameError(f"frame of {len(payload)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return _HEADER.pack(len(payload)) + payload


def encode(message: msgspec.Struct) -> bytes:
    """A message as one frame."""
    return frame(_encoder.encode(message))


def reader(messages: object) -> Callable[[memoryview], Any]:
    """Reads a frame's payload as one of these messages, a union of structs; FrameError if it is none of them."""
    decode = msgspec.msgpack.Decoder(messages).decode

    def read(payload: memoryview) -> Any:
        try:
            return decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise FrameError(f"cannot read message: {error}") from error

    return read


class FrameSplitter:
    """Cuts a byte stream into frames."""

    __slots__ = ("_parts", "_wanted_bytes", "held_bytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of one unfinished frame; joined once, so a large one costs no copy per piece
        self.held_bytes = 0
        self._wanted_bytes = 0  # what the unfinished frame needs before it is worth another look

    def feed(self, data: bytes) -> list[memoryview]:
        """Take received bytes; return the frames they complete, in order."""
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
            if size > FRAME_BYTES_MAX:
                raise FrameError(_oversize(data[start : start + HEADER_BYTES], size))
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


def _oversize(header: bytes, size: int) -> str:
    hint = " (it looks like text: is an HTTP client talking to a wire port?)" if header.strip().isalpha() else ""
    return f"frame header announces {size} bytes, over the limit of {FRAME_BYTES_MAX}{hint}"

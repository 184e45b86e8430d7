"""Frames and messages: any cut of the bytes gives the same frames, and nothing is trusted before it is measured."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.requests import Failure, GenerateRequest, Output, Sampling, TokenLogprobs
from holdfast.wire.frames import FRAME_BYTES_MAX, FrameError, FrameSplitter, UnknownMessage, encode, frame
from holdfast.wire.messages import (
    VERSION,
    ArtefactPart,
    Beat,
    Cancel,
    Closed,
    Draining,
    Generate,
    GetArtefact,
    Hello,
    Message,
    NotTaken,
    ProcessIdentity,
    Refused,
    Step,
    Welcome,
    decode_to_frontend,
    decode_to_worker,
)

number = st.integers(-(2**63), 2**64 - 1)
words = st.text(max_size=20)
reals = st.floats(allow_nan=False)
numbers = st.lists(number, max_size=20)
sampling = st.builds(
    Sampling, max_tokens=number, seed=number, temperature=reals, logit_bias=st.none() | st.dictionaries(number, reals)
)
outputs = st.builds(
    Output,
    number,
    numbers,
    st.none() | words,
    st.none() | st.lists(st.builds(TokenLogprobs, reals, st.lists(st.tuples(number, reals), max_size=3)), max_size=3),
    st.none() | st.builds(Failure, words, words),
)
to_worker = st.one_of(
    st.builds(Hello, number, words, words),
    st.builds(Generate, number, st.builds(GenerateRequest, words, numbers, number, sampling, numbers, number)),
    st.builds(Cancel, numbers),
    st.builds(GetArtefact, words),
    st.builds(NotTaken, words),
)
identity = st.builds(ProcessIdentity, words, words, number, number, number)
to_frontend = st.one_of(
    st.builds(Welcome, number, number, words, words, number, number, st.booleans(), identity),
    st.builds(Refused, words, words),
    st.builds(Step, st.lists(outputs, max_size=3)),
    st.builds(Closed, numbers),
    st.builds(Draining, words),
    st.builds(Beat, number, number, reals, reals, reals, number, number),
    st.builds(ArtefactPart, words, number, number, st.binary(max_size=30)),
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(0, 4000), max_size=40))
def test_any_cut_gives_the_same_frames(payloads: list[bytes], cuts: list[int]) -> None:
    """However the bytes arrive, the frames come out whole, in order, and nothing is left."""
    splitter = FrameSplitter()
    data = b"".join(map(frame, payloads))
    got = [bytes(payload) for piece in split(data, cuts) for payload in splitter.feed(piece)]
    assert got == payloads
    assert splitter.held_bytes == 0


@given(st.binary(max_size=200), st.integers(0, 203))
def test_an_unfinished_frame_is_held_and_counted(payload: bytes, cut: int) -> None:
    """What is held is what has come of one frame; the rest completes it."""
    data = frame(payload)
    cut = min(cut, len(data) - 1)
    splitter = FrameSplitter()
    assert splitter.feed(data[:cut]) == []
    assert splitter.held_bytes == cut
    assert [bytes(got) for got in splitter.feed(data[cut:])] == [payload]


@given(st.integers(FRAME_BYTES_MAX + 1, 2**32 - 1), st.lists(st.integers(0, 8), max_size=3))
def test_an_oversized_frame_is_refused_at_its_header(size: int, cuts: list[int]) -> None:
    """Before a byte of its body is kept."""
    splitter = FrameSplitter()
    pieces = split(frame(b"ok") + struct.pack(">I", size), cuts)
    with pytest.raises(FrameError, match=f"{size} bytes, over the limit"):
        [splitter.feed(piece) for piece in pieces]
    assert splitter.held_bytes < 16


def test_the_largest_frame_passes_and_one_byte_more_is_refused() -> None:
    """On both sides."""
    payload = bytes(FRAME_BYTES_MAX)
    assert len(FrameSplitter().feed(frame(payload))[0]) == FRAME_BYTES_MAX
    with pytest.raises(FrameError, match="over the limit"):
        frame(payload + b"x")


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1", b"POST /v1", b"HEAD /", b"PUT /x"])
def test_text_on_a_wire_port_gets_a_hint(line: bytes) -> None:
    """The most common mistake is named."""
    with pytest.raises(FrameError, match="HTTP"):
        FrameSplitter().feed(line)


def test_a_large_frame_in_small_pieces_costs_its_size() -> None:
    """Not its size times the number of pieces: a peer that sends byte by byte must not stop the loop."""
    data = frame(bytes(4 * 1024 * 1024))
    splitter = FrameSplitter()
    began_s = time.thread_time()
    frames = [got for place in range(0, len(data), 64) for got in splitter.feed(data[place : place + 64])]
    assert len(frames) == 1
    assert time.thread_time() - began_s < 5.0


@settings(max_examples=300)
@given(st.tuples(st.just(decode_to_worker), to_worker) | st.tuples(st.just(decode_to_frontend), to_frontend))
def test_messages_come_back_as_they_were(case: tuple[Callable[[memoryview], Message], Message]) -> None:
    """Every field of every message."""
    decode, message = case
    assert decode(FrameSplitter().feed(encode(message))[0]) == message


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_any_payload_is_a_message_or_a_frame_error(payload: bytes) -> None:
    """Nothing else is ever raised."""
    for decode in (decode_to_worker, decode_to_frontend):
        with contextlib.suppress(FrameError):
            decode(memoryview(payload))


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 200_000,
        b"\x81\xa1a" * 100_000,
        msgspec.msgpack.encode([4, 1, ["r", [1], 1, [[[[]]]]]]),
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode(["1", VERSION, "data", "x"]),
        msgspec.msgpack.encode([1, VERSION]),
        msgspec.msgpack.encode([1, VERSION, b"data", "x"]),
        msgspec.msgpack.encode({"a": 1}),
        b"\x94\x01\x01\xa2\xff\xfe\xa1x",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"",
    ],
)
def test_payloads_made_to_hurt(payload: bytes) -> None:
    """Deep nesting, unknown tags, wrong types, bad UTF-8, lengths that lie: a FrameError, at once."""
    for decode in (decode_to_worker, decode_to_frontend):
        with pytest.raises(FrameError):
            decode(memoryview(payload))


def test_later_fields_may_be_missing_or_more() -> None:
    """An older or newer peer of the same version may know fewer or more of a message's last fields."""
    short = msgspec.msgpack.encode([4, 7, ["r", [1, 2], 2, [5, 3]]])
    message = decode_to_worker(memoryview(short))
    assert message == Generate(7, GenerateRequest("r", [1, 2], 2, Sampling(5, 3)))
    longer = msgspec.msgpack.encode([8, "reason", "of a newer version"])
    assert decode_to_frontend(memoryview(longer)) == Draining("reason")


@pytest.mark.parametrize("payload", [[99, 1], [99], [200, "x", {"a": [1, 2]}], [2**40], [-1, "x"]])
def test_a_message_of_a_newer_version_is_told_from_a_malformed_one(payload: list[object]) -> None:
    """A receiver may ignore the former; a known tag with a wrong body, or no tag at all, is a fault of the peer."""
    for decode in (decode_to_worker, decode_to_frontend):
        with pytest.raises(UnknownMessage, match=f"unknown kind {payload[0]}$"):
            decode(memoryview(msgspec.msgpack.encode(payload)))
    for malformed in ([4, "x"], ["99", 1], [[99]], {"99": 1}, 99):
        with pytest.raises(FrameError) as error:
            decode_to_worker(memoryview(msgspec.msgpack.encode(malformed)))
        assert not isinstance(error.value, UnknownMessage)

"""A real worker's two sockets under everything but our protocol: it lives, says why it refuses, and keeps nothing."""

from __future__ import annotations

import random
import socket
import struct
import time

import msgspec
import pytest

from holdfast.core.requests import Sampling
from holdfast.wire.frames import FRAME_BYTES_MAX, encode, frame
from holdfast.wire.messages import (
    VERSION,
    Beat,
    Cancel,
    Draining,
    Generate,
    GetArtefact,
    Hello,
    NotTaken,
    Refused,
    Step,
    Welcome,
)
from tests.rigs.wire_peer import HELLO, Target, request

pack = msgspec.msgpack.encode

NOT_OURS = {
    "http": b"GET /health HTTP/1.1\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00" + b"\x01" * 600,
    "oversized": struct.pack(">I", FRAME_BYTES_MAX + 1) + b"x" * 100_000,
    "largest": struct.pack(">I", 2**32 - 1),
    "large before hello": struct.pack(">I", 1_000_000) + b"x" * 20_000,
    "empty frame": frame(b""),
    "no array": frame(pack({"a": 1})),
    "nested": frame(b"\x91" * 4000),
    "unknown tag": frame(pack([99, 1, 2])),
    "tag of the wrong side": encode(Draining("no")),
    "short hello": frame(pack([1, VERSION])),
    "types": frame(pack([1, "1", 2, None])),
    "bad utf-8": frame(b"\x94\x01\x01\xa4\xff\xfe\xfd\xfc\xa1x"),
    "lying length": frame(b"\xdd\xff\xff\xff\xff"),
    "version": encode(Hello(VERSION + 1, "data", "x")),
    "version 0": encode(Hello(0, "beat", "x")),
    "huge version": encode(Hello(2**63, "data", "x")),
    "purpose": encode(Hello(VERSION, "tea", "x")),
    "no purpose": encode(Hello(VERSION, "", "")),
    "generate first": encode(Generate(1, request())),
    "cancel first": encode(Cancel([1])),
    "artefact first": encode(GetArtefact("x")),
    "not taken first": encode(NotTaken("you are not welcome")),
}


@pytest.mark.parametrize("purpose", ["data", "beat"])
@pytest.mark.parametrize("name", NOT_OURS)
def test_a_wrong_beginning_is_refused_with_a_reason(target: Target, purpose: str, name: str) -> None:
    """Other protocols, other versions, wrong types, work before a greeting: told why, then closed."""
    peer = target.peer(purpose).send(NOT_OURS[name])
    if purpose == "beat" and name in ("large before hello", "tls", "oversized"):
        while peer.next() is not None:
            pass
    else:
        assert peer.refusal().code == "InvalidRequest"


def test_the_wrong_purpose_for_each_socket_is_named(target: Target) -> None:
    """A data greeting on the beat socket and the other way round."""
    assert "beat" in target.peer("beat").send(HELLO["data"]).refusal().reason
    assert "data" in target.peer("data").send(HELLO["beat"]).refusal().reason


RIGHT_LATER = {"cancel first", "generate first", "artefact first", "not taken first", "large before hello"}
UNKNOWN = {"unknown tag", "tag of the wrong side"}  # ignored after a greeting: they may be of a newer version


@pytest.mark.parametrize("name", [name for name in NOT_OURS if name not in RIGHT_LATER | UNKNOWN])
def test_nonsense_after_a_greeting_is_refused_too(target: Target, name: str) -> None:
    """And the streams that were running on the connection end with it."""
    peer = target.greeted()
    peer.send(encode(Generate(1, request(sampling=Sampling(20_000, 1, ignore_eos=True)))))
    assert isinstance(peer.next(), Step)
    peer.send(NOT_OURS[name] + encode(Generate(2, request())))
    assert peer.refusal().code == "InvalidRequest"
    peer.sock.close()
    target.deployment.wait_until(
        lambda: target.deployment.worker_facts("worker-0")["streams"] == 0, "its streams to end"
    )


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_an_unknown_message_after_a_greeting_is_ignored(target: Target, name: str) -> None:
    """The stream that runs on the connection goes on, and the next message is handled."""
    peer = target.greeted()
    peer.send(encode(Generate(1, request(sampling=Sampling(20_000, 1, ignore_eos=True)))))
    peer.send(NOT_OURS[name] + encode(Generate(2, request())))
    seen: set[int] = set()
    while seen != {1, 2}:
        message = peer.next()
        assert isinstance(message, Step), message
        seen |= {output.stream for output in message.outputs if output.tokens}
    peer.sock.close()


def test_nothing_behind_a_refused_message_is_done(target: Target) -> None:
    """A peer that was refused starts no work, even with a message that came in the same packet."""
    before = target.deployment.worker_facts("worker-0")["requests_total"]
    peer = target.peer("data").send(
        encode(Hello(VERSION + 1, "data", "x")) + HELLO["data"] + encode(Generate(1, request()))
    )
    peer.refusal()
    assert target.deployment.worker_facts("worker-0")["requests_total"] == before


@pytest.mark.parametrize("purpose", ["data", "beat"])
def test_noise(target: Target, purpose: str) -> None:
    """Random bytes, random messages, real messages with random bytes in them, cut anywhere, closed any way."""
    rng = random.Random(11)
    good = [HELLO[purpose], encode(Generate(1, request())), encode(Cancel([1])), encode(GetArtefact("x"))]
    for turn in range(200):
        peer = target.peer(purpose)
        if turn % 2:
            peer.send(HELLO[purpose])
        data = bytearray(b"".join(rng.choices(good, k=3)) if rng.random() < 0.6 else rng.randbytes(rng.randrange(400)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        peer.send(bytes(data[: rng.randrange(len(data) + 1)]))
        if rng.random() < 0.3:
            peer.sock.shutdown(socket.SHUT_WR)
            while peer.next() is not None:
                pass
        peer.sock.close()


@pytest.mark.parametrize("purpose", ["data", "beat"])
def test_a_half_closed_connection_is_closed(target: Target, purpose: str) -> None:
    """Whoever says that nothing more comes is done, with work running or without."""
    peer = target.peer(purpose).send(HELLO[purpose])
    assert isinstance(peer.next(), Welcome)
    if purpose == "data":
        peer.send(encode(Generate(1, request(sampling=Sampling(20_000, 1, ignore_eos=True)))))
        assert isinstance(peer.next(), Step)
    peer.sock.shutdown(socket.SHUT_WR)
    while (message := peer.next()) is not None:
        assert isinstance(message, Step | Beat)


@pytest.mark.long
def test_silence_is_not_waited_for_for_ever(target: Target) -> None:
    """A connection without a greeting, or with half of one, is closed after some seconds: places are bounded."""
    began_s = time.monotonic()
    silent = [target.peer(purpose) for purpose in HELLO]
    half = [target.peer(purpose).send(hello[:7]) for purpose, hello in HELLO.items()]
    for peer in silent + half:
        while (message := peer.next()) is not None:
            assert isinstance(message, Refused)
    assert time.monotonic() - began_s > 3.0


@pytest.mark.long
def test_a_frontend_that_does_not_read_is_dropped(target: Target) -> None:
    """Memory stays within the bound of unsent bytes, others are served all the while, and then its streams end."""
    deaf = target.greeted()
    for stream in range(250):
        sampling = Sampling(20_000, stream, ignore_eos=True, top_logprobs=20)
        deaf.send(encode(Generate(stream, request(sampling=sampling))))
    other = target.greeted()
    assert other.send(encode(Generate(1, request()))).outputs(1).finish is not None
    deployment = target.deployment
    deployment.wait_until(lambda: deployment.worker_facts("worker-0")["streams"] == 0, "the deaf one to be dropped", 60)
    assert target.rss_bytes() < target.rss + 128 * 1024 * 1024
    assert "of what was sent to it: dropping it" in deployment.log("worker-0")
    deaf.sock.close()

"""A real worker's two sockets under everything but our protocol: it lives, says why it refuses, and keeps nothing."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.bench.deployment import Deployment
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.sim.vocabulary import asset
from holdfast.wire.frames import FRAME_BYTES_MAX, FrameSplitter, frame
from holdfast.wire.messages import (
    VERSION,
    ArtefactPart,
    Beat,
    Cancel,
    Draining,
    Generate,
    GetArtefact,
    Hello,
    Message,
    NotTaken,
    Refused,
    Step,
    Welcome,
    decode_to_frontend,
    encode,
)

pack = msgspec.msgpack.encode
HELLO = {"data": encode(Hello(VERSION, "data", "fuzz")), "beat": encode(Hello(VERSION, "beat", "fuzz"))}
NAN, INF = float("nan"), float("inf")


class Peer:
    """A blocking client of one of the worker's sockets."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(path)
        self._splitter = FrameSplitter()
        self._pending: list[Message] = []

    def send(self, data: bytes) -> Peer:
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was refused meanwhile; what it was told can still be read
        return self

    def next(self) -> Message | None:
        """The next message, None at the connection's end."""
        while not self._pending:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._pending += [decode_to_frontend(payload) for payload in self._splitter.feed(data)]
        return self._pending.pop(0)

    def refusal(self) -> Refused:
        """Whatever comes before it, the worker ends it with a reason and closes."""
        messages = []
        while (message := self.next()) is not None:
            messages.append(message)
        assert messages, "closed without a reason"
        assert isinstance(messages[-1], Refused), messages
        assert messages[-1].reason
        return messages[-1]

    def outputs(self, stream: int) -> Output:
        """The last output of a stream."""
        while True:
            message = self.next()
            assert isinstance(message, Step), message
            for output in message.outputs:
                if output.stream == stream and (output.finish or output.failure):
                    return output


class Target:
    """The worker under fire, and what it held before."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.pid = deployment.pid("worker-0")
        self.paths = {
            purpose: f"{deployment.folder}/run/worker-0.{end}" for purpose, end in (("data", "sock"), ("beat", "beat"))
        }
        self.held = self.count()
        self.rss = self.rss_bytes()

    def count(self) -> tuple[int, int]:
        return len(os.listdir(f"/proc/{self.pid}/fd")), len(os.listdir(f"/proc/{self.pid}/task"))

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peer(self, purpose: str) -> Peer:
        return Peer(self.paths[purpose])

    def greeted(self) -> Peer:
        peer = self.peer("data").send(HELLO["data"])
        assert isinstance(peer.next(), Welcome)
        return peer

    def judge(self) -> None:
        """Everything is as it was."""
        deployment = self.deployment
        assert deployment.processes["worker-0"].poll() is None
        deployment.wait_until(lambda: self.count() <= self.held, f"descriptors and threads to be {self.held} again")
        deployment.wait_until(lambda: deployment.worker_facts("worker-0")["streams"] == 0, "no stream to be left")
        facts = deployment.worker_facts("worker-0")
        assert (facts["status"], facts["running"], facts["waiting"]) == ("ready", 0, 0)
        assert self.rss_bytes() < self.rss + 96 * 1024 * 1024
        assert len(deployment.alive_workers()) == 1
        assert "Traceback" not in deployment.log("worker-0")


@pytest.fixture(scope="module")
def target(deployment: Deployment) -> Iterator[Target]:
    made = Target(deployment)
    yield made
    made.judge()


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "tokens": [70, 71, 72], "prompt_len": 3, "sampling": Sampling(4, 1)}
    return GenerateRequest(**(fields | changes))


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


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NOT_OURS
        if name not in ("cancel first", "generate first", "artefact first", "not taken first", "large before hello")
    ],
)
def test_nonsense_after_a_greeting_is_refused_too(target: Target, name: str) -> None:
    """And the streams that were running on the connection end with it."""
    peer = target.greeted()
    peer.send(encode(Generate(1, request(sampling=Sampling(20_000, 1, ignore_eos=True)))))
    assert isinstance(peer.next(), Step)
    peer.send(NOT_OURS[name] + encode(Generate(2, request())))
    assert peer.refusal().code == "InvalidRequest"
    peer.sock.close()
    target.deployment.wait_until(
        lambda: target.deployment.worker_facts("worker-0")["streams"] == 0, "its streams to end", 5
    )


def test_nothing_behind_a_refused_message_is_done(target: Target) -> None:
    """A peer that was refused starts no work, even with a message that came in the same packet."""
    before = target.deployment.worker_facts("worker-0")["requests_total"]
    peer = target.peer("data").send(
        encode(Hello(VERSION + 1, "data", "x")) + HELLO["data"] + encode(Generate(1, request()))
    )
    peer.refusal()
    assert target.deployment.worker_facts("worker-0")["requests_total"] == before


ABSURD = {
    "no tokens": request(tokens=[], prompt_len=0),
    "negative id": request(tokens=[5, -1], prompt_len=2),
    "huge id": request(tokens=[2**63], prompt_len=1),
    "id past the vocabulary": request(tokens=[6144], prompt_len=1),
    "prompt_len 0": request(prompt_len=0),
    "prompt_len past the end": request(prompt_len=4),
    "prompt_len negative": request(prompt_len=-3),
    "prompt_len huge": request(prompt_len=2**62),
    "over the context": request(tokens=[70] * 40_000, prompt_len=40_000),
    "repetition 0": request(sampling=Sampling(4, 1, repetition_penalty=0.0)),
    "repetition NaN": request(sampling=Sampling(4, 1, repetition_penalty=NAN)),
    "bias outside": request(sampling=Sampling(4, 1, logit_bias={10**9: 1.0})),
    "bias negative": request(sampling=Sampling(4, 1, logit_bias={-1: 1.0})),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_request_fails_by_name_and_the_connection_stays(target: Target, name: str) -> None:
    """The one stream fails as InvalidRequest; the next one on the same connection runs."""
    peer = target.greeted()
    failure = peer.send(encode(Generate(1, ABSURD[name]))).outputs(1).failure
    assert failure is not None
    assert failure.code == "InvalidRequest"
    assert failure.message
    assert peer.send(encode(Generate(1, request()))).outputs(1).finish is not None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0, 1),
        Sampling(-5, 1),
        Sampling(2, -(2**63)),
        Sampling(2, 2**64 - 1),
        Sampling(2, 1, min_tokens=2**62),
        Sampling(2, 1, min_tokens=-(2**62)),
        Sampling(2, 1, top_logprobs=10**9),
        Sampling(2, 1, top_logprobs=-1),
        Sampling(2, 1, top_k=-(2**62)),
        Sampling(2, 1, top_k=2**62),
        *(
            Sampling(2, 1, **{field: value, "top_logprobs": logprobs})  # type: ignore[arg-type]
            for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
            for value in (NAN, INF, -INF, -1.0, 1e308, 5e-324)
            for logprobs in (None, 3)
        ),
        *(Sampling(3, 1, repetition_penalty=value, top_logprobs=2) for value in (INF, 1e308, 5e-324)),
        *(Sampling(3, 1, logit_bias={5: value, 6: -value}, top_logprobs=2) for value in (NAN, INF, 1e308)),
    ],
)
def test_absurd_sampling_ends_somehow_and_harms_nobody(target: Target, sampling: Sampling) -> None:
    """Values no frontend would send: the stream ends, or fails by name, and the engine goes on stepping."""
    peer = target.greeted()
    last = peer.send(encode(Generate(1, request(sampling=sampling)))).outputs(1)
    assert last.finish is not None or last.failure is not None
    assert peer.send(encode(Generate(2, request()))).outputs(2).finish is not None


def test_a_length_without_end_stops_at_the_context(target: Target) -> None:
    """max_tokens beyond all bounds is the engine's own bound."""
    tokens = [70] * 32_700
    huge = request(tokens=tokens, prompt_len=len(tokens), sampling=Sampling(2**62, 1, ignore_eos=True))
    peer = target.greeted()
    assert peer.send(encode(Generate(1, huge))).outputs(1).finish == "length"


def test_a_stream_number_in_use_is_refused(target: Target) -> None:
    """Two streams of one number could not be told apart; the connection ends."""
    long = Generate(9, request(sampling=Sampling(20_000, 1, ignore_eos=True)))
    assert "stream 9 is in use" in target.greeted().send(encode(long) * 2).refusal().reason


def test_cancelling_what_is_not_there_is_nothing(target: Target) -> None:
    """Unknown, negative, huge and repeated numbers."""
    peer = target.greeted().send(encode(Cancel([1, -1, 2**63, *range(10_000)])) * 3)
    assert peer.send(encode(Generate(1, request()))).outputs(1).finish is not None


def test_an_unknown_artefact_is_answered_and_a_flood_is_refused(target: Target) -> None:
    """Total 0 says it is not there; whoever asks for many without reading is not served from memory."""
    peer = target.greeted().send(encode(GetArtefact("no such")))
    assert peer.next() == ArtefactPart("no such", 0, 0, b"")
    flood = target.greeted()
    flood.send(encode(GetArtefact(hashlib.sha256(asset("tokenizer.json")).hexdigest())) * 500)
    assert "artefacts" in flood.refusal().reason


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


def test_silence_is_not_waited_for_for_ever(target: Target) -> None:
    """A connection without a greeting, or with half of one, is closed after some seconds: places are bounded."""
    silent = [target.peer(purpose) for purpose in HELLO]
    half = [target.peer(purpose).send(hello[:7]) for purpose, hello in HELLO.items()]
    began_s = time.monotonic()
    for peer in silent + half:
        while (message := peer.next()) is not None:
            assert isinstance(message, Refused)
    assert 3.0 < time.monotonic() - began_s < 9.0


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
    assert "does not read: dropping it" in deployment.log("worker-0")
    deaf.sock.close()


def test_many_connections_at_once_come_and_go(target: Target) -> None:
    """As many as there are places, all leaving at once: a frontend still gets in."""
    peers = [target.peer(purpose) for purpose in ("data", "beat") for _ in range(60)]
    for peer in peers[::2]:
        peer.send(HELLO["data"])
    for peer in peers:
        peer.sock.close()
    target.greeted().sock.close()

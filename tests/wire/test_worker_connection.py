"""A connection to a worker: a burst is no reason to drop the worker, taking nothing is; a refusal shows its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.control.worker_probe import CanaryConnection
from holdfast.core.address import UnixAddress
from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.wire import net
from holdfast.wire.frames import FrameSplitter, encode, frame
from holdfast.wire.messages import (
    VERSION,
    Generate,
    Ping,
    Pong,
    ProcessIdentity,
    Refused,
    ToFrontend,
    Welcome,
    decode_to_worker,
)
from holdfast.wire.net import SocketNetwork
from holdfast.wire.worker_connection import WorkerConnection

WAIT_S = 60.0
# A prompt of a million tokens is a frame of 5 MB: 20 of them are more than may be unsent for long.
PROMPT = [70_000] * 1_000_000
REQUESTS = 20


class SlowWorker(asyncio.Protocol):
    """Reads nothing until it is told to; then counts the requests it gets."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.requests = 0
        self.all_here = asyncio.Event()
        self._splitter = FrameSplitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()
        self.connected.set()

    def data_received(self, data: bytes) -> None:
        for payload in self._splitter.feed(data):
            self.requests += isinstance(decode_to_worker(payload), Generate)
        if self.requests == REQUESTS:
            self.all_here.set()


async def connected(folder: Path) -> tuple[SlowWorker, WorkerConnection]:
    worker = SlowWorker()
    network = SocketNetwork()
    await network.listen(UnixAddress(str(folder / "w")), lambda: worker)
    link = WorkerConnection("test")
    await network.connect(UnixAddress(str(folder / "w")), lambda: link, WAIT_S)
    await asyncio.wait_for(worker.connected.wait(), WAIT_S)
    return worker, link


def burst(link: WorkerConnection) -> None:
    for stream in range(REQUESTS):
        link.send(Generate(stream, GenerateRequest(f"r{stream}", PROMPT, len(PROMPT), Sampling(10, 1))))
    assert link.transport is not None
    assert link.transport.get_write_buffer_size() > net.UNSENT_BYTES_MAX


async def test_a_burst_does_not_drop_a_worker_that_takes_it(tmp_path: Path) -> None:
    """However much is sent at once: the worker gets all of it when it reads on."""
    worker, link = await connected(tmp_path)
    burst(link)
    worker.transport.resume_reading()
    await asyncio.wait_for(worker.all_here.wait(), WAIT_S)
    assert not link.closed.is_set()
    link.abort()


async def test_a_worker_that_takes_nothing_is_dropped_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then, and after a time: what is queued for it would never be read."""
    monkeypatch.setattr(net, "UNSENT_S", 0.5)
    _, link = await connected(tmp_path)
    burst(link)
    assert not link.closed.is_set()
    await asyncio.wait_for(link.closed.wait(), WAIT_S)
    assert "took nothing" in str(link.ended)


WELCOME = Welcome(VERSION, 1, "n", "c", 1, 1, True, ProcessIdentity("", "", 0, 0, 0))
PROBE: Any = SimpleNamespace(mark_heard=lambda: None, on_message=lambda message: None)


class RefusingWorker(asyncio.Protocol):
    """Welcomes a peer, refuses its next message, and keeps the connection open, as a worker does for two seconds."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._answers = [WELCOME, Refused("InvalidRequest", "cannot read message: invalid value 77")]

    def data_received(self, data: bytes) -> None:
        self._transport.write(encode(self._answers.pop(0)))


@pytest.mark.parametrize(
    "connection", [lambda: WorkerConnection("test"), lambda: CanaryConnection(PROBE, "test")], ids=["any", "canary"]
)
async def test_a_message_refused_after_the_welcome_is_shown_with_its_reason(
    tmp_path: Path, connection: Callable[[], WorkerConnection]
) -> None:
    """Not only "connection closed": the worker says why, and the connection ends at once."""
    network, address = SocketNetwork(), UnixAddress(str(tmp_path / "w"))
    await network.listen(address, RefusingWorker)
    link = connection()
    await network.connect(address, lambda: link, WAIT_S)
    await link.welcome(WAIT_S)
    link.send(Ping(1))
    await asyncio.wait_for(link.closed.wait(), WAIT_S)
    assert link.ended.code == "InvalidRequest"
    assert str(link.ended) == "worker refused the connection: cannot read message: invalid value 77"


class NewerWorker(asyncio.Protocol):
    """Answers each frame with the frames of its list."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = b"".join(frames)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._frames)


async def link_to(folder: Path, worker: NewerWorker, link: WorkerConnection) -> WorkerConnection:
    network, address = SocketNetwork(), UnixAddress(str(folder / "w"))
    await network.listen(address, lambda: worker)
    await network.connect(address, lambda: link, WAIT_S)
    return link


async def test_a_message_that_only_a_newer_worker_knows_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages after it in the same read are handled; the log has one line."""
    unknown, got = frame(msgspec.msgpack.encode([99, "news"])), asyncio.Event()

    class Link(WorkerConnection):
        def on_message(self, message: ToFrontend) -> None:
            super().on_message(message)
            if message == Pong(7):
                got.set()

    worker = NewerWorker(encode(WELCOME), unknown, unknown, encode(Pong(7)))
    link = await link_to(tmp_path, worker, Link("test"))
    assert (await link.welcome(WAIT_S)).version == VERSION
    await asyncio.wait_for(got.wait(), WAIT_S)
    link.send(Ping(1))
    assert not link.closed.is_set()
    ignored = [one.getMessage() for one in caplog.records if "unknown kind 99" in one.getMessage()]
    assert len(ignored) == 1
    assert ignored[0].startswith("the worker sent")
    link.abort()


async def test_a_worker_in_another_version_is_given_up_with_both_versions(tmp_path: Path) -> None:
    """The text names what each side speaks, and the remedy."""
    newer = msgspec.structs.replace(WELCOME, version=VERSION + 1)
    link = await link_to(tmp_path, NewerWorker(encode(newer)), WorkerConnection("test"))
    with pytest.raises(ConnectionError, match=r"speaks wire version 3, this process speaks version 2; upgrade the old"):
        await link.welcome(WAIT_S)

"""What a frontend sends to a worker: a burst is no reason to drop the worker, taking nothing is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.core.address import UnixAddress
from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.wire import net
from holdfast.wire.frames import FrameSplitter
from holdfast.wire.messages import Generate, decode_to_worker
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

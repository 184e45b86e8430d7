"""The beat thread over real sockets: who it talks to, how often, and that nobody can hold it up."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.address import Address, TcpAddress, UnixAddress
from holdfast.engines.contract import Progress
from holdfast.kv.pool import KvUse
from holdfast.wire.messages import VERSION, Beat, Refused, Welcome
from holdfast.worker.beat import BEAT_S, OBSERVERS_MAX, BeatThread
from tests.rigs.wire_peer import HELLO, Peer

pytestmark = pytest.mark.alone

PICKED = TcpAddress("127.0.0.1", 0)
IDLE = Progress(steps=0, running=0, waiting=0, step_ms_p99=0.0, budget_ms=0.0, thread=None)


def observe(address: Address, hello: bytes = HELLO["beat"]) -> Peer:
    return Peer((address.host, address.port) if isinstance(address, TcpAddress) else address.path).send(hello)


def beat_of(peer: Peer) -> Beat:
    message = peer.next()
    assert isinstance(message, Beat), message
    return message


class Source:
    """A progress the test sets."""

    def __init__(self) -> None:
        self.now = IDLE

    def __call__(self) -> Progress:
        return self.now


@pytest.fixture
def source() -> Source:
    return Source()


@contextlib.contextmanager
def beating(source: Source, address: Address = PICKED, *, known: bool = True) -> Iterator[BeatThread]:
    """A thread that beats; if it is `known`, with its welcome."""
    started = BeatThread(address, source)
    started.start()
    if known:
        started.set_welcome(welcome(started))
    yield started
    assert started.stop()


@pytest.fixture
def thread(source: Source) -> Iterator[BeatThread]:
    with beating(source) as started:
        yield started


def welcome(thread: BeatThread) -> Welcome:
    return Welcome(VERSION, 5, "ns", "sum", 1, 1, True, thread.identity)


def test_a_greeting_is_answered_and_beats_follow(thread: BeatThread, source: Source) -> None:
    """Hello, Welcome, then beats that say what progress says."""
    source.now = replace(IDLE, steps=3, running=2, waiting=1, step_ms_p99=9.0, budget_ms=50.0)
    peer = observe(thread.address)
    assert peer.next() == welcome(thread)
    first, second = beat_of(peer), beat_of(peer)
    assert (first.steps, first.running, first.waiting, first.step_ms_p99, first.budget_ms) == (3, 2, 1, 9.0, 50.0)
    assert second.count == first.count + 1
    assert second.stuck_ms >= first.stuck_ms


def test_the_rhythm_follows_the_work(source: Source) -> None:
    """By its own ticks, five in a second: a beat at each with work, one in a second without, and one more at once when
    work ends."""
    thread, now_s = BeatThread(PICKED, source), 100.0

    def beats(ticks: int) -> int:
        nonlocal now_s
        before = thread._count
        for _ in range(ticks):
            now_s += BEAT_S
            thread._tick(now_s)
        return thread._count - before

    assert beats(1) == 1
    assert beats(25) == 5
    source.now = replace(IDLE, running=1)
    assert beats(10) == 10
    source.now = IDLE
    assert [beats(1), beats(4), beats(25)] == [1, 0, 5]


def test_before_the_welcome_is_known_observers_are_asked_to_come_again(source: Source) -> None:
    """A worker that is still starting refuses, and welcomes once it knows itself."""
    with beating(source, known=False) as thread:
        refused = observe(thread.address).next()
        assert isinstance(refused, Refused)
        assert refused.code == "CannotConnect"
        thread.set_welcome(welcome(thread))
        assert isinstance(observe(thread.address).next(), Welcome)


def test_observers_are_bounded_and_places_come_free(thread: BeatThread) -> None:
    """One more than the bound is refused; when one leaves, another may come."""
    peers = [observe(thread.address) for _ in range(OBSERVERS_MAX)]
    assert all(isinstance(peer.next(), Welcome) for peer in peers)
    # Connected without a greeting, so that the refusal is not lost to a reset.
    extra = observe(thread.address, b"")
    refused = extra.next()
    assert isinstance(refused, Refused)
    assert refused.code == "WorkerOverloaded"
    peers[0].sock.close()
    for _ in range(50):
        if isinstance(observe(thread.address).next(), Welcome):
            return
    pytest.fail("no place came free")


def test_an_observer_that_does_not_read_is_dropped_and_holds_up_nobody(tmp_path: Path, source: Source) -> None:
    """Its buffer full, it is dropped; the others' beats come all the while."""
    with beating(source, UnixAddress(str(tmp_path / "b.sock"))) as thread:
        source.now = replace(IDLE, running=1)
        deaf, peer = observe(thread.address), observe(thread.address)
        assert isinstance(peer.next(), Welcome)
        beat_of(peer)
        silent = min(thread._observers, key=lambda o: o.sock.fileno())  # the one that came first
        with contextlib.suppress(BlockingIOError):  # fill its buffer, as an hour of beats would
            while True:
                silent.sock.send(b"\0" * 1024)
        for _ in range(4):
            beat_of(peer)
        assert silent not in thread._observers
        deaf.sock.close()
    assert not os.path.exists(str(tmp_path / "b.sock"))


def test_late_beats_are_late_in_order_and_none_is_lost(source: Source) -> None:
    """A fault: each goes out so much after it was made, and says what was so then; the thread wakes as ever."""
    source.now = replace(IDLE, running=1, tokens=7, load=5, kv=KvUse(blocks=10, held=4))
    with beating(source, PICKED) as thread:
        peer = observe(thread.address)
        assert isinstance(peer.next(), Welcome)
        first = beat_of(peer)
        assert (first.tokens, first.load, first.blocks, first.blocks_free) == (7, 5, 10, 6)
        thread.late_s = 0.6
        source.now = replace(source.now, steps=1)
        changed_s = time.monotonic()
        counts = [first.count]
        while (beat := beat_of(peer)).steps == 0:
            counts.append(beat.count)
        assert time.monotonic() - changed_s >= 0.1, "a tick may have begun well before the delay"
        thread.late_s = 0.0
        counts += [beat.count, *(beat_of(peer).count for _ in range(6))]
        assert counts == list(range(counts[0], counts[0] + len(counts)))


def test_what_was_late_goes_out_once_nothing_is(thread: BeatThread) -> None:
    """However late it was to be: those behind it wait for it."""
    peer = observe(thread.address)
    assert isinstance(peer.next(), Welcome)
    first = beat_of(peer)
    thread.late_s = 600.0
    time.sleep(1.3)  # one was made
    thread.late_s = 0.0
    assert beat_of(peer).count == first.count + 1


def test_stop_is_quick_and_closes_every_connection(thread: BeatThread) -> None:
    """After stop the thread is over, and its observers see the end; stopping again does no harm."""
    peer = observe(thread.address)
    assert isinstance(peer.next(), Welcome)
    assert thread.stop()
    while peer.next() is not None:
        pass
    assert "beat" not in {t.name for t in threading.enumerate()}


def test_a_socket_left_by_a_dead_worker_is_replaced(tmp_path: Path, source: Source) -> None:
    """A path left over from a crash is no obstacle."""
    address = UnixAddress(str(tmp_path / "b.sock"))
    left = socket.socket(socket.AF_UNIX)
    left.bind(address.path)
    left.close()
    with beating(source, address, known=False):
        assert isinstance(observe(address).next(), Refused)


def test_a_busy_port_is_told_to_the_caller(thread: BeatThread, source: Source) -> None:
    """Binding fails in `start`, where the worker can say so."""
    with pytest.raises(OSError, match="in use"):
        BeatThread(thread.address, source).start()

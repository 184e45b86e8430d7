"""Sessions over a real socket, with an engine that does what the test says: artefacts, places, hand-back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.core.address import UnixAddress
from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, GenerateRequest, Output, Sampling
from holdfast.engines.contract import Capabilities, EngineEvents, Limits, Progress
from holdfast.testing.waiting import until
from holdfast.wire import net
from holdfast.wire.frames import FrameSplitter, encode, frame
from holdfast.wire.messages import (
    VERSION,
    ArtefactPart,
    Cancel,
    Closed,
    Draining,
    Generate,
    GetArtefact,
    Hello,
    Message,
    NotTaken,
    Pass,
    Ping,
    Pong,
    ProcessIdentity,
    Refused,
    Reload,
    Reloaded,
    Room,
    Step,
    Welcome,
    decode_to_frontend,
)
from holdfast.wire.net import SocketNetwork
from holdfast.worker import slot_queue
from holdfast.worker.sessions import SESSIONS_MAX, Sessions

WELCOME = Welcome(VERSION, 1, "ns", "sum", 4, 4, True, ProcessIdentity("", "", 1, 1, 1))
TOKENIZER = bytes(range(256)) * 4096 * 40  # 40 MiB: more than may stay unsent
SHA = hashlib.sha256(TOKENIZER).hexdigest()
LARGE, STEPS = [70_000] * 1_000_000, 10  # five bytes each


class Engine:
    """Takes two streams and makes nothing by itself."""

    limits = Limits(4, 4, 1000)
    capabilities = Capabilities(deterministic=True)

    def __init__(self) -> None:
        self.streams: dict[int, GenerateRequest] = {}
        self.pings: list[Callable[[], None]] = []

    async def load(self, events: EngineEvents) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, stream: int, request: GenerateRequest) -> None:
        if len(self.streams) >= 2 + (request.tier == CANARY_TIER):
            raise HoldfastError(Code.WORKER_OVERLOADED, "two are enough")
        self.streams[stream] = request

    def cancel(self, stream: int) -> None:
        self.streams.pop(stream, None)

    def ping(self, answer: Callable[[], None]) -> None:
        self.pings.append(answer)

    def progress(self) -> Progress:
        return Progress(0, len(self.streams), 0, 0.0, 0.0, None)


class Worker:
    """What sessions ask of their worker."""

    def __init__(self) -> None:
        self.welcome: Welcome | None = WELCOME
        self.artefacts = {SHA: TOKENIZER}
        self.refusing = ""
        self.proving = False
        self.not_taken = ""

    def asked_to_reload(self, message: Reload, uid: int | None, answer: Callable[[Reloaded], None]) -> None:
        answer(Reloaded(message.load, f"uid {uid}"))


class Frontend:
    """A connection to the sessions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._splitter = FrameSplitter()
        self._pending: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.writer.write(b"".join(map(encode, messages)))

    async def next(self) -> Message | None:
        async with asyncio.timeout(60):
            while not self._pending:
                data = await self._reader.read(1 << 20)
                if not data:
                    return None
                self._pending += [decode_to_frontend(payload) for payload in self._splitter.feed(data)]
        return self._pending.pop(0)


class Rig:
    """Sessions that listen."""

    def __init__(self, path: Path) -> None:
        self.address = UnixAddress(str(path))
        self.engine, self.worker = Engine(), Worker()
        self.sessions = Sessions(self.engine, self.worker)

    async def connect(self, *, greet: bool = True, purpose: str = "data") -> Frontend:
        frontend = Frontend(*await asyncio.open_unix_connection(self.address.path))
        if greet:
            frontend.send(Hello(VERSION, purpose, "test"))
            assert await frontend.next() == WELCOME
        return frontend

    async def until(self, true: Callable[[], bool]) -> None:
        """Sessions tell nobody of their changes: look, often."""
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.005)

    async def until_streams(self, count: int) -> None:
        await self.until(lambda: self.sessions.streams == count)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "w.sock")
    listener = await SocketNetwork().listen(made.address, made.sessions.connection)
    yield made
    listener.close()
    made.sessions.reset_connections()


async def failure_of(peer: Frontend, stream: int) -> str:
    message = await peer.next()
    assert isinstance(message, Step)
    (output,) = message.outputs
    assert output.stream == stream
    assert output.failure is not None
    return output.failure.code


def generate(stream: int) -> Generate:
    return Generate(stream, GenerateRequest("r", [1], 1, Sampling(5, 1)))


async def test_an_artefact_larger_than_the_send_bound_arrives_whole(rig: Rig) -> None:
    """It goes out as the frontend reads it; a stream's tokens pass between its parts."""
    frontend = await rig.connect()
    frontend.send(generate(7), GetArtefact(SHA))
    gathered, steps = bytearray(), 0
    while len(gathered) < len(TOKENIZER):
        message = await frontend.next()
        if isinstance(message, Step):
            steps += 1
            continue
        assert isinstance(message, ArtefactPart)
        assert (message.sha256, message.offset, message.total) == (SHA, len(gathered), len(TOKENIZER))
        gathered += message.data
        if len(gathered) == 5 * 1024 * 1024:
            rig.sessions.outputs([Output(next(iter(rig.engine.streams)), [5])])
    assert hashlib.sha256(gathered).hexdigest() == SHA
    assert steps == 1


async def test_a_frontend_that_asks_and_does_not_read_costs_one_part(rig: Rig) -> None:
    """Sixteen artefacts of 40 MiB asked for, and little of it waits in memory."""
    frontend = await rig.connect()
    frontend.send(*[GetArtefact(SHA)] * 10)
    await frontend.writer.drain()
    frontend.send(generate(1))
    await rig.until_streams(1)
    (session,) = rig.sessions.open
    assert session.unsent_bytes < 3 * 1024 * 1024
    frontend.writer.transport.abort()
    await rig.until_streams(0)


async def far_behind(rig: Rig) -> Frontend:
    """A frontend that has not read 50 MB which a stream of it made."""
    frontend = await rig.connect()
    frontend.send(generate(1))
    await rig.until_streams(1)
    (stream,) = rig.engine.streams
    for _ in range(STEPS):
        rig.sessions.outputs([Output(stream, LARGE)])
    return frontend


async def test_a_frontend_far_behind_is_kept_while_it_reads(rig: Rig) -> None:
    """How much waits for it is no reason to drop it: it gets all of it when it reads on."""
    frontend = await far_behind(rig)
    (session,) = rig.sessions.open
    assert session.unsent_bytes > net.UNSENT_BYTES_MAX
    for _ in range(STEPS):
        message = await frontend.next()
        assert isinstance(message, Step)
        assert [output.tokens for output in message.outputs] == [LARGE]
    assert rig.sessions.streams == 1


async def test_a_frontend_that_takes_nothing_is_dropped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, after a time, with its streams."""
    monkeypatch.setattr(net, "UNSENT_S", 0.5)
    frontend = await far_behind(rig)
    await rig.until(lambda: not rig.sessions.open)
    assert rig.engine.streams == {}
    assert "frontend test took nothing for 0.5 s" in caplog.text
    frontend.writer.transport.abort()


async def test_places_are_bounded_and_come_free(rig: Rig) -> None:
    """One more than the bound is told so; when one leaves, the next gets in."""
    frontends = [await rig.connect() for _ in range(SESSIONS_MAX)]
    extra = await rig.connect(greet=False)
    refused = await extra.next()
    assert isinstance(refused, Refused)
    assert refused.code == "WorkerOverloaded"
    assert await extra.next() is None
    frontends[0].writer.transport.abort()
    await rig.until(lambda: len(rig.sessions.open) < SESSIONS_MAX)
    await rig.connect()
    for frontend in frontends:
        frontend.writer.transport.abort()


async def test_an_engine_that_is_full_says_so_for_the_stream_alone(rig: Rig) -> None:
    """The connection and its other streams go on."""
    frontend = await rig.connect()
    frontend.send(generate(1), generate(2), generate(3))
    message = await frontend.next()
    assert isinstance(message, Step)
    assert [(output.stream, output.failure and output.failure.code) for output in message.outputs] == [
        (3, "WorkerOverloaded")
    ]
    assert rig.sessions.streams == 2


async def test_a_place_that_comes_free_goes_to_the_frontend_that_has_fewest(rig: Rig) -> None:
    """One frontend has all places and wants more, another comes: the next place is kept for the second, whatever the
    first sends meanwhile; what the second does not want is the first's."""
    rig.engine.limits = Limits(1, 1, 1000)
    greedy, modest = await rig.connect(), await rig.connect()
    greedy.send(*[generate(number) for number in range(1, 5)])
    await rig.until_streams(2)
    assert [await turned_away(greedy) for _ in range(2)] == [3, 4]
    modest.send(generate(1))
    assert await turned_away(modest) == 1
    (finished, _) = rig.engine.streams
    rig.engine.cancel(finished)
    rig.sessions.outputs([Output(finished, [5], "stop")])
    assert await modest.next() == Room(1)
    assert isinstance(await greedy.next(), Step)
    greedy.send(generate(5))
    assert await turned_away(greedy) == 5, "the place is kept"
    modest.send(generate(2))
    await rig.until_streams(2)
    (finished, _) = rig.engine.streams
    rig.engine.cancel(finished)
    rig.sessions.outputs([Output(finished, [5], "stop")])
    assert isinstance(await greedy.next(), Step)
    assert await greedy.next() == Room(1), "it has none, the other has one"
    greedy.send(Pass())
    assert await modest.next() == Room(1)
    modest.writer.transport.abort()
    await rig.until_streams(0)
    greedy.send(generate(6), generate(7))
    await rig.until_streams(2)


async def test_a_pass_that_crosses_a_refusal_leaves_its_frontend_in_line(rig: Rig) -> None:
    """It said that it wants no place before it heard that it was turned away: it waits for room, and hears of it."""
    rig.engine.limits = Limits(1, 0, 1000)
    one = await rig.connect()
    one.send(generate(1), generate(2), Pass(0))
    assert await turned_away(one) == 2
    (finished,) = rig.engine.streams
    rig.engine.cancel(finished)
    rig.sessions.outputs([Output(finished, [5], "stop")])
    assert isinstance(await one.next(), Step)
    assert await one.next() == Room(1)


async def test_who_gave_up_what_was_refused_by_a_bound_hears_of_any_place(rig: Rig) -> None:
    """It does not hear that its request was turned away by a bound, and may wait with one that has none."""
    rig.engine.limits = Limits(3, 0, 1000)
    one = await rig.connect()
    one.send(generate(1), msgspec.structs.replace(generate(2), places=1))
    assert await turned_away(one) == 2
    one.send(Cancel([2]))
    assert await one.next() == Room(2)


async def test_a_frontend_that_was_frozen_hears_of_room_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers an offer when that is given up: it has its place all the same if there is one, and stays in line."""
    monkeypatch.setattr(slot_queue, "KEEP_S", 0.0)
    rig.engine.limits = Limits(1, 0, 1000)
    one = await rig.connect()
    one.send(generate(1), generate(2))
    assert await turned_away(one) == 2
    for number in (3, 4):
        (finished,) = rig.engine.streams
        rig.engine.cancel(finished)
        rig.sessions.outputs([Output(finished, [5], "stop")])
        assert isinstance(await one.next(), Step)
        assert await one.next() == Room(1)
        await until(lambda: rig.sessions._slot_queue.kept == 0, "the offer to be given up")
        one.send(generate(number))
        await rig.until_streams(1)


async def test_a_stream_that_ran_before_goes_ahead_of_the_line(rig: Rig) -> None:
    """It lost its worker in mid-answer: it does not wait behind requests nobody has seen anything of."""
    rig.engine.limits = Limits(1, 0, 1000)
    one, two = await rig.connect(), await rig.connect()
    one.send(generate(1), generate(2))
    assert await turned_away(one) == 2
    two.send(Generate(1, GenerateRequest("r", [1, 9], 1, Sampling(5, 1))))
    await rig.until_streams(2)


async def test_a_canary_takes_nobodys_place(rig: Rig) -> None:
    """On a connection for canaries a request is taken where all places are, in the canaries' tier; it is in no count,
    a second one is turned away without a place in line, and no client gets into that tier."""
    frontend, control = await rig.connect(), await rig.connect(purpose="canary")
    frontend.send(generate(1), generate(2), generate(3))
    assert await failure_of(frontend, 3) == Code.WORKER_OVERLOADED
    control.send(generate(7))
    await rig.until(lambda: len(rig.engine.streams) == 3)
    assert [request.tier == CANARY_TIER for request in rig.engine.streams.values()] == [False, False, True]
    assert (rig.sessions.streams, rig.sessions.requests_total) == (2, 2)
    control.send(generate(8))
    assert await failure_of(control, 8) == Code.WORKER_OVERLOADED
    *_, key = rig.engine.streams
    rig.engine.cancel(key)
    rig.sessions.outputs([Output(key, [5], "length")])
    assert (await control.next()) == Step([Output(7, [5], "length")])
    assert (rig.sessions.streams, rig.sessions.tokens_total) == (2, 0)
    assert rig.sessions.made_total == 1, "it was one of those that ran: a pace without its tokens would look slow"
    control.send(Generate(9, GenerateRequest("long", [1] * 200, 200, Sampling(100, 1))))
    assert await failure_of(control, 9) == Code.INVALID_REQUEST, "it goes ahead of everybody, so it is short"
    other = await rig.connect()
    other.send(Generate(4, msgspec.structs.replace(generate(4).request, tier=CANARY_TIER)))
    assert await failure_of(other, 4) == Code.INVALID_REQUEST
    other.writer.transport.abort()
    control.writer.transport.abort()
    frontend.writer.transport.abort()
    await rig.until(lambda: not rig.sessions.open)


async def test_a_connection_says_hello_once(rig: Rig) -> None:
    """What it is for cannot change while it has streams."""
    peer = await rig.connect()
    peer.send(Hello(VERSION, "canary", "test"))
    refused = await peer.next()
    assert isinstance(refused, Refused)
    assert "once" in refused.reason


@pytest.mark.parametrize("purpose", ["data", "canary"])
async def test_a_pong_is_the_engines(rig: Rig, purpose: str) -> None:
    """However often it is asked, the engine hears one ping at a time; nothing is answered before it says so, and then
    the last one is."""
    peer = await rig.connect(purpose=purpose)
    peer.send(Ping(1), Ping(2), Ping(3), generate(1))
    await rig.until(lambda: len(rig.engine.streams) == 1)
    (answer,) = rig.engine.pings
    answer()
    assert await peer.next() == Pong(3)
    peer.send(Ping(4))
    await rig.until(lambda: len(rig.engine.pings) == 2)
    rig.engine.pings[1]()
    assert await peer.next() == Pong(4)


async def test_who_asks_for_a_reload_is_looked_up_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask, as often as he likes; to find out who he is may take long."""
    looked: list[object] = []
    monkeypatch.setattr("holdfast.worker.sessions.peer_uid", lambda sock: looked.append(sock) or 7)
    peer = await rig.connect(purpose="canary")
    peer.send(*(Reload(load) for load in range(3)))
    assert [await peer.next() for _ in range(3)] == [Reloaded(load, "uid 7") for load in range(3)]
    assert len(looked) == 1


async def test_a_frozen_frontend_keeps_no_place(rig: Rig) -> None:
    """It was told of room and does not answer: a moment later another is told, though no step is made."""
    rig.engine.limits = Limits(1, 0, 1000)
    frozen, other = await rig.connect(), await rig.connect()
    frozen.send(generate(1), generate(2))
    assert await turned_away(frozen) == 2
    other.send(generate(1))
    assert await turned_away(other) == 1
    frozen.send(Cancel([1]))
    assert await frozen.next() == Room(1)
    assert await other.next() == Room(1)


async def turned_away(frontend: Frontend) -> int:
    """The stream that the next message turns away."""
    message = await frontend.next()
    assert isinstance(message, Step), message
    (output,) = message.outputs
    assert output.failure is not None
    assert output.failure.code == "WorkerOverloaded"
    return output.stream


async def test_a_refused_frontend_takes_its_streams_with_it_at_once_and_is_cut_off(rig: Rig) -> None:
    """Two streams of one number cannot be told apart: it is refused, and its streams end before its connection is down.
    It neither reads nor leaves: soon it holds no place any more."""
    frontend = await rig.connect()
    frontend.send(generate(1), generate(1))
    await rig.until_streams(0)
    assert rig.engine.streams == {}
    await rig.until(lambda: not rig.sessions.open)
    message = await frontend.next()
    assert isinstance(message, Refused)
    assert "stream 1 is in use" in message.reason
    frontend.writer.transport.abort()


async def test_draining_hands_every_stream_back_and_takes_no_more(rig: Rig) -> None:
    """In-band, by name, to each frontend its own."""
    first, second = await rig.connect(), await rig.connect()
    first.send(generate(1))
    second.send(generate(1))
    await rig.until_streams(2)
    rig.worker.refusing = "asked to stop"
    rig.sessions.hand_back("asked to stop")
    second.send(generate(2))
    for frontend, streams in ((first, [1]), (second, [1, 2])):
        assert await frontend.next() == Draining("asked to stop")
        for stream in streams:
            message = await frontend.next()
            assert isinstance(message, Step)
            (output,) = message.outputs
            assert output.stream == stream
            assert output.failure is not None
            assert output.failure.code == "EngineShutdown"
    assert rig.engine.streams == {}
    assert await rig.sessions.flushed(1.0)


async def test_who_is_in_line_stays_there_where_streams_go_back_and_work_is_taken(rig: Rig) -> None:
    """A lone worker that loads its weights again: nothing but its word ends a wait for room."""
    first, second = await rig.connect(), await rig.connect()
    first.send(generate(1), generate(2))
    await rig.until_streams(2)
    second.send(generate(1))
    assert await turned_away(second) == 1
    rig.sessions.hand_back("loaded again", drains=False)
    assert isinstance(await second.next(), Room)
    second.send(generate(2))
    await rig.until_streams(1)


async def test_a_stream_the_engine_lost_is_told_closed(rig: Rig) -> None:
    """By the frontend's own number."""
    frontend = await rig.connect()
    frontend.send(generate(41), generate(42))
    await rig.until_streams(2)
    rig.sessions.closed([*rig.engine.streams, 999])
    assert await frontend.next() == Closed([41, 42])
    assert rig.sessions.streams == 0


async def test_what_a_peer_says_is_cut_to_what_can_be_shown(rig: Rig) -> None:
    """A reason of megabytes does not become a log line or a health page of megabytes."""
    frontend = await rig.connect()
    frontend.send(NotTaken("no " * 1_000_000))
    await rig.until(lambda: rig.worker.not_taken != "")
    assert len(rig.worker.not_taken) <= 200
    stranger = await rig.connect(greet=False)
    stranger.send(Hello(VERSION, "x" * 3000, ""))
    refused = await stranger.next()
    assert isinstance(refused, Refused)
    assert len(refused.reason) < 400
    with contextlib.suppress(ConnectionError):
        assert await stranger.next() is None


async def test_before_the_engine_is_ready_frontends_are_asked_to_come_again(rig: Rig) -> None:
    """The socket is there before the worker is."""
    rig.worker.welcome = None
    frontend = await rig.connect(greet=False)
    frontend.send(Hello(VERSION, "data", "early"))
    refused = await frontend.next()
    assert isinstance(refused, Refused)
    assert refused.code == "CannotConnect"


async def test_a_newer_frontend_speaks_the_version_that_both_know(rig: Rig) -> None:
    """It names the range that it speaks; a range apart from the worker's is refused with both, and the remedy."""
    newer = await rig.connect(greet=False)
    newer.send(Hello(VERSION, "data", "newer", VERSION + 5, ("colour",)))
    assert await newer.next() == WELCOME
    for first, last, client in ((3, 5, "versions 3 to 5"), (1, 0, "version 1")):
        apart = await rig.connect(greet=False)
        apart.send(Hello(first, "data", "apart", last))
        refused = await apart.next()
        assert isinstance(refused, Refused)
        expected = f"the client speaks {client}, this worker speaks version 2; upgrade the older one"
        assert refused.reason == expected


async def test_a_message_of_a_newer_frontend_ends_none_of_its_streams(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ignored, and logged once, on one line whatever the frontend calls itself; as a first message it is
    refused."""
    unknown = frame(msgspec.msgpack.encode([99, "news"]))
    frontend = await rig.connect(greet=False)
    frontend.send(Hello(VERSION, "data", "f\n2026 forged"))
    assert await frontend.next() == WELCOME
    frontend.writer.write(encode(generate(1)) + unknown + unknown + encode(generate(2)))
    await rig.until_streams(2)
    ignored = [one.getMessage() for one in caplog.records if "unknown kind 99" in one.getMessage()]
    assert len(ignored) == 1
    assert ignored[0].startswith("f\\n2026 forged sent a message of unknown kind 99")
    stranger = await rig.connect(greet=False)
    stranger.writer.write(unknown)
    refused = await stranger.next()
    assert isinstance(refused, Refused)
    assert "unknown kind 99" in refused.reason

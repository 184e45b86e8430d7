"""A frontend's roster over real sockets, and small scripted workers that speak the wire as they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from holdfast.core.address import UnixAddress
from holdfast.core.errors import Code
from holdfast.core.ports import Listener
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.discovery.keys import InstanceKey, InstanceRecord
from holdfast.discovery.registry import Appeared, Instance, Withdrawn
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import Flight, WaitStatus
from holdfast.streams.ledger import Ledger
from holdfast.streams.link import WorkerLink
from holdfast.streams.roster import Roster
from holdfast.streams.verdicts import WorkerVerdicts
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import (
    VERSION,
    ArtefactPart,
    Beat,
    Generate,
    GetArtefact,
    Hello,
    Message,
    NotTaken,
    ProcessIdentity,
    Refused,
    Step,
    Welcome,
    decode_to_worker,
)
from holdfast.wire.net import SocketNetwork

TOKENIZER = b"a tokenizer" * 100
NAMESPACE = "d-00000000"
ELSEWHERE = ProcessIdentity("", "", 0, 0, 0)  # a process that cannot be looked at from here
BEAT_S = 0.1
WAIT_S = 60.0


def make_roster_card(**fields: Any) -> ModelCard:
    card = ModelCard("m", WeightsIdentity("r1"), hashlib.sha256(TOKENIZER).hexdigest(), "hi", 4096, 16, [0])
    return msgspec.structs.replace(card, **fields)


async def until(true: Callable[[], object], what: str) -> None:
    """Wait for a fact, within a bound."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + WAIT_S
    while not true():
        assert loop.time() < end_s, f"waited {WAIT_S:g} s for {what}"
        await asyncio.sleep(0.005)


SILENT = frozenset({"data", "beat"})


class _Peer(asyncio.Protocol):
    """One frontend's connection, as the worker sees it."""

    def __init__(self, worker: ScriptedWorker, purpose: str) -> None:
        self.worker = worker
        self.purpose = purpose
        self.splitter = FrameSplitter()
        self.welcomed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.worker.peers.append(self)
        self.worker.connects[self.purpose] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.peers.remove(self)

    def data_received(self, data: bytes) -> None:
        for payload in self.splitter.feed(data):
            self.take(decode_to_worker(payload))

    def take(self, message: Message) -> None:
        worker = self.worker
        worker.received.append(message)
        if isinstance(message, Hello) and (answer := worker.answer(self.purpose)) is not None:
            self.greet(answer)
        elif isinstance(message, GetArtefact):
            for part in worker.artefact_parts(message.sha256):
                self.transport.write(encode(part))

    def greet(self, answer: Message) -> None:
        self.transport.write(encode(answer))
        self.welcomed = True


class ScriptedWorker:
    """Listens on two sockets; every attribute may be changed to make it misbehave."""

    def __init__(self, folder: Path, number: int, card: ModelCard | None = None, at: str = "") -> None:
        self.card = card or make_roster_card()
        base = folder / (at or f"{number:x}")
        self.record = InstanceRecord(f"unix://{base}.data", f"unix://{base}.beat", self.card.checksum())
        self.key = InstanceKey(NAMESPACE, "worker", "generate", number)
        self.welcome = Welcome(VERSION, number, NAMESPACE, self.card.checksum(), 4, 4, True, ELSEWHERE)
        self.beat_welcome: Welcome | None = None  # None: the same
        self.refusal: Refused | None = None
        self.silent: frozenset[str] = frozenset()  # the connections on which it does not answer
        self.beating = True
        self.tokenizer: bytes | None = TOKENIZER  # None: it never answers
        self.steps = 0
        self.received: list[Message] = []
        self.peers: list[_Peer] = []
        self.connects = {"data": 0, "beat": 0}
        self._listeners: list[Listener] = []
        self._beats: asyncio.Task[None] | None = None

    @property
    def instance(self) -> Instance:
        return Instance(self.key, self.record, self.card)

    async def start(self) -> None:
        network = SocketNetwork()
        for purpose, address in (("data", self.record.address), ("beat", self.record.beat_address)):
            path = UnixAddress(address.removeprefix("unix://"))
            self._listeners.append(await network.listen(path, partial(_Peer, self, purpose)))
        self._beats = asyncio.get_running_loop().create_task(self._beat())

    async def stop(self) -> None:
        """It dies."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        self.reset("data", "beat")

    def reset(self, *purposes: str) -> None:
        for peer in list(self.peers):
            if peer.purpose in purposes:
                peer.transport.abort()

    async def _beat(self) -> None:
        for count in range(10_000):
            if self.beating:
                self.steps += 1
                self.send(Beat(count, self.steps, 0.0, 1.0, 0.0, 0, 0), "beat")
            await asyncio.sleep(BEAT_S)

    def answer(self, purpose: str) -> Message | None:
        if purpose in self.silent:
            return None
        if self.refusal is not None:
            return self.refusal
        return self.beat_welcome or self.welcome if purpose == "beat" else self.welcome

    def artefact_parts(self, sha256: str) -> list[ArtefactPart]:
        data = self.tokenizer
        if data is None:
            return []
        half = len(data) // 2
        return [
            ArtefactPart(sha256, 0, len(data), data[:half]),
            ArtefactPart(sha256, half, len(data), data[half:]),
        ]

    def send(self, message: Message, purpose: str = "data") -> None:
        for peer in self.peers:
            if peer.purpose == purpose and peer.welcomed:
                peer.transport.write(encode(message))

    def say(self, name: str, tokens: list[int], finish: str | None = None) -> None:
        number = next(m.stream for m in reversed(self.generates) if m.request.request_id == name)
        self.send(Step([Output(number, tokens, finish)]))

    @property
    def generates(self) -> list[Generate]:
        return [message for message in self.received if isinstance(message, Generate)]

    @property
    def not_taken(self) -> list[str]:
        return [message.reason for message in self.received if isinstance(message, NotTaken)]


class Reader:
    answering = False

    def __init__(self) -> None:
        self.dirty = False
        self.shown: list[int] = []
        self.finish: str | None = None
        self.failure: tuple[Code, str] | None = None

    def on_output(self, output: Output) -> bool:
        self.shown += output.tokens
        self.finish = output.finish
        return output.finish is not None

    def flush(self) -> None:
        """Nothing to send on."""

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        self.failure = (code, message)

    @property
    def request(self) -> Reader:
        return self

    def still_waiting(self, waiting: WaitStatus) -> None:
        """Nothing to keep warm."""

    def dispatched(self, worker: str) -> None:
        """Do nothing: no client is told."""

    def resumed(self, pause_s: float) -> None:
        """Do nothing: no client is told."""


class RosterRig:
    """A roster with its directory and dispatcher, and the workers it may find."""

    def __init__(self, folder: Path, holds: HoldSettings | None = None) -> None:
        self.folder = folder
        rng = random.Random(1)
        holds = holds or HoldSettings()
        self.directory = ModelDirectory(rng, holds.fresh_max)
        self.dispatcher = Dispatcher(self.directory, holds, asyncio.get_running_loop().time)
        self.prepared = 0
        self.prepare_error: Exception | None = None
        standings = WorkerVerdicts("d")
        self.roster = Roster(self.directory, self.dispatcher, SocketNetwork(), rng, self._prepare, "rig", standings)
        self.workers: list[ScriptedWorker] = []
        self.roster.start()

    async def _prepare(self, card: ModelCard, tokenizer: bytes) -> object:
        if self.prepare_error is not None:
            raise self.prepare_error
        assert tokenizer == TOKENIZER
        self.prepared += 1
        return "text"

    async def worker(self, number: int, **given: Any) -> ScriptedWorker:
        worker = ScriptedWorker(self.folder, number, **given)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def serving(self, number: int, **given: Any) -> ScriptedWorker:
        """A worker that has joined."""
        worker = await self.worker(number, **given)
        self.appear(worker)
        await self.joined(worker)
        return worker

    def appear(self, worker: ScriptedWorker) -> None:
        self.roster.apply([Appeared(worker.instance)])

    def withdraw(self, worker: ScriptedWorker) -> None:
        self.roster.apply([Withdrawn(worker.instance)])

    def link(self, worker: ScriptedWorker) -> WorkerLink:
        [link] = self.links(worker)
        return link

    def links(self, worker: ScriptedWorker) -> list[WorkerLink]:
        return [link for link in self.roster.watchers if link.instance == worker.instance]

    def is_routable(self, worker: ScriptedWorker) -> bool:
        return any(link.workers is not None and link.slot.routable for link in self.links(worker))

    async def joined(self, worker: ScriptedWorker) -> WorkerLink:
        await until(lambda: self.is_routable(worker), f"worker {worker.key.instance:x} to join")
        return self.link(worker)

    async def reason(self, worker: ScriptedWorker, part: str) -> None:
        await until(lambda: part in self.link(worker).reason, f"the reason {part!r}")

    def ask(self, name: str, worker: ScriptedWorker) -> tuple[Flight, Reader]:
        workers = self.directory.set_for(NAMESPACE, worker.card)
        reader = Reader()
        request = GenerateRequest(name, [1, 2, 3], 3, Sampling(100, 7))
        flight = Flight(Ledger(request), workers, reader)
        self.dispatcher.launch(flight)
        return flight, reader

    async def ask_and_begin(self, worker: ScriptedWorker) -> tuple[Flight, Reader]:
        """Ask for the stream `s1` on a worker; return when its first token, 10, was shown."""
        flight, reader = self.ask("s1", worker)
        await until(lambda: worker.generates, "the request")
        worker.say("s1", [10])
        await until(lambda: reader.shown == [10], "the first token")
        return flight, reader

    async def finish(self, worker: ScriptedWorker, reader: Reader, token: int = 11) -> None:
        """Let a worker make the last token of `s1`, and wait for the end."""
        worker.say("s1", [token], "length")
        await until(lambda: reader.finish, "the end")
        assert reader.shown == ([10, 11] if token == 11 else [token])

    async def close(self) -> None:
        await self.roster.close()
        for worker in self.workers:
            await worker.stop()


@contextlib.asynccontextmanager
async def roster_rig(folder: Path, holds: HoldSettings | None = None) -> AsyncIterator[RosterRig]:
    """A rig that must leave no task behind, and nothing that only the loop's handler of lost exceptions hears of."""
    before = asyncio.all_tasks()
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    rig = RosterRig(folder, holds)
    try:
        yield rig
    finally:
        await rig.close()
    await until(lambda: asyncio.all_tasks() <= before, f"tasks to end: {asyncio.all_tasks() - before}")
    assert not rig.roster.watchers
    assert not rig.roster._tasks
    assert not rig.roster._notices
    await until(lambda: not any(worker.peers for worker in rig.workers), "all connections to be closed")
    assert not lost

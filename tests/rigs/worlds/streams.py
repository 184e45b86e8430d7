"""A small cluster without sockets: the real dispatcher, links and data connections over recording transports.

What a worker is sent is read back from the bytes the frontend wrote; what a worker says goes in as bytes. `events`
is the story so far, one line each.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec

from holdfast.core.errors import Code
from holdfast.core.requests import Failure, GenerateRequest, Output, Sampling
from holdfast.core.tiers import Tier
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.discovery.keys import HEALTH, InstanceKey, InstanceRecord
from holdfast.discovery.registry import Instance
from holdfast.health.records import HealthRecord
from holdfast.health.standing import WEIGHTS, HealthStatus, WorkerStanding
from holdfast.spec.waits import HoldSettings
from holdfast.store.contract import Put, WatchEvent
from holdfast.streams.directory import Loadings, ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import Flight, WaitStatus, WorkerSet
from holdfast.streams.ledger import Ledger
from holdfast.streams.link import DataConnection, WorkerLink
from holdfast.streams.roster import TrafficWeights
from holdfast.streams.verdicts import WorkerVerdicts
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import (
    VERSION,
    Active,
    Cancel,
    Closed,
    Draining,
    Generate,
    Message,
    Pass,
    ProcessIdentity,
    Room,
    Step,
    Welcome,
    decode_to_worker,
)

SEED = 7
TICK_S = 0.1


def make_card(revision: str = "r1", **fields: Any) -> ModelCard:
    plain: dict[str, Any] = {
        "name": "m",
        "weights": WeightsIdentity(revision),
        "tokenizer_sha256": "t1",
        "chat_template": "plain",
        "context_tokens_max": 4096,
        "block_size": 16,
        "eos_token_ids": [0],
    }
    return ModelCard(**plain | fields)


def make_request(name: str, tokens: list[int], max_tokens: int = 100, tier: Tier = Tier.STANDARD) -> GenerateRequest:
    return GenerateRequest(name, tokens, len(tokens), Sampling(max_tokens, SEED), tier=tier)


class RecordingTransport(asyncio.Transport):
    """Takes what is written apart into messages again."""

    def __init__(self, owner: Worker) -> None:
        super().__init__()
        self._owner = owner
        self._splitter = FrameSplitter()
        self.aborted = False

    def write(self, data: Any) -> None:
        for payload in self._splitter.feed(bytes(data)):
            self._owner.received(decode_to_worker(payload))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class Client:
    """Takes a stream's tokens; a real small `Consumer`. Token `stop_at` is its stop string."""

    def __init__(self, name: str, cluster: Cluster, stop_at: int | None = None) -> None:
        self.name = name
        self.dirty = False
        self.shown: list[int] = []
        self.finish: str | None = None
        self.failure: tuple[Code, str, float | None] | None = None
        self.ends = 0
        self.waits = 0
        self.waiting: WaitStatus | None = None  # as it was told last
        self.pauses: list[tuple[float, int]] = []  # each with how many tokens it had shown when it was told
        self.workers: list[str] = []  # to which it was sent, each attempt
        self.flushes = 0
        self._fresh: list[int] = []
        self._cluster = cluster
        self._stop_at = stop_at
        self.flight: Flight  # given by `Cluster.ask`

    @property
    def ledger(self) -> Ledger:
        return self.flight.ledger

    @property
    def request(self) -> Client:
        return self

    @property
    def answering(self) -> bool:
        return bool(self.shown)

    def on_output(self, output: Output) -> bool:
        self.shown += output.tokens
        self._fresh += output.tokens
        if self._stop_at in output.tokens:
            self._end("stop string")
            return True
        if output.finish is not None:
            self._end(output.finish)
            return True
        return False

    def _end(self, how: str) -> None:
        self.ends += 1
        self.finish = how

    def flush(self) -> None:
        self.flushes += 1
        ending = f", ends: {self.finish}" if self.finish else ""
        self._cluster.tell(f"{self.name} shows {words(self._fresh)}{ending}")
        self._fresh = []

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        self.ends += 1
        self.failure = (code, message, retry_after_s)
        retry = f" (retry after {retry_after_s:g} s)" if retry_after_s is not None else ""
        self._cluster.tell(f"{self.name} fails, {code}: {message}{retry}")

    def still_waiting(self, waiting: WaitStatus) -> None:
        self.waits += 1
        self.waiting = waiting
        self._cluster.tell(f"{self.name} is told that it waits")

    def dispatched(self, worker: str) -> None:
        self.workers.append(worker)

    def resumed(self, pause_s: float) -> None:
        self.pauses.append((round(pause_s, 3), len(self.shown)))


class Worker:
    """Plays the far end of a link."""

    def __init__(self, name: str, number: int, places: int, workers: WorkerSet, cluster: Cluster, **says: Any) -> None:
        self.name = name
        process = ProcessIdentity("", "", 0, 0, 0)
        sums = (workers.namespace, workers.checksum)
        self.welcome = Welcome(VERSION, number, *sums, places, 0, True, process, **says)
        self.cluster = cluster
        self.places = places
        self.sent: list[Message] = []
        self.numbers: dict[str, int] = {}  # request -> its latest stream number here
        key = InstanceKey(workers.namespace, "worker", "generate", number)
        record = InstanceRecord("unix:///x", "unix:///y", workers.checksum)
        self.link = WorkerLink(Instance(key, record, workers.card), cluster.dispatcher)
        self.link.slot.capacity = self.link.slot.batch = places
        self.link.since_s = cluster.now_s
        self.workers = workers
        cluster.links[key] = [self.link]
        self.connect()

    def connect(self) -> None:
        """What the roster does when a worker is ready for work."""
        self.data = self.cluster.connection(self.link)
        self.transport = RecordingTransport(self)
        self.data.connection_made(self.transport)
        self.data.data_received(encode(self.welcome))
        self.link.data = self.data
        self.workers = self.cluster.directory.current(self.workers)
        self.workers.sessions += 1
        self.cluster.dispatcher.join(self.link, self.workers)
        self.route(routable=True)

    def route(self, *, routable: bool, admit_max: int | None = None) -> None:
        """As a judge says it."""
        self.link.trusted, self.link.admit_max = routable, admit_max
        self.cluster.weights.update_share(self.link)
        self.cluster.dispatcher.reroute(self.link)

    def judged(self, status: HealthStatus, *, why: str = "as decided", spare: bool = False, **of_standing: Any) -> None:
        """As control writes it down."""
        standing = WorkerStanding(status=status, weight=WEIGHTS[status], reason=why, causes={}, **of_standing)
        record = HealthRecord(name=self.name, standing=standing, spare=spare)
        self.cluster.hear(HEALTH, Put(HEALTH + self.link.instance.key.path, msgspec.json.encode(record)))

    def received(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, Generate):
            self.numbers[message.request.request_id] = message.stream
            self.cluster.tell(f"{self.name} <- {describe(message)}")
        elif isinstance(message, Cancel):
            self.cluster.tell(f"{self.name} <- cancel {words(message.streams)}")
        elif isinstance(message, Pass):
            self.cluster.tell(f"{self.name} <- pass")

    @property
    def requests(self) -> list[GenerateRequest]:
        return [message.request for message in self.sent if isinstance(message, Generate)]

    @property
    def passes(self) -> list[int | None]:
        """How often it had turned us away, as we had heard, each time that we passed."""
        return [message.turned_away for message in self.sent if isinstance(message, Pass)]

    @property
    def cancelled(self) -> list[int]:
        return [stream for message in self.sent if isinstance(message, Cancel) for stream in message.streams]

    # -- what a worker does

    def say(self, name: str, tokens: list[int], finish: str | None = None, fail: str | None = None) -> None:
        failure = Failure(fail, "as asked") if fail else None
        self.data.data_received(encode(Step([Output(self.numbers[name], tokens, finish, None, failure)])))

    def turn_away(self, name: str) -> None:
        """As a worker whose places other frontends have."""
        self.say(name, [], fail=Code.WORKER_OVERLOADED)

    def room(self, places: int) -> None:
        self.data.data_received(encode(Room(places)))

    def close_stream(self, name: str) -> None:
        self.data.data_received(encode(Closed([self.numbers[name]])))

    def drain(self) -> None:
        """As `Sessions.hand_back` does."""
        failure = Failure(Code.ENGINE_SHUTDOWN, "worker is draining")
        back = [Output(stream, [], failure=failure) for stream in self.link.streams]
        self.data.data_received(encode(Draining("asked to stop")) + encode(Step(back)))

    def take_over(self, epoch: int, inexact_reason: str = "") -> None:
        """A standby becomes active; or it is, and its answers may be inexact."""
        self.data.data_received(encode(Active(epoch, inexact_reason)))

    def die(self) -> None:
        """The connection breaks, then the roster hears of it."""
        self.data.connection_lost(None)
        self.cluster.dispatcher.leave(self.link)
        self.workers.sessions -= 1

    def judged_lost(self, reason: str = "its process is stopped (state T)") -> None:
        self.route(routable=False)
        self.link.fail_streams(Code.RESPONSE_TIMEOUT, reason, tell_worker=True)


class Cluster:
    """Holds workers, clients and time."""

    def __init__(self, settings: HoldSettings | None = None) -> None:
        self.settings = settings or HoldSettings()
        self.now_s = 100.0
        self.directory = ModelDirectory(random.Random(1), self.settings.fresh_max)
        self.loadings = Loadings(frozenset({"d"}), lambda: self.now_s)
        self.directory.loading = self.loadings.latest
        self.dispatcher = Dispatcher(self.directory, self.settings, lambda: self.now_s)
        self.links: dict[InstanceKey, list[WorkerLink]] = {}
        self.weights = TrafficWeights(self.dispatcher, self.links, WorkerVerdicts("d"), lambda: self.now_s)
        self.workers: dict[str, Worker] = {}
        self.clients: dict[str, Client] = {}
        self.events: list[str] = []

    def tell(self, event: str) -> None:
        self.events.append(event)

    def hear(self, prefix: str, event: WatchEvent) -> None:
        """What the store says under HEALTH or CONTROLS."""
        self.weights.on_store_event(prefix, event)

    def connection(self, link: WorkerLink) -> DataConnection:
        """A data connection; it needs a loop when it is made and, over a recording transport, never again."""

        async def make() -> DataConnection:
            return DataConnection(link, "rig")

        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(make())
        finally:
            loop.close()

    def set(self, card: ModelCard | None = None, namespace: str = "d-00000000") -> WorkerSet:
        workers = self.directory.set_for(namespace, card or make_card())
        workers.text = "ready"
        return workers

    def worker(self, name: str, places: int = 8, workers: WorkerSet | None = None, **says: Any) -> Worker:
        """`says`: fields of its Welcome (`active`, `epoch`, `group`)."""
        made = Worker(name, len(self.workers) + 1, places, workers or self.set(), self, **says)
        self.workers[name] = made
        return made

    def ask(
        self,
        name: str,
        tokens: list[int] | None = None,
        max_tokens: int = 100,
        stop_at: int | None = None,
        workers: WorkerSet | None = None,
        tier: Tier = Tier.STANDARD,
    ) -> Client:
        client = Client(name, self, stop_at)
        ledger = Ledger(make_request(name, tokens or [1, 2, 3], max_tokens, tier))
        client.flight = Flight(ledger, workers or self.set(), client)
        self.clients[name] = client
        self.dispatcher.launch(client.flight)
        return client

    def leave(self, name: str) -> None:
        self.dispatcher.abandon(self.clients[name].flight)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s = round(self.now_s + TICK_S, 3)
            self.weights.tick()
            self.dispatcher.tick(self.now_s)


def describe(message: Generate) -> str:
    request = message.request
    made = request.tokens[request.prompt_len :]
    after = f" after {words(made)}" if made else ""
    prompt = words(request.tokens[: request.prompt_len])
    return f"generate {message.stream}: {request.request_id} of prompt {prompt}{after}, seed {request.sampling.seed}"


def words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) or "nothing"

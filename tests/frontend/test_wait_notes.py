"""Comments that tell a client how it waits: when one goes out, and when none may; and the lines that they tell of."""

from __future__ import annotations

import asyncio
import random
import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.core.errors import Code
from holdfast.core.tiers import Tier
from holdfast.frontend import pending_models
from holdfast.frontend.admission import Admission
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.notes import WaitNotes
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.report import UnservedDemand
from holdfast.frontend.request_tracker import PAST_MAX, RequestTracker, TrackedRequest
from holdfast.frontend.requests import LISTED_MAX, RequestsPage
from holdfast.health.records import Demand, ReportRecord
from holdfast.spec.waits import HoldSettings, KnownSettings
from holdfast.streams.directory import MissingWorkers, ModelDirectory
from holdfast.streams.flight import RequestState, WaitStatus, WorkerSet
from holdfast.streams.stats import DispatchStats
from holdfast.wire.http.connection import HttpConnection


class Client:
    """The part of a connection that comments go out by."""

    def __init__(self, *, streaming: bool = False) -> None:
        self.streaming = streaming
        self.paused = False
        self.told: list[str] = []

    def start_stream(self, _kind: bytes, _headers: object, data: bytes) -> None:
        assert not self.streaming
        self.streaming = True
        self.told.append("head")
        self.write(data)

    def write(self, data: bytes) -> None:
        assert self.streaming
        self.told.append(data.decode().strip())

    @property
    def connection(self) -> HttpConnection:
        return cast(HttpConnection, self)


PROVISIONING, QUEUED = RequestState.PROVISIONING, RequestState.QUEUED
# when, how it waits (since 0 s), and what goes out: of a model that is brought up when it is asked for
STORY: list[tuple[float, RequestState, int, list[str]]] = [
    (0.5, PROVISIONING, 1, []),  # most waits are over by then, and an error has its status
    (1.1, PROVISIONING, 1, ["head", ": provisioning"]),
    (2.1, PROVISIONING, 1, []),  # nothing new
    (3.0, QUEUED, 3, [": queued 3"]),
    (3.5, QUEUED, 2, []),  # too soon
    (4.0, QUEUED, 1, [": queued 1"]),
    (5.0, QUEUED, 1, []),
    (8.9, QUEUED, 1, []),
    (9.0, QUEUED, 1, [": queued 1"]),  # to keep the connection warm
]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_comment_tells_what_is_new(wanted: bool, streaming: bool) -> None:
    """Once a second at most. An answer whose head is out is told of in any case, another only for a wanted model."""
    client = Client(streaming=streaming)
    notes = WaitNotes(client.connection)
    for now_s, state, place, expected in STORY:
        client.told.clear()
        notes.tell(WaitStatus(state, place, 0.0, wanted), now_s)
        shown = [words for words in expected if words != "head" or not streaming]
        assert client.told == (shown if wanted or streaming else []), now_s


FIRST = WaitStatus(PROVISIONING, 1, 100.0, False, "no\nroom")
# when, how it waits (None: it is sent to a worker), and what goes out to a client that asked for progress
PROGRESS_STORY: list[tuple[float, WaitStatus | None, list[str]]] = [
    (100.5, FIRST, []),
    (101.1, FIRST, ["head", ": provisioning position=1 MODEL 1.1 why=no room"]),
    (102.1, FIRST, []),  # only its age has changed
    (102.9, WaitStatus(QUEUED, 3, 100.0, False), [": queued position=3 MODEL 2.9"]),
    (103.5, WaitStatus(QUEUED, 2, 100.0, False), []),  # too soon
    (104.0, WaitStatus(QUEUED, 1, 100.0, False), [": queued position=1 MODEL 4.0"]),
    (109.0, WaitStatus(QUEUED, 1, 100.0, False), [": queued position=1 MODEL 9.0"]),  # keeps the connection open
    (109.2, None, [": dispatched worker=a%20worker waited_s=9.2"]),
    (109.3, None, []),  # sent on, because that worker was full
    (112.0, WaitStatus(QUEUED, 1, 110.5, False), [": queued position=1 MODEL 1.5"]),  # its worker has died
    (112.5, None, [": dispatched worker=a%20worker waited_s=2.0"]),
]  # fmt: skip


def test_a_client_that_asked_for_progress_reads_places_times_and_the_worker() -> None:
    """Its answer begins with the first comment, of any model; one that did not ask reads nothing of it."""
    asked, other = Client(), Client()
    notes = WaitNotes(asked.connection, 100.0, "org/a model")
    others = WaitNotes(other.connection, 100.0)
    for now_s, waiting, expected in PROGRESS_STORY:
        asked.told.clear()
        for one in (notes, others):
            if waiting is None:
                one.tell_dispatched("a worker", now_s)
            else:
                one.tell(waiting, now_s)
        assert asked.told == [words.replace("MODEL ", "model=org/a%20model waited_s=") for words in expected], now_s
    assert other.told == []


def test_a_dispatch_is_told_at_once_also_without_a_wait() -> None:
    """It begins the answer; a client that does not read is not told."""
    client, stuck = Client(), Client(streaming=True)
    stuck.paused = True
    for one in (client, stuck):
        WaitNotes(one.connection, 100.0, "\ud800").tell_dispatched("w", 100.01)
    assert client.told == ["head", ": dispatched worker=w waited_s=0.0"]
    assert stuck.told == []


def test_who_does_not_read_is_told_later() -> None:
    """Nothing is gathered for a client that does not read: it hears how it is by then."""
    client = Client(streaming=True)
    client.paused = True
    notes = WaitNotes(client.connection)
    notes.tell(WaitStatus(QUEUED, 2, 0.0, True), 2.0)
    client.paused = False
    notes.tell(WaitStatus(QUEUED, 1, 0.0, True), 2.1)
    assert client.told == [": queued 1"]


class Rig:
    """A lobby with its directory."""

    def __init__(self, **settings: Any) -> None:
        stats = DispatchStats()
        self.loop = asyncio.get_running_loop()
        self.directory = ModelDirectory(random.Random(1), 8)
        self.pending = PendingModels(self.directory, HoldSettings(**settings), stats, self.loop.time)
        self.tracker = RequestTracker(self.directory, FrontendMetrics(stats))
        self.requests = RequestsPage(self.tracker, self.pending, self.directory, self.loop.time, lambda: 1000.0)
        self.served = False
        self.stats = stats

    def begin(self, name: str, tier: Tier = Tier.STANDARD, key: str = "") -> TrackedRequest:
        return self.tracker.begin("chat", tier, id=f"id-{name}", name=name, key=key)

    def find(self, _parsed: ParsedRequest) -> WorkerSet | None:
        return cast(WorkerSet, self) if self.served else None

    def ask(
        self, name: str, model: str = "m", tier: Tier = Tier.STANDARD, held_bytes: int = 0
    ) -> asyncio.Task[WorkerSet]:
        parsed = ParsedRequest(kind="chat", model=model)
        tracked = self.begin(name, tier)
        tracked.held_bytes = held_bytes
        tracked.named(parsed)
        return asyncio.create_task(self.pending.wait(tracked, Client().connection, parsed, self.find))

    def shown(self) -> list[tuple[str, int | None]]:
        return [(one.request_id, one.place) for one in self.requests.all().data]


async def refusal(task: asyncio.Task[WorkerSet]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await asyncio.wait_for(task, 60)
    return raised.value


async def test_a_line_is_per_model_and_higher_tiers_stand_first() -> None:
    """A full line keeps those who stand first: another is pushed out for a higher tier, a newcomer is refused."""
    rig = Rig(fresh_max=2)
    starved: list[str] = []
    rig.pending.on_starved = lambda: starved.append("told")
    rig.directory.set_wanted("d", frozenset({"m", "n"}))
    low, usual, other = rig.ask("low", tier=Tier.BEST_EFFORT), rig.ask("usual"), rig.ask("other", "n")
    await asyncio.sleep(0)
    assert rig.shown() == [("usual", 1), ("low", 2), ("other", 1)]
    assert len(starved) == 3
    high, late = rig.ask("high", tier=Tier.PREMIUM), rig.ask("late", tier=Tier.BEST_EFFORT)
    pushed, refused = await refusal(low), await refusal(late)
    assert (pushed.status, pushed.code, pushed.reason) == (429, "PushedOut", "pushed_out")
    assert (refused.status, refused.code) == (503, "NoWorker")
    assert dict(rig.stats.shed) == {("best_effort", "pushed_out"): 1}
    assert rig.shown()[:3] == [("high", 1), ("usual", 2), ("other", 1)]
    rig.served = True
    rig.pending.wake_all()
    assert [await asyncio.wait_for(task, 60) for task in (high, usual, other)] == [rig] * 3
    assert (len(rig.pending), rig.pending.demand()) == (0, {})


async def test_all_lines_together_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not fit is refused with status, reason and a time to come back, and counted; who leaves makes room."""
    monkeypatch.setattr(pending_models, "WAITING_BYTES_MAX", 100)
    rig = Rig()
    rig.directory.set_wanted("d", frozenset({"m", "n"}))
    first, second = rig.ask("first", held_bytes=60), rig.ask("second", "n", held_bytes=40)
    await asyncio.sleep(0)
    error = await refusal(rig.ask("third", held_bytes=1))
    assert (error.status, error.reason, error.retry_after_s) == (429, "lobby_full", 1.0)
    assert rig.stats.refused == {Code.RESOURCE_EXHAUSTED: 1}
    assert rig.pending.held_bytes == 100
    first.cancel()
    await asyncio.wait([first])
    fourth = rig.ask("fourth", held_bytes=60)
    await asyncio.sleep(0)
    assert not fourth.done()
    for task in (second, fourth):
        task.cancel()
    await asyncio.wait([second, fourth])
    assert rig.pending.held_bytes == 0


def test_what_a_request_holds_is_more_than_its_body() -> None:
    """An id of two characters is a pointer and an int, a message of thirty a dict: as measured, and no less."""
    ids = list(range(1000, 101_000))
    told = ParsedRequest(kind="completion", model="m", prompts=[list(ids)]).held_bytes(0)
    assert told >= sys.getsizeof(ids) + sum(sys.getsizeof(one) for one in ids)
    message = {"role": "user", "content": ""}
    chat = ParsedRequest(kind="chat", model="m", messages=[dict(message) for _ in range(100)])
    assert chat.held_bytes(0) >= 100 * sys.getsizeof(message)
    assert ParsedRequest(kind="completion", model="m", prompts=["text"]).held_bytes(1000) == 2000


async def test_each_waits_as_long_as_it_may() -> None:
    """For a model that is wanted, longer; and it is told for how long it waited."""
    rig = Rig(hold_s=0.01, provision_s=0.05)
    rig.directory.set_wanted("d", frozenset({"m"}))
    tasks = {"m": rig.ask("a"), "n": rig.ask("b", "n")}
    whys = {model: (await refusal(task)).message for model, task in tasks.items()}
    assert whys["m"].endswith("none has come up within 0.05 s")
    assert whys["n"].endswith("none has come up within 0.01 s")


async def test_a_model_whose_replicas_do_not_serve_and_that_no_other_comes_for_is_held_as_streams_are() -> None:
    """Not as long as a model may take to be brought up, and the client is not told that anything is provisioned."""
    rig = Rig(hold_s=0.01, provision_s=60.0)
    rig.directory.set_wanted("d", frozenset({"m"}))
    missing = MissingWorkers("r1 on n: its breaker is open; no other comes: no room", none_serves=True)
    rig.directory.set_missing("d", {"m": missing})
    error = await refusal(rig.ask("held"))
    assert (error.status, error.code) == (503, Code.NO_WORKER)
    assert "its breaker is open" in error.message
    client = Client()
    WaitNotes(client.connection).tell(WaitStatus(RequestState.HELD, 1, 0.0, True, "its breaker is open"), 2.0)
    assert client.told == ["head", ": held: its breaker is open"]


async def test_who_waits_in_vain_is_told_why_and_refused_at_once() -> None:
    """In its place in line at once, in a comment of one line, and at the end; one that may yet come is waited for."""
    rig = Rig(hold_s=60.0, provision_s=60.0)
    rig.directory.set_wanted("d", frozenset({"m", "n"}))
    vain, hopes = rig.ask("vain"), rig.ask("hopes", "n")
    await asyncio.sleep(0)
    rig.directory.set_missing(
        "d", {"m": MissingWorkers("it failed to start:\nno GPU", True), "n": MissingWorkers("there is no room")}
    )
    assert [one.why for one in rig.requests.all().data] == ["it failed to start:\nno GPU", "there is no room"]
    rig.pending.wake_all()
    error = await refusal(vain)
    assert (error.status, error.code, error.param) == (503, Code.NO_WORKER, "model")
    assert "none can be started: it failed to start:\nno GPU" in error.message
    assert not hopes.done()
    hopes.cancel()
    client = Client()
    WaitNotes(client.connection).tell(WaitStatus(PROVISIONING, 1, 0.0, True, "no\ndevice"), 2.0)
    assert client.told == ["head", ": provisioning: no device"]


def test_a_fleets_frontend_knows_every_model_once_the_store_was_read() -> None:
    """Before that, and where workers come as they like, an unknown one may yet have a worker."""
    for fleet, unread, known in ((True, set(), True), (True, {"cards"}, False), (False, set(), False)):
        directory = ModelDirectory(random.Random(1), 8, KnownSettings(fleet=fleet))
        directory.unread = set(unread)
        find = Admission.find_set
        admission = cast(Admission, SimpleNamespace(directory=directory))
        asked = ParsedRequest(kind="chat", model="m")
        if known:
            with pytest.raises(ApiError) as raised:
                find(admission, asked)
            assert raised.value.status == 404
        else:
            assert find(admission, asked) is None
        directory.set_wanted("d", frozenset({"m"}))
        assert find(admission, asked) is None


async def test_a_wish_that_ends_ends_the_wait_for_it_alone() -> None:
    """Its waiters are told which model it was, as of a name that nobody has; others wait on."""
    rig = Rig()
    rig.directory.set_wanted("d", frozenset({"m", "n"}))
    gone, stays = rig.ask("gone"), rig.ask("stays", "n")
    await asyncio.sleep(0)
    rig.directory.set_wanted("d", frozenset({"n"}))
    rig.pending.wake_all()
    error = await refusal(gone)
    assert (error.status, error.code, error.param) == (404, Code.MODEL_UNAVAILABLE, "model")
    assert not stays.done()
    stays.cancel()


async def test_demand_is_told_to_whom_it_concerns() -> None:
    """By model, with the first who came, and the same when it is asked for again; not what only a client has named."""
    rig = Rig()
    rig.directory.set_wanted("d", frozenset({"m"}))
    rig.directory.set_wanted("e", frozenset({"n"}))
    unix_s = iter(range(1000, 2000))
    demands = {
        one: UnservedDemand(one, rig.directory, rig.pending, rig.loop.time, lambda: float(next(unix_s)))
        for one in ("d", "e")
    }
    assert demands["d"].now() == {}
    tasks = [rig.ask("a"), rig.ask("b"), rig.ask("c", "n"), rig.ask("d", "made up")]
    await asyncio.sleep(0)
    first = demands["d"].now()
    assert {model: one.waiting for model, one in first.items()} == {"m": 2}
    assert demands["d"].now() == first, "clocks that drift are no news"
    assert list(demands["e"].now()) == ["n"]
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert demands["d"].now()["m"].waiting == 1
    for task in tasks:
        task.cancel()


def test_reports_of_either_age_are_read() -> None:
    """An old one has no demand, and an old reader does not mind it."""

    class OldReport(msgspec.Struct, frozen=True, kw_only=True):
        name: str
        waiting: int = 0

    demand = {"m": Demand(waiting=2, since_unix_s=7.0)}
    new = msgspec.json.encode(ReportRecord(name="f", at_unix_s=1.0, demand=demand))
    assert msgspec.json.decode(new, type=OldReport) == OldReport(name="f")
    assert msgspec.json.decode(new, type=ReportRecord).demand == demand
    assert msgspec.json.decode(b'{"name":"f","at_unix_s":1.0}', type=ReportRecord).demand == {}


async def test_ten_thousand_requests_leave_no_more_than_the_last_ones() -> None:
    """Of those that ended the latest are known, each to its own key; of those under way a page shows so many."""
    rig = Rig()
    for number in range(10_000):
        rig.begin(f"past-{number}", key="alice").over(None)
    assert (rig.tracker.inflight, len(rig.tracker.past)) == (0, PAST_MAX)
    latest = rig.requests.find("past-9999", "alice")
    assert latest is not None
    assert latest.state is RequestState.FAILED
    assert rig.requests.find("past-9999", "bob") is None
    assert rig.requests.find("past-0", "alice") is None
    for number in range(10_000):
        rig.begin(f"now-{number}")
    listed = rig.requests.all()
    assert (len(listed.data), listed.has_more) == (LISTED_MAX, True)

"""Requests that are ended by their key or by an operator, here or at another frontend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.core.tasks import beside
from holdfast.core.tiers import Tier
from holdfast.discovery.keys import KILLS, REPORTS
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.kills import KillHandler
from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.request_tracker import RequestTracker, TrackedRequest
from holdfast.frontend.requests import RequestsPage
from holdfast.health.records import ReportRecord
from holdfast.spec.waits import HoldSettings
from holdfast.store.contract import Snapshot, Store
from holdfast.streams import kills
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import RequestState
from holdfast.streams.kills import KillRequest
from holdfast.streams.stats import DispatchStats
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import BOUND_S, until
from holdfast.wire.http.connection import HttpConnection
from tests.rigs.cli.in_process import said_here
from tests.rigs.frontend.official_client import MODEL
from tests.rigs.frontend.pending_models import CHAT, get, lines, until_lines, want
from tests.rigs.frontend.raw_http import Raw, chat
from tests.rigs.store.served import served_store

NOW_S = 1000.0


class Frontend:
    """As far as its requests go."""

    def __init__(self, store: Store, number: int) -> None:
        directory, stats = ModelDirectory(random.Random(1), 8), DispatchStats()
        clock = asyncio.get_running_loop().time
        self.tracker = RequestTracker(directory, FrontendMetrics(stats))
        pending = PendingModels(directory, HoldSettings(), stats, clock)
        requests = RequestsPage(self.tracker, pending, directory, clock, lambda: NOW_S)
        peer = f"frontend-0{number}"
        report = ReportRecord(name=peer, at_unix_s=NOW_S, process=f"f-{number}")
        store.register(f"{REPORTS}d/{peer}", msgspec.json.encode(report))
        self.silent: dict[str, bytes | None] = {}

        async def others() -> dict[str, bytes | None]:
            return self.silent

        self.kills = KillHandler(requests, store, "d", peer, random.Random(number), lambda: NOW_S, others)
        self.told: list[str] = []

    def begin(self, name: str, key: str, id: str = "") -> TrackedRequest:
        tracked = self.tracker.begin("chat", Tier.STANDARD, id=id or f"id-{name}", name=name, key=key)
        tracked.preparing = cast(Any, SimpleNamespace(kill=lambda error: self.told.append(f"{name}: {error.code}")))
        return tracked

    async def delete(self, name: str, key: str) -> tuple[int, Any]:
        """The status, and what is told."""
        answered = asyncio.get_running_loop().create_future()
        respond = lambda status, body, headers=(): answered.set_result((status, json.loads(body)))  # noqa: E731
        connection = cast(HttpConnection, SimpleNamespace(respond=respond, responder=None, streaming=False))
        try:
            self.kills.answer(connection, f"/v1/requests/{name}", key)
        except ApiError as error:
            return error.status, json.loads(error.body())
        return cast("tuple[int, Any]", await asyncio.wait_for(answered, BOUND_S))


async def test_a_key_ends_its_own_requests_wherever_they_are(tmp_path: Path) -> None:
    """Here at once, at another frontend through the store, by its id or name; of another's it does not even hear, and
    nothing of it is left in the store."""
    async with served_store(tmp_path) as (store,):
        here, there = Frontend(store, 1), Frontend(store, 2)
        async with beside(here.kills.follow(), "here"), beside(there.kills.follow(), "there"):
            mine, far, hers = here.begin("mine", "k"), there.begin("far", "k"), there.begin("hers", "other")
            status, body = await here.delete("id-mine", "k")
            assert (status, body["state"], mine.ended) == (200, "CANCELLED", RequestState.CANCELLED)
            status, body = await here.delete("far", "k")
            assert (status, body["state"], body["ended"]) == (200, "CANCELLED", ["id-far"])
            assert far.ended is RequestState.CANCELLED
            assert (here.told, there.told) == (["mine: Cancelled"], ["far: Cancelled"])
            for name in ("hers", "nobody's", "nobody", "", "é"):
                status, body = await here.delete(name, "k")
                assert (status, body["error"]["code"]) == (404, "request_not_found"), name
            assert hers.ended is None
            await _until_no_kills(store)


async def _until_no_kills(store: Store) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            async with contextlib.aclosing(store.watch(KILLS)) as events:
                first = await anext(aiter(events))
            assert isinstance(first, Snapshot)
            if first.items == {}:
                return
            await asyncio.sleep(0.01)


async def test_who_ends_a_request_again_is_told_that_it_is_over(tmp_path: Path) -> None:
    """By whichever frontend, id or name: the second word is no error, and says how it ended."""
    async with served_store(tmp_path) as (store,):
        here, there = Frontend(store, 1), Frontend(store, 2)
        async with beside(here.kills.follow(), "here"), beside(there.kills.follow(), "there"):
            here.begin("mine", "")
            done = here.begin("done", "")
            done.over(None)
            assert (await there.delete("mine", ""))[1]["ended"] == ["id-mine"]
            for frontend in (here, there):
                for name in ("mine", "id-mine"):
                    status, body = await frontend.delete(name, "")
                    assert (status, body["state"], body["ended"]) == (200, "CANCELLED", []), (frontend, name)
                assert (await frontend.delete("done", ""))[1]["state"] == "FAILED"


async def test_requests_of_one_name_are_ended_together(tmp_path: Path) -> None:
    """All that clients gave one name, wherever they are; by its id one alone."""
    async with served_store(tmp_path) as (store,):
        here, there = Frontend(store, 1), Frontend(store, 2)
        async with beside(here.kills.follow(), "here"), beside(there.kills.follow(), "there"):
            first, second = here.begin("one", "k", "id-1"), here.begin("one", "k", "id-2")
            third, other = there.begin("one", "k", "id-3"), there.begin("one", "other", "id-4")
            assert (await here.delete("id-1", "k"))[1]["ended"] == ["id-1"]
            assert (first.ended, second.ended) == (RequestState.CANCELLED, None)
            assert sorted((await here.delete("one", "k"))[1]["ended"]) == ["id-2", "id-3"]
            assert (third.ended, other.ended) == (RequestState.CANCELLED, None)
            again = [here.begin("one", "k", "id-5"), there.begin("one", "k", "id-6")]
            found = await kills.ask(store, KillRequest(name="one", at_unix_s=NOW_S), "token")
            assert (sorted(found.ended), found.silent) == (["id-4", "id-5", "id-6"], [])
            assert [one.ended for one in again] == [RequestState.CANCELLED] * 2


async def test_without_keys_anybody_ends_what_came_without_one_and_nothing_else(tmp_path: Path) -> None:
    """One rule, whichever frontend is asked; and it is never told as the operator's word."""
    async with served_store(tmp_path) as (store,):
        here, there = Frontend(store, 1), Frontend(store, 2)
        async with beside(here.kills.follow(), "here"), beside(there.kills.follow(), "there"):
            keyed, bare = there.begin("keyed", "k"), there.begin("bare", "")
            assert (await here.delete("bare", ""))[0] == 200
            assert (await here.delete("keyed", ""))[0] == 404
            assert (bare.ended, keyed.ended) == (RequestState.CANCELLED, None)
            assert [(one.id, one.by) for one in there.kills.lately("d")] == [("id-bare", "key")]


async def test_a_frontend_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says for it that there is no such request; what was ended is told all the same."""
    monkeypatch.setattr(kills, "ANSWER_S", 1.0)  # the other frontend of these must answer within it
    async with served_store(tmp_path) as (store,):
        here, _ = Frontend(store, 1), Frontend(store, 2)
        async with beside(here.kills.follow(), "here"):
            status, body = await here.delete("far", "k")
            assert (status, "f-2 did not answer" in body["error"]["message"]) == (503, True), body
            found = await kills.ask(store, KillRequest(name="far", at_unix_s=NOW_S), "token")
            assert (found.ended, found.silent) == ([], ["f-2"])
            here.begin("mine", "k")
            status, body = await here.delete("mine", "k")
            assert (status, body["ended"], body["unheard"]) == (200, ["id-mine"], ["f-2"])
            here.begin("more", "k")
            assert (await kills.ask(store, KillRequest(name="id-more", at_unix_s=NOW_S), "more")).silent == ["f-2"]
        async with beside(here.kills.follow(), "here"):
            await store.delete(f"{REPORTS}d/frontend-02", BOUND_S)
            assert (await here.delete("far", "k"))[0] == 404
            here.silent = {"f-2": None, "f-3": b"well"}
            status, body = await here.delete("far", "k")
            assert (status, "f-2 did not answer" in body["error"]["message"]) == (503, True), body


async def test_an_operator_ends_any_request_and_what_was_asked_long_ago_is_forgotten(tmp_path: Path) -> None:
    """Whoever can write the store; a record that nobody waits for any more ends nothing, and goes."""
    async with served_store(tmp_path) as (store,):
        frontend = Frontend(store, 1)
        stays = frontend.begin("stays", "k")
        stale = KillRequest(name="stays", at_unix_s=NOW_S - kills.STALE_S - 1)
        for token, value in (("old", msgspec.json.encode(stale)), ("odd", b"[")):
            await store.put(KILLS + token, value, BOUND_S)
        async with beside(frontend.kills.follow(), "frontend"):
            ended = frontend.begin("ended", "k")
            found = await kills.ask(store, KillRequest(name="id-ended", at_unix_s=NOW_S), "new")
            assert (found.ended, found.silent) == (["id-ended"], [])

            async def is_gone() -> bool:
                return await store.get(f"{KILLS}old", BOUND_S) is None

            async with asyncio.timeout(BOUND_S):
                while not await is_gone():
                    await asyncio.sleep(0.01)
            await until(lambda: ended.ended is RequestState.CANCELLED, "its end")
        assert [(one.id, one.by) for one in frontend.kills.lately("d")] == [("id-ended", "operator")]
        assert stays.ended is None


@pytest.fixture
def one_place() -> Iterator[Deployment]:
    """A wanted model's only worker, with one place, and slow enough for whoever looks."""
    sim = {"ttft_ms": 5, "tpot_ms": 500.0, "concurrency": 1, "queue": 0, "context_tokens_max": 65_536}
    holds = {"hold_s": 0.2, "provision_s": 200.0, "queue_s": 200.0}
    with Deployment(workers=1, sim=sim, frontend={"holds": holds}) as started:
        want(started, MODEL)
        yield started


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_who_is_ended_is_told_and_its_place_is_the_next_ones(one_place: Deployment) -> None:
    """Whole answers by a status, streams by an event and no [DONE]; running ones and those that wait; it is counted."""
    long = {"max_tokens": 60_000, "ignore_eos": True}
    with Raw(one_place.port) as runs, Raw(one_place.port) as waits, Raw(one_place.port) as last:
        runs.post(CHAT, chat(stream=True, **long), "x-request-id: runs\r\n")
        runs.until(b"data: ")
        waits.post(CHAT, chat(**long), "x-request-id: waits\r\n")
        until_lines(one_place, [("waits", "QUEUED", 1), ("runs", "RUNNING", None)])
        last.post(CHAT, chat(stream=True, max_tokens=1), "x-request-id: last\r\n")
        one_place.wait_until(lambda: len(lines(one_place)) == 3, "the last to wait")
        with Raw(one_place.port) as asker:
            ended = asker.send(b"DELETE /v1/requests/waits HTTP/1.1\r\nhost: x\r\n\r\n").reply()
        assert (ended.status, ended.json()["state"]) == (200, "CANCELLED")
        refused = waits.reply()
        assert (refused.status, refused.error["code"]) == (499, "Cancelled")
        found = get(one_place, "/v1/requests/runs").json()["id"]
        shown = one_place.run("queue", "--kill", found, "--store", one_place.store)
        assert (shown.returncode, shown.stdout) == (0, f"request {found} ended\n"), shown.stderr
        assert b'"code":"Cancelled"' in runs.until(b"0\r\n\r\n")
        last.until(b"data: [DONE]")
    assert get(one_place, "/v1/requests/runs").json()["state"] == "CANCELLED"
    page = get(one_place, "/metrics").body.decode()
    counted = [line for line in page.splitlines() if 'status="killed"' in line and "_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == 2.0
    gone = one_place.run("queue", "--kill", "nobody", "--store", one_place.store)
    assert (gone.returncode, "no frontend has a request 'nobody'" in gone.stderr) == (1, True), gone.stderr
    again = one_place.run("queue", "--kill", found, "--store", one_place.store)
    assert (again.returncode, again.stdout) == (0, f"request {found} is over already: CANCELLED\n"), again.stderr
    for method in (b"PUT", b"POST", b"PATCH"):
        with Raw(one_place.port) as asker:
            wrong = asker.send(method + b" /v1/requests/runs HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").reply()
        assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD, DELETE")
        assert "use GET or HEAD or DELETE" in wrong.error["message"]
    one_place.signal("frontend", signal.SIGSTOP)
    silent = one_place.run("queue", "--kill", "runs", "--json", "--store", one_place.store)
    told = json.loads(silent.stdout)
    assert (silent.returncode, told["ended"], told["silent"]) == (1, [], ["frontend"]), silent.stderr
    assert "whether runs was ended is not known: frontend did not answer" in silent.stderr


async def test_what_is_no_requests_name_is_refused(tmp_path: Path) -> None:
    """Before anybody is asked; a store that is away is not looked for."""
    for name in ("", " ", "é", "x" * 129):
        done = said_here(("queue", "--kill", name, "--store", f"unix://{tmp_path}/none"), {"HOME": str(tmp_path)})
        assert (done.returncode, done.stdout) == (2, ""), done
        assert "is not a request id or name; `holdfast get requests` shows ids" in done.stderr

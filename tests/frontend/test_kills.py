"""Requests that are ended by their key or by an operator, here or at another frontend."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from http_rig import Raw, chat
from openai_rig import MODEL
from waiting_rig import CHAT, get, lines, until_lines, want

from holdfast.core.tasks import beside
from holdfast.core.tiers import Tier
from holdfast.discovery.keys import KILLS
from holdfast.frontend.accounts import Account, Accounts
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.kills import Kills
from holdfast.frontend.lobby import Lobby
from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.requests import Requests
from holdfast.spec.waits import HoldSettings
from holdfast.store.contract import Snapshot, Store
from holdfast.streams import kills
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.kills import Kill
from holdfast.streams.states import State
from holdfast.streams.stats import DispatchStats
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import BOUND_S, until
from holdfast.wire.http.connection import HttpConnection
from served_store import served_store

NOW_S = 1000.0


class Frontend:
    """As far as its requests go."""

    def __init__(self, store: Store, number: int) -> None:
        directory, stats = ModelDirectory(random.Random(1), 8), DispatchStats()
        clock = asyncio.get_running_loop().time
        self.accounts = Accounts(directory, FrontendMetrics(stats))
        lobby = Lobby(directory, HoldSettings(), stats, clock)
        requests = Requests(self.accounts, lobby, directory, clock, lambda: NOW_S)
        self.kills = Kills(requests, store, "d", random.Random(number), lambda: NOW_S)
        self.told: list[str] = []

    def begin(self, name: str, key: str) -> Account:
        account = self.accounts.begin("chat", Tier.STANDARD, id=f"id-{name}", name=name, key=key)
        account.preparing = cast(Any, SimpleNamespace(kill=lambda error: self.told.append(f"{name}: {error.code}")))
        return account

    async def delete(self, name: str, key: str) -> tuple[int, Any]:
        """The status, and what is told."""
        answered = asyncio.get_running_loop().create_future()
        respond = lambda status, body, headers=(): answered.set_result((status, json.loads(body)))  # noqa: E731
        connection = cast(HttpConnection, SimpleNamespace(respond=respond, responder=None))
        try:
            self.kills.answer(connection, f"/v1/requests/{name}", key)
        except ApiError as error:
            return error.status, json.loads(error.body())
        return cast("tuple[int, Any]", await asyncio.wait_for(answered, BOUND_S))


async def test_a_key_ends_its_own_requests_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here at once, at another frontend through the store, by its id or name; of another's it does not even hear."""
    async with served_store(tmp_path) as (store,):
        here, there = Frontend(store, 1), Frontend(store, 2)
        async with beside(here.kills.follow(), "here"), beside(there.kills.follow(), "there"):
            mine, far, hers = here.begin("mine", "k"), there.begin("far", "k"), there.begin("hers", "other")
            status, body = await here.delete("id-mine", "k")
            assert (status, body["state"], mine.ended) == (200, "CANCELLED", State.CANCELLED)
            status, body = await here.delete("far", "k")
            assert (status, body["state"], far.ended) == (200, "CANCELLED", State.CANCELLED)
            assert (here.told, there.told) == (["mine: Cancelled"], ["far: Cancelled"])
            monkeypatch.setattr(kills, "ANSWER_S", 0.2)
            for name in ("hers", "nobody's"):
                status, body = await here.delete(name, "k")
                assert (status, body["error"]["code"]) == (404, "request_not_found")
            assert hers.ended is None
            assert (await here.delete("mine", "k"))[0] == 404, "it is over"
            first = await anext(aiter(store.watch(KILLS)))
            assert isinstance(first, Snapshot)
            assert first.items == {}


async def test_an_operator_ends_any_request_and_what_was_asked_long_ago_is_forgotten(tmp_path: Path) -> None:
    """Whoever can write the store; a record that nobody waits for any more ends nothing, and goes."""
    async with served_store(tmp_path) as (store,):
        frontend = Frontend(store, 1)
        stays = frontend.begin("stays", "k")
        stale = Kill(name="stays", at_unix_s=NOW_S - kills.STALE_S - 1)
        for token, value in (("old", msgspec.json.encode(stale)), ("odd", b"[")):
            await store.put(KILLS + token, value, BOUND_S)
        async with beside(frontend.kills.follow(), "frontend"):
            ended = frontend.begin("ended", "k")
            assert await kills.ask(store, Kill(name="id-ended", at_unix_s=NOW_S), "new")

            async def is_gone() -> bool:
                return await store.get(f"{KILLS}old", BOUND_S) is None

            async with asyncio.timeout(BOUND_S):
                while not await is_gone():
                    await asyncio.sleep(0.01)
            await until(lambda: ended.ended is State.CANCELLED, "its end")
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

"""Requests that wait, with real processes: what their clients see of it and can ask, until a worker has come."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from holdfast.routing.degradation import LevelRecord
from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.official_client import HELLO, MODEL, text_of
from tests.rigs.frontend.pending_models import (
    CHAT,
    get,
    lines,
    listed,
    report,
    requests,
    shown_by,
    tell_level,
    until_lines,
    up,
    want,
    want_no_more,
)
from tests.rigs.frontend.raw_http import Raw, chat
from tests.rigs.mid_stream import slow_down

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STREAM = chat(stream=True)
# However long a machine takes to start a worker, and far shorter than a test may take.
PATIENT: dict[str, Any] = {"holds": {"hold_s": 0.2, "provision_s": 200.0, "queue_s": 200.0}}
SIM = {"ttft_ms": 5, "tpot_ms": 1}


def named(name: str) -> str:
    return f"x-request-id: {name}\r\n"


@pytest.fixture
def empty() -> Iterator[Deployment]:
    """A frontend, and no worker."""
    with Deployment(workers=0, sim=SIM, frontend=PATIENT) as started:
        yield up(started)


def event_of(raw: Raw) -> Any:
    """The next one that is no comment."""
    raw.until(b"data: ")
    return json.loads(raw.until(b"\n\n"))


def in_thread(act: Any) -> tuple[threading.Thread, list[Any]]:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(act()), daemon=True)
    thread.start()
    return thread, made


def test_a_wanted_model_is_held_until_its_first_worker_has_come(empty: Deployment) -> None:
    """It is listed without one; a stream's client is told in comments, which OpenAI's own client does not see; each
    request's state and place can be asked for; and all are answered when the worker is there."""
    want(empty, MODEL)
    card = get(empty, f"/v1/models/{MODEL}")
    assert (card.status, card.json()["id"], card.json()["max_model_len"]) == (200, MODEL, None)
    client = OpenAI(base_url=f"http://127.0.0.1:{empty.port}/v1", api_key="none", max_retries=0, timeout=120)
    with Raw(empty.port) as raw, client:
        raw.post(CHAT, STREAM, named("raw"))
        until_lines(empty, [("raw", "PROVISIONING", 1)])
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
        whole = in_thread(lambda: client.chat.completions.create(**asked))
        empty.wait_until(lambda: len(lines(empty)) == 2, "the second to wait")
        chunks = in_thread(lambda: list(client.chat.completions.create(**asked, stream=True)))
        empty.wait_until(lambda: len(lines(empty)) == 3, "the third to wait")
        assert [(state, place) for _, state, place in lines(empty)] == [("PROVISIONING", place) for place in (1, 2, 3)]
        head = raw.until(b": provisioning\n\n")
        assert b"HTTP/1.1 200" in head
        assert b"data:" not in head
        found = get(empty, "/v1/requests/raw").json()
        assert (found["object"], found["model"], found["tier"], found["stream"]) == ("request", MODEL, "standard", True)
        assert found["waited_s"] > 0.0
        assert get(empty, f"/v1/requests/{found['id']}").json()["request_id"] == "raw"
        empty.start_worker("worker-0")
        rest = raw.until(b"[DONE]").decode()
        assert f'"id":"{found["id"]}"' in rest, "the id that was told is the answer's"
        for thread, made in (whole, chunks):
            thread.join(120)
            assert made
    assert whole[1][0].choices[0].finish_reason == "length"
    assert text_of(chunks[1][0])
    until_lines(empty, [])
    ended = get(empty, f"/v1/requests/{found['id']}").json()
    assert (ended["state"], ended["place"], ended["waited_s"]) == ("DONE", None, None)


def test_a_wanted_model_that_lost_its_last_worker_is_waited_for() -> None:
    """In the line of the set that it had: a stream under way is told so too, and goes on; a frontend that drains tells
    who waits that it does."""
    with Deployment(workers=1, sim=SIM, frontend={**PATIENT, "drain_s": 0.5}) as deployment:
        want(deployment, MODEL)
        slow_down(deployment, 20.0)  # the one that is killed
        with Raw(deployment.port) as running, Raw(deployment.port) as fresh:
            running.post(CHAT, chat(stream=True, max_tokens=300, ignore_eos=True), named("running"))
            running.until(b"data: ")
            deployment.kill("worker-0")
            fresh.post(CHAT, STREAM, named("fresh"))
            for raw in (running, fresh):
                raw.until(b": provisioning\n\n")
            until_lines(deployment, [("running", "PROVISIONING", 1), ("fresh", "PROVISIONING", 2)])
            deployment.start_worker("worker-1")
            for raw in (running, fresh):
                raw.until(b"data: [DONE]")
            deployment.kill("worker-1")
        with Raw(deployment.port) as left:
            left.post(CHAT, STREAM, named("left"))
            left.until(b": provisioning\n\n")
            deployment.signal("frontend", signal.SIGTERM)
            assert event_of(left)["error"]["code"] == "EngineShutdown"


def test_the_wait_for_a_model_that_nobody_wants_is_as_short_as_ever(empty: Deployment) -> None:
    """With another wanted, and before any worker was there; its refusal has its status."""
    want(empty, "another")
    with Raw(empty.port) as raw:
        refused = raw.post(CHAT, STREAM).reply()
    assert (refused.status, refused.error["code"]) == (503, "NoWorker")


def test_a_fleet_without_any_worker_is_not_short_of_capacity(empty: Deployment) -> None:
    """Control says that there is nobody at all (level 4): a model that comes when it is asked for is asked for."""
    tell_level(empty, LevelRecord(4, "a test", vacant=True))
    empty.wait_until(lambda: empty.health().get("level") == 4, "level 4")
    with Raw(empty.port) as raw:
        assert raw.post(CHAT, STREAM).reply().status == 503
    want(empty, MODEL)
    with Raw(empty.port) as raw:
        raw.post(CHAT, STREAM, named("asks"))
        until_lines(empty, [("asks", "PROVISIONING", 1)])


@pytest.fixture
def one_place() -> Iterator[Deployment]:
    """A wanted model's only worker, with one place, and slow enough for whoever looks."""
    sim = {**SIM, "tpot_ms": 500.0, "concurrency": 1, "queue": 0, "context_tokens_max": 65_536}
    with Deployment(workers=1, sim=sim, frontend=PATIENT) as started:
        want(started, MODEL)
        yield started


LONG = chat(stream=True, max_tokens=60_000, ignore_eos=True)


def test_places_are_told_and_move_up(one_place: Deployment) -> None:
    """A higher tier stands first; when one leaves the others move up, and an operator sees the same."""
    with Raw(one_place.port) as first, Raw(one_place.port) as second, Raw(one_place.port) as third:
        first.post(CHAT, LONG, named("first"))
        until_lines(one_place, [("first", "RUNNING", None)])
        second.post(CHAT, LONG, named("second"))
        until_lines(one_place, [("second", "QUEUED", 1), ("first", "RUNNING", None)])
        third.post(CHAT, LONG, named("third") + "x-priority-tier: premium\r\n")
        until_lines(one_place, [("third", "QUEUED", 1), ("second", "QUEUED", 2), ("first", "RUNNING", None)])
        shown = shown_by(one_place, "queue")
        assert shown.returncode == 0, shown.stderr
        rows = [line.split() for line in shown.stdout.splitlines()]
        assert [row[1:4] + row[-2:] for row in rows[1:]] == [
            [MODEL, "QUEUED", "1", "premium", "frontend"],
            [MODEL, "QUEUED", "2", "standard", "frontend"],
        ]
        told = json.loads(shown_by(one_place, "queue", "--all", "--json").stdout)
        assert [(row["request_id"], row["state"]) for row in told["rows"]] == [
            ("third", "QUEUED"), ("second", "QUEUED"), ("first", "RUNNING"),
        ]  # fmt: skip
        demand = lambda: report(one_place).demand.get(MODEL)  # noqa: E731
        one_place.wait_until(lambda: (found := demand()) is not None and found.waiting == 2, "both in the report")
        found = demand()
        assert found is not None
        earliest = min(row["created"] for row in requests(one_place) if row["state"] == "QUEUED")
        assert abs(found.since_unix_s - earliest) < 1.0
        first.sock.close()
        third.until(b"data: ")
        until_lines(one_place, [("second", "QUEUED", 1), ("third", "RUNNING", None)])
        assert get(one_place, "/v1/requests/first").json()["state"] == "CANCELLED"


def test_what_waits_for_a_model_that_is_taken_away_is_told_at_once(empty: Deployment) -> None:
    """With its status where nothing went out yet, else in an event; and then nobody knows the name."""
    want(empty, MODEL, "stays")
    with Raw(empty.port) as stream, Raw(empty.port) as whole:
        stream.post(CHAT, STREAM, named("stream"))
        whole.post(CHAT, chat(), named("whole"))
        stream.until(b": provisioning\n\n")
        empty.wait_until(lambda: len(lines(empty)) == 2, "both to wait")
        want_no_more(empty, MODEL)
        refused = whole.reply()
        assert (refused.status, refused.error["code"]) == (404, "ModelUnavailable")
        assert event_of(stream)["error"]["code"] == "ModelUnavailable"
        assert stream.until(b"0\r\n\r\n"), "the stream has its end, and no [DONE]"
    assert (listed(empty), requests(empty)) == (["stays"], [])
    assert get(empty, "/v1/requests/whole").json()["state"] == "FAILED"


def test_a_client_that_leaves_is_off_the_list(empty: Deployment) -> None:
    """Before and after its first comment; those behind it move up."""
    want(empty, MODEL)
    with Raw(empty.port) as told, Raw(empty.port) as untold, Raw(empty.port) as stays:
        for raw, name in ((told, "told"), (untold, "untold"), (stays, "stays")):
            raw.post(CHAT, STREAM if raw is told else chat(), named(name))
            empty.wait_until(lambda name=name: name in [row[0] for row in lines(empty)], name)
        told.until(b": provisioning\n\n")
        told.sock.close()
        untold.sock.close()
        until_lines(empty, [("stays", "PROVISIONING", 1)])
        for name in ("told", "untold"):
            assert get(empty, f"/v1/requests/{name}").json()["state"] == "CANCELLED"


def test_a_key_sees_its_own_requests() -> None:
    """And not that there are others; without one nothing is told, but to who runs it, on the frontend's own page."""
    keys = {"api_keys": ("alice", "bob"), "status_address": "tcp://127.0.0.1:0", "holds": {"hold_s": 200.0}}
    with Deployment(workers=0, frontend=keys) as deployment:
        up(deployment)
        headers = {name: f"authorization: Bearer {name}\r\n" for name in ("alice", "bob")}
        with Raw(deployment.port) as raw:
            raw.post(CHAT, chat(), named("hers") + headers["alice"])
            waits = lambda: [row["request_id"] for row in requests(deployment, headers["alice"])]  # noqa: E731
            deployment.wait_until(lambda: waits() == ["hers"], "it to wait")
            assert requests(deployment, headers["bob"]) == []
            for path in ("/v1/requests", "/v1/requests/hers"):
                assert get(deployment, path).status == 401
            assert get(deployment, "/v1/requests/hers", headers["bob"]).status == 404
            assert get(deployment, "/v1/requests/hers", headers["alice"]).json()["state"] == "PROVISIONING"
            told = json.loads(shown_by(deployment, "queue", "--json").stdout)
            assert ([row["request_id"] for row in told["rows"]], told["notes"]) == (["hers"], [])
            with Raw(deployment.port) as other:  # who calls another's the same hides nothing
                other.post(CHAT, chat(), named("hers") + headers["bob"])
                deployment.wait_until(lambda: len(requests(deployment, headers["bob"])) == 1, "the other to wait")
                found = [get(deployment, "/v1/requests/hers", headers[name]).json() for name in ("alice", "bob")]
                assert [one["place"] for one in found] == [1, 2]

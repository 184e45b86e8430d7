"""What a client reads of its wait: comments if it asks for progress, the answer's head in any case."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.official_client import ask, stream, text_of
from tests.rigs.frontend.pending_models import CHAT, until_lines
from tests.rigs.frontend.raw_http import Raw, chat

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PROGRESS = "x-holdfast-progress: 1\r\n"
QUEUED_MS = "x-holdfast-queued-ms"
LONG = chat(stream=True, max_tokens=60_000, ignore_eos=True)
SIM: dict[str, Any] = {"ttft_ms": 5, "tpot_ms": 20.0, "concurrency": 1, "queue": 0, "context_tokens_max": 65_536}


def named(name: str) -> str:
    return f"x-request-id: {name}\r\n"


def queued_ms(head: bytes) -> int:
    found = re.search(rb"\r\nx-holdfast-queued-ms: (\d+)\r\n", head)
    assert found, head
    return int(found[1])


@pytest.fixture
def one_place() -> Iterator[Deployment]:
    """Its only worker has one place; requests may wait long."""
    with Deployment(workers=1, sim=SIM, frontend={"holds": {"queue_s": 200.0, "hold_s": 200.0}}) as started:
        yield started


@pytest.fixture
def impatient() -> Iterator[Deployment]:
    """The same, and requests may wait 6 s: longer than the first comment takes, on a busy machine too."""
    with Deployment(workers=1, sim=SIM, frontend={"holds": {"queue_s": 6.0}}) as started:
        yield started


def test_a_client_that_asks_reads_its_place_and_its_worker(one_place: Deployment) -> None:
    """In comments, from its wait to its worker; one that does not ask reads nothing before its first token, and then
    in the head how long it waited."""
    with Raw(one_place.port) as first, Raw(one_place.port) as asks, Raw(one_place.port) as plain:
        first.post(CHAT, LONG, named("first"))
        assert queued_ms(first.until(b"data: ")) < 60_000
        asks.post(CHAT, LONG, named("asks") + PROGRESS)
        until_lines(one_place, [("asks", "QUEUED", 1), ("first", "RUNNING", None)])
        plain.post(CHAT, LONG, named("plain"))
        head = asks.until(b": queued position=1 model=holdfast-sim waited_s=")
        assert b"HTTP/1.1 200" in head
        assert QUEUED_MS.encode() not in head, "it is not known yet"
        assert b"data:" not in head
        until_lines(one_place, [("asks", "QUEUED", 1), ("plain", "QUEUED", 2), ("first", "RUNNING", None)])
        waits_s = time.monotonic()
        first.sock.close()
        told = asks.until(b"data: ")
        assert re.search(rb": dispatched worker=worker-0 waited_s=\d+\.\d\n\n", told), told
        assert told.count(b": dispatched") == 1
        until_lines(one_place, [("plain", "QUEUED", 1), ("asks", "RUNNING", None)])
        waited_ms = int((time.monotonic() - waits_s) * 1000)
        asks.sock.close()
        head = plain.until(b"data: ")
        assert queued_ms(head) >= waited_ms, "it waited all the while"
        assert b"\n: " not in head


def test_a_request_for_a_model_without_a_worker_reads_how_it_waits_and_where_it_is_sent(one_place: Deployment) -> None:
    """First for its worker, which was killed before the request came; then it is sent to the next one."""
    one_place.kill("worker-0")
    one_place.wait_until(lambda: one_place.health()["status"] == "no_worker", "the frontend to notice")
    with Raw(one_place.port) as asks:
        asks.post(CHAT, chat(stream=True), PROGRESS)
        head = asks.until(b": provisioning position=1 model=holdfast-sim waited_s=")
        assert b"HTTP/1.1 200" in head
        one_place.start_worker("worker-1")
        answer = asks.until(b"data: [DONE]")
    assert answer.count(b": dispatched worker=worker-1 waited_s=") == 1


def test_a_refusal_keeps_its_status_unless_a_comment_went_out(impatient: Deployment) -> None:
    """Plain clients get 429, streamed or not, with the time that they waited; one that asked reads an event."""
    with Raw(impatient.port) as first, Raw(impatient.port) as asks, Raw(impatient.port) as streams:
        first.post(CHAT, LONG)
        first.until(b"data: ")
        asks.post(CHAT, LONG, PROGRESS)
        streams.post(CHAT, LONG)
        with Raw(impatient.port) as whole:
            refused = [whole.post(CHAT, chat()).reply(), streams.reply()]
        for reply in refused:
            assert (reply.status, reply.error["code"]) == (429, "WorkerOverloaded")
            assert int(reply.headers[QUEUED_MS]) >= 1_000
            assert "retry-after" in reply.headers
        told = asks.reply()
        assert told.status == 200
        assert told.body.startswith(b": queued position=1 model=holdfast-sim waited_s=")
        assert [event["error"]["code"] for event in told.events()] == ["WorkerOverloaded"]
        with Raw(impatient.port) as wrong:
            reply = wrong.post(CHAT, chat(model="made-up", stream=True), PROGRESS).reply()
        assert reply.status == 404, "what is refused at once has its status, asked for or not"


def test_the_official_client_skips_the_comments(client: OpenAI) -> None:
    """It makes the same of an answer with them and without."""
    asked = client.with_options(default_headers={"x-holdfast-progress": "1"})
    whole = ask(client, seed=5).choices[0].message.content
    assert text_of(stream(asked, seed=5)) == text_of(stream(client, seed=5)) == whole
    raw = asked.chat.completions.with_raw_response.create(
        model="holdfast-sim", messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert int(raw.headers[QUEUED_MS]) >= 0
    with asked.chat.completions.with_streaming_response.create(
        model="holdfast-sim", messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
    ) as streamed:
        assert next(streamed.iter_lines()).startswith(": dispatched worker=")

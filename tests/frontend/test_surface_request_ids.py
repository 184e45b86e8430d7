"""A request has a name that its client, its answer and the frontend's log share."""

from __future__ import annotations

import re

import pytest
from openai import OpenAI

from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.official_client import HELLO, MODEL
from tests.rigs.frontend.raw_http import Raw, Reply

CHAT = "/v1/chat/completions"
ASKED = {"model": MODEL, "messages": HELLO, "max_tokens": 3}


def post(deployment: Deployment, name: str, **fields: object) -> Reply:
    with Raw(deployment.port) as raw:
        return raw.post(CHAT, {**ASKED, **fields}, f"x-request-id: {name}\r\n").reply()


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_name_comes_back(deployment: Deployment, stream: bool) -> None:
    """With an answer, with a stream, with a refusal; for each request on a connection its own."""
    assert post(deployment, "trace-1/a:b", stream=stream).headers["x-request-id"] == "trace-1/a:b"
    assert post(deployment, "trace-2", n=0).headers["x-request-id"] == "trace-2"
    with Raw(deployment.port) as raw:
        first = raw.post(CHAT, {**ASKED, "stream": stream}, "X-Request-ID: one\r\n").reply()
        second = raw.post(CHAT, ASKED).reply()
    assert first.headers["x-request-id"] == "one"
    assert second.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("name", ["", "x" * 129, "two words", 'quo"te', "caf\u00e9"])
def test_a_name_that_will_not_do_is_replaced(deployment: Deployment, name: str) -> None:
    """It is neither told back nor logged, and the request is answered all the same."""
    reply = post(deployment, name)
    assert (reply.status, reply.headers["x-request-id"][:4]) == (200, "req-")


def test_everybody_has_a_name(client: OpenAI, deployment: Deployment) -> None:
    """The official client finds it where OpenAI puts it; no two are alike; pages and wrong paths have one too."""
    names = [client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)._request_id for _ in range(3)]
    for path in ("/v1/models", "/nowhere", "/health"):
        with Raw(deployment.port) as raw:
            names.append(raw.get(path).reply().headers["x-request-id"])
    assert len(set(names)) == 6


@pytest.mark.processes
def test_a_failure_of_ours_is_in_the_log_by_its_name() -> None:
    """Before the first token as after it; what a client did wrong is not. A worker's coming and going is logged as `ps`
    calls it, and every line begins with its date."""
    with Deployment(workers=1, frontend={"holds": {"hold_s": 0.3}}, sim={"tpot_ms": 20}) as deployment:
        with Raw(deployment.port) as raw:
            raw.post(CHAT, {**ASKED, "stream": True, "max_tokens": 400, "ignore_eos": True}, "x-request-id: begun\r\n")
            raw.until(b"data: ")
            assert deployment.health()["workers"][0]["name"] == "worker-0"
            deployment.kill("worker-0")
            assert b'"error"' in raw.until(b"0\r\n\r\n")
        assert post(deployment, "unbegun").status == 503
        assert post(deployment, "mistaken", n=0).status == 400
        deployment.wait_until(lambda: "worker-0 left: " in deployment.log("frontend"), "its end to be logged")
        log = deployment.log("frontend")
    for name in ("begun", "unbegun"):
        assert f"request {name} failed: 503 NoWorker" in log
    assert "mistaken" not in log
    lines = [line for line in log.splitlines() if "worker-0" in line]
    assert any(" worker-0 of holdfast-sim " in line for line in lines)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line) for line in lines)

"""The access log: a line per request, under its own name, only where it was asked for."""

from __future__ import annotations

import re

from http_rig import Raw, chat

from holdfast.testing.deployment import Deployment

CHAT = "/v1/chat/completions"


def line_of(deployment: Deployment, name: str) -> str:
    """The one line of a request; it is written in the turn after the answer."""
    found = lambda: [line for line in deployment.log("frontend").splitlines() if f" request={name} " in line]  # noqa: E731
    deployment.wait_until(lambda: bool(found()), f"the line of {name}", 10)
    (line,) = found()
    return line


def test_every_request_is_a_line_where_that_was_asked_for() -> None:
    """Answers with their tokens, refusals with their status, clients that left: each a dated line with its name,
    and nothing that a client sends makes two lines of one."""
    with Deployment(workers=1, sim={"ttft_ms": 0.0}, frontend={"access_log": True}) as deployment:
        with Raw(deployment.port) as raw:
            for stream in (True, False):
                body = chat(stream=stream, max_tokens=7, ignore_eos=True)
                assert raw.post(CHAT, body, f"x-request-id: s-{stream}\r\n").reply().status == 200
            assert raw.post(CHAT, {"model": 5}, "x-request-id: wrong\r\n").reply().status == 400
            assert raw.get('/odd"path', "x-request-id: odd\r\n").reply().status == 404
        with Raw(deployment.port) as leaver:
            body = chat(stream=True, max_tokens=20_000, ignore_eos=True)
            leaver.post(CHAT, body, "x-request-id: leaver\r\n").until(b"data: ")
        for name in ("s-True", "s-False"):
            line = line_of(deployment, name)
            assert re.match(r"\d{4}-\d\d-\d\d .* access 127\.0\.0\.1:\d+ \"POST /v1/chat/completions\" 200 ", line)
            assert " model=holdfast-sim outcome=success prompt=" in line
            assert " completion=7 ttft_ms=" in line
        assert '" 400 request=wrong total_ms=' in line_of(deployment, "wrong")
        assert '"GET /odd%22path" 404 ' in line_of(deployment, "odd")
        assert " outcome=cancelled " in line_of(deployment, "leaver")


def test_without_the_wish_there_is_no_line(deployment: Deployment) -> None:
    """The default."""
    with Raw(deployment.port) as raw:
        assert raw.post(CHAT, chat(max_tokens=2), "x-request-id: unseen\r\n").reply().status == 200
    assert " access " not in deployment.log("frontend")

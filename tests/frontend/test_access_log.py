"""The access log: a line per request, under its own name, only where it was asked for. What is refused before it is a
whole request is answered as everything else: by name, for web pages too, with a line."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from tests.rigs.frontend.raw_http import Raw, Reply, chat, one_more_frontend

CHAT = "/v1/chat/completions"
HOME = "https://chat.example.org"


@pytest.fixture(scope="module")
def port(deployment: Deployment) -> Iterator[int]:
    """Of one more frontend: with an access log, and open to one page."""
    asked = {"access_log": True, "cors_origins": [HOME]}
    with one_more_frontend(deployment, "strict", free_port(), asked) as port:
        yield port


def line_of(deployment: Deployment, name: str) -> str:
    """The one line of a request; it is written in the turn after the answer."""
    found = lambda: [line for line in deployment.log("strict").splitlines() if f" request={name} " in line]  # noqa: E731
    deployment.wait_until(lambda: bool(found()), f"the line of {name}")
    (line,) = found()
    return line


def test_every_request_is_a_line_where_that_was_asked_for(deployment: Deployment, port: int) -> None:
    """Answers with their tokens, refusals with their status, clients that left: each a dated line with its name,
    and nothing that a client sends makes two lines of one."""
    with Raw(port) as raw:
        for stream in (True, False):
            body = chat(stream=stream, max_tokens=7, ignore_eos=True)
            assert raw.post(CHAT, body, f"x-request-id: s-{stream}\r\n").reply().status == 200
        assert raw.post(CHAT, {"model": 5}, "x-request-id: wrong\r\n").reply().status == 400
        assert raw.get('/odd"path', "x-request-id: odd\r\n").reply().status == 404
    with Raw(port) as leaver:
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


def check(deployment: Deployment, reply: Reply, status: int, name: str, asked: str = f"POST {CHAT}") -> None:
    assert (reply.status, reply.headers.get("x-request-id")) == (status, name)
    assert reply.headers["access-control-allow-origin"] == HOME
    assert reply.headers["connection"] == "close"
    assert reply.error["type"] == ("overloaded_error" if status == 429 else "invalid_request_error")
    assert f' "{asked}" {status} ' in line_of(deployment, name)


@pytest.mark.parametrize(
    ("status", "rest"),
    [
        (400, "space : before\r\n\r\n"),
        (400, "transfer-encoding: chunked\r\n\r\nzz\r\n"),
        (408, "content-length: 10\r\n\r\n"),
        (413, "content-length: 99999999\r\n\r\n"),
        (431, "x: " + "y" * 40_000 + "\r\n\r\n"),
    ],
)
def test_a_refusal_of_what_arrives_is_an_answer_like_any_other(
    deployment: Deployment, port: int, status: int, rest: str
) -> None:
    """With the name and for the page that were told before it went wrong."""
    name = f"while-{status}-{len(rest)}"
    with Raw(port) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nx-request-id: {name}\r\norigin: {HOME}\r\nhost: x\r\n{rest}".encode())
        check(deployment, raw.reply(), status, name)


def test_a_refusal_of_what_is_sent_ahead_is_an_answer_like_any_other(deployment: Deployment, port: int) -> None:
    """It names the request that was one too many, and says when to come back."""
    with Raw(port) as raw:
        raw.post(CHAT, chat("a", stream=True, max_tokens=3000, ignore_eos=True))
        head = f"GET /live HTTP/1.1\r\nhost: x\r\norigin: {HOME}\r\n"
        heads = [f"{head}x-request-id: ahead-{n}\r\n\r\n" for n in range(30)]
        raw.send("".join(heads).encode())
        replies = [raw.reply() for _ in range(18)]
    check(deployment, replies[-1], 429, "ahead-16", "GET /live")
    assert replies[-1].headers["retry-after"] == "1"
    assert [reply.headers["x-request-id"] for reply in replies[1:-1]] == [f"ahead-{n}" for n in range(16)]


def test_nonsense_has_a_name_too(deployment: Deployment, port: int) -> None:
    """Of ours, and never that of the request before it."""
    with Raw(port) as raw:
        first = raw.get("/live", "x-request-id: before\r\n").reply()
        reply = raw.send(b"nonsense\r\n\r\n").reply()
    assert (first.headers["x-request-id"], reply.status) == ("before", 400)
    name = reply.headers["x-request-id"]
    assert name.startswith("req-")
    assert ' "- -" 400 ' in line_of(deployment, name)

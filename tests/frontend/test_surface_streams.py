"""Clients that leave, clients that do not read, and a frontend that is asked to leave: real sockets, real signals."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import fd_count, rss_bytes
from tests.rigs.frontend.raw_http import WAIT_S, Raw, chat

CHAT = "/v1/chat/completions"
LONG = 20_000  # tokens, twenty seconds and more of a stream


def long_chat(words: str = "hello", tokens: int = LONG, **more: Any) -> dict[str, Any]:
    return chat(words, max_tokens=tokens, ignore_eos=True, **more)


def running(deployment: Deployment) -> int:
    return int(deployment.worker_facts("worker-0")["running"])


def made(deployment: Deployment) -> int:
    return int(deployment.worker_facts("worker-0")["tokens_total"])


def wait_gone(deployment: Deployment, what: str, before: int, streams: int = 1) -> None:
    """Wait until the engine has dropped the work, and see by the tokens it has made of it, since there were `before`,
    that this was long before it would have done it."""
    took_s = deployment.wait_until(lambda: running(deployment) == 0, f"the engine to drop {what}")
    print(f"{what}: cancelled on the engine after {took_s * 1000:.0f} ms")
    assert made(deployment) - before < streams * LONG / 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("abrupt", [True, False])
def test_a_client_that_goes_away_frees_the_engine(deployment: Deployment, stream: bool, n: int, abrupt: bool) -> None:
    """Closed or reset, streaming or not, all its choices: the engine's work ends at once."""
    before = made(deployment)
    with Raw(deployment.port) as raw:
        raw.post(CHAT, long_chat(stream=stream, n=n))
        deployment.wait_until(lambda: running(deployment) == n, "the streams to run")
        if stream:
            raw.until(b"data: ")
        if abrupt:
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_gone(deployment, f"stream={stream} n={n} abrupt={abrupt}", before, n)
    deployment.wait_until(lambda: deployment.health()["streams"] == 0, "the frontend to let go")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_half_closed_client_gets_its_answer(deployment: Deployment, stream: bool, version: str) -> None:
    """It has said that it sends nothing more, not that it is gone: the whole answer comes, and then the end."""
    with Raw(deployment.port) as raw:
        raw.post(CHAT, long_chat(tokens=300, stream=stream), version=version)
        raw.sock.shutdown(socket.SHUT_WR)
        reply = raw.reply()
        if reply.status == 100:
            reply = raw.reply()
        assert reply.status == 200
        if stream:
            assert reply.events()[-1] == "[DONE]"
        else:
            assert reply.json()["usage"]["completion_tokens"] == 300
        assert raw.at_end()


def test_requests_sent_ahead_by_a_half_closed_client_are_answered(deployment: Deployment) -> None:
    """All of them, in order; the last one says that the connection closes."""
    with Raw(deployment.port) as raw:
        for tokens in (100, 50, 20):
            raw.post(CHAT, long_chat(tokens=tokens))
        raw.sock.shutdown(socket.SHUT_WR)
        replies = []
        while len(replies) < 3:
            reply = raw.reply()
            if reply.status != 100:
                replies.append(reply)
        assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [100, 50, 20]
        assert [reply.headers.get("connection", "") for reply in replies] == ["", "", "close"]
        assert raw.at_end()


def test_leaving_with_requests_sent_ahead_frees_everything(deployment: Deployment) -> None:
    """Neither the stream under way nor those that wait behind it, nor nonsense behind them, hold anything."""
    before, tokens = fd_count(deployment.pid("frontend")), made(deployment)
    with Raw(deployment.port) as raw:
        for _ in range(4):
            raw.post(CHAT, long_chat(stream=True))
        raw.until(b"data: ")
        raw.send(b"nonsense\r\n\r\n")
    wait_gone(deployment, "a pipeline", tokens)
    deployment.wait_until(lambda: fd_count(deployment.pid("frontend")) <= before, "no more descriptors than before")


def test_leaving_while_a_long_prompt_is_prepared_frees_everything(deployment: Deployment) -> None:
    """Gone before its prompt is tokenized, it never reaches the engine, and is not counted for ever."""
    for _ in range(20):
        with Raw(deployment.port) as raw:
            raw.post(CHAT, long_chat("word " * 20_000, tokens=5000, stream=True))
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deployment.wait_until(lambda: deployment.health()["streams"] == 0, "the frontend to let go")
    deployment.wait_until(lambda: running(deployment) == 0, "the engine to be idle")


CHOICES = 8


def unread(deployment: Deployment, tokens: int) -> Raw:
    """A client that asks for far more than the kernel's buffers hold (megabytes), and does not read."""
    raw = Raw(deployment.port, receive_bytes=4096)
    body = long_chat(
        "slow", tokens, n=CHOICES, seed=7, logprobs=True, top_logprobs=20, return_token_ids=True, stream=True
    )
    raw.post(CHAT, body)
    deployment.wait_until(lambda: running(deployment) == CHOICES, "the streams to run")
    return raw


@pytest.mark.long
def test_a_client_that_pauses_reading_misses_nothing(deployment: Deployment) -> None:
    """While it does not read, others go on and memory stays small; when it reads, all of it is there."""
    pid, tokens = deployment.pid("frontend"), 500
    with unread(deployment, tokens) as raw:
        before = rss_bytes(pid)
        with Raw(deployment.port) as other:
            assert other.post(CHAT, long_chat("other", 50, stream=True)).reply().events()[-1] == "[DONE]"
        deployment.wait_until(lambda: running(deployment) == 0, "the engine to finish without being read")
        assert deployment.health()["streams"] == 1
        assert rss_bytes(pid) - before < 64 * 1024 * 1024
        events = raw.reply().events()
    assert events[-1] == "[DONE]"
    with Raw(deployment.port) as again:
        body = long_chat("slow", tokens, n=CHOICES, seed=7, return_token_ids=True)
        choices = again.post(CHAT, body).reply().json()["choices"]
    for index, whole in enumerate(choices):
        mine = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert [token for part in mine for token in part.get("token_ids") or []] == whole["token_ids"]
        assert "".join(part["delta"].get("content", "") for part in mine) == whole["message"]["content"]
        assert sum(len((part["logprobs"] or {"content": []})["content"]) for part in mine) == tokens


@pytest.mark.long
def test_a_client_that_never_reads_is_cut_off(deployment: Deployment) -> None:
    """After its time is up its work is cancelled and its connection closed, and nothing of it is left."""
    before = fd_count(deployment.pid("frontend"))
    with unread(deployment, 20_000) as raw:
        took_s = deployment.wait_until(lambda: running(deployment) == 0, "the silent client to be cut off")
        assert took_s > 2.0
        deployment.wait_until(lambda: fd_count(deployment.pid("frontend")) <= before, "no more descriptors than before")
        with pytest.raises((ConnectionError, AssertionError)):
            raw.reply()
    assert deployment.health()["streams"] == 0


# -- leaving


@pytest.fixture
def leaving() -> Iterator[Deployment]:
    """A deployment of its own, whose frontend may be asked to leave."""
    with Deployment(workers=1, sim={"ttft_ms": 5, "tpot_ms": 10}, frontend={"drain_s": 600.0}) as started:
        yield started


def test_sigterm_lets_answers_finish_and_a_second_frontend_take_over(leaving: Deployment) -> None:
    """The open stream and the half-sent request are answered; new connections go to the other; exit status 0."""
    port = leaving.port
    with Raw(port) as stream, Raw(port) as idle, Raw(port) as half:
        stream.post(CHAT, long_chat("drain", 100, stream=True))
        stream.until(b"data: ")
        assert idle.get("/live").reply().status == 200
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        half.send(head + b"content-length: 2\r\n")
        leaving.start_frontend("frontend-2")
        leaving.wait_until(lambda: "frontend-2" in leaving.log("frontend-2"), "the second to come up")
        record = leaving.folder / "run" / "frontend-2.json"
        leaving.wait_until(record.exists, "the second to listen")
        leaving.signal("frontend", signal.SIGTERM)
        assert idle.at_end()
        for _ in range(20):
            with Raw(port) as new:
                assert new.post(CHAT, chat("new")).reply().status == 200
        assert half.send(b"\r\n{}").reply().status == 503
        rest = stream.until(b"0\r\n\r\n")
        assert b"[DONE]" in rest
        assert b'"finish_reason":"length"' in rest
        assert stream.at_end()
    assert leaving.processes["frontend"].wait(WAIT_S) == 0


@pytest.mark.long
def test_sigterm_refuses_new_connections_and_sends_what_is_written(leaving: Deployment) -> None:
    """A client that reads slowly has its whole answer although the last token was made long before it read it."""
    with Raw(leaving.port, receive_bytes=4096) as slow:
        slow.post(CHAT, long_chat("slow", 600, logprobs=True, top_logprobs=20))
        leaving.wait_until(lambda: leaving.health()["streams"] == 1, "the request to run")
        leaving.wait_until(lambda: leaving.health()["streams"] == 0, "the answer to be written")
        leaving.signal("frontend", signal.SIGTERM)
        leaving.wait_until(lambda: "draining" in leaving.log("frontend"), "the drain to begin")
        with pytest.raises(ConnectionRefusedError):
            Raw(leaving.port)
        reply = slow.reply()
        assert len(reply.json()["choices"][0]["logprobs"]["content"]) == 600
    assert leaving.processes["frontend"].wait(WAIT_S) == 0


def test_an_idle_frontend_leaves_at_once(leaving: Deployment) -> None:
    """Connections without a request do not hold it up, for as long as it would wait for answers."""
    with Raw(leaving.port) as idle:
        assert idle.get("/live").reply().status == 200
        leaving.signal("frontend", signal.SIGTERM)
        assert leaving.processes["frontend"].wait(WAIT_S) == 0
        assert idle.at_end()


def test_drain_that_runs_out_ends_streams_with_an_error_event() -> None:
    """An open stream gets an error event and no [DONE], never a silent close; the frontend exits with 0."""
    with Deployment(workers=1, frontend={"drain_s": 0.3}) as deployment, Raw(deployment.port) as raw:
        raw.post(CHAT, long_chat(stream=True)).until(b"data: ")
        deployment.signal("frontend", signal.SIGTERM)
        rest = raw.until(b"0\r\n\r\n")
        assert b'"error"' in rest
        assert b"shutting down" in rest
        assert b"[DONE]" not in rest
        assert deployment.processes["frontend"].wait(WAIT_S) == 0

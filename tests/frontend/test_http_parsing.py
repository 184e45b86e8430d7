"""Requests of every odd and broken form, byte by byte, against a real frontend: always an answer, always by name."""

from __future__ import annotations

import json
import time

import pytest

from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.raw_http import Raw, ask_once, chat

CHAT = "/v1/chat/completions"
POST = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"


@pytest.fixture(scope="module")
def port(deployment: Deployment) -> int:
    return deployment.port


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\nnonsense\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/2.0\r\n\r\n",
        b"GET /v1/models\r\n\r\n",
        b"GET  HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nno colon here\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nspace : before\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nnul: \x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1e3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_a_malformed_request_is_refused_and_the_connection_closed(port: int, data: bytes) -> None:
    """400 with a reason in OpenAI's shape, then the end: the place in the byte stream is lost."""
    with Raw(port) as raw:
        reply = raw.send(data).reply()
        assert reply.status == 400
        assert "HTTP" in reply.error["message"]
        assert reply.headers["connection"] == "close"
        assert raw.at_end()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000 + b"\r\n\r\n"],
        [b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"] + [b"x%d: %b\r\n" % (place, b"y" * 100) for place in range(400)],
        [b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: "] + [b"a" * 8000] * 6,
        [b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx"] + [b"a" * 8000] * 6,
        [
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
            + b"a" * 40_000
            + b"\r\n\r\n"
        ],
    ],
)
def test_headers_that_are_too_large_are_refused_while_they_arrive(port: int, pieces: list[bytes]) -> None:
    """431, for one endless header as for many, without waiting for their end."""
    with Raw(port) as raw:
        for piece in pieces:
            raw.send(piece)
        reply = raw.reply()
        assert reply.status == 431
        assert "32768" in reply.error["message"]


def test_a_body_that_is_too_large_is_refused_by_its_announcement(port: int) -> None:
    """413 at the header, and the answer arrives although the client goes on sending."""
    size = 20 * 1024 * 1024
    with Raw(port) as raw:
        raw.send(f"{POST}\r\ncontent-length: {size}\r\n\r\n".encode())
        for _ in range(size // 65536):
            raw.send(b"x" * 65536)
        reply = raw.reply()
        assert reply.status == 413
        assert str(size) in reply.error["message"]


def test_a_chunked_body_that_is_too_large_is_refused_on_the_way(port: int) -> None:
    """413 as soon as the chunks add up to too much."""
    with Raw(port) as raw:
        raw.send(f"{POST}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(40):
            raw.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        assert raw.reply().status == 413


def test_a_chunked_body_is_read_like_any_other(port: int) -> None:
    """Cut at any byte, with extensions and trailers."""
    data = json.dumps(chat("in pieces")).encode()
    with Raw(port) as raw:
        raw.send(f"{POST}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for place in range(0, len(data), 7):
            part = data[place : place + 7]
            raw.send(b"%x;ext=1\r\n%b\r\n" % (len(part), part))
        raw.send(b"0\r\nx-trailer: y\r\n\r\n")
        reply = raw.reply()
        assert reply.status == 200
        assert reply.json()["usage"]["completion_tokens"] >= 1


def test_a_trailer_is_no_header(deployment: Deployment) -> None:
    """What follows the body cannot change how the request was meant, such as its connection's end."""
    with Raw(deployment.port) as raw:
        raw.send(f"{POST}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        raw.send(b"2\r\n{}\r\n0\r\nauthorization: Bearer late\r\n\r\n")
        assert raw.reply().status == 400
        assert raw.get("/live").reply().status == 200


def test_a_client_that_waits_for_leave_to_send_gets_it(port: int) -> None:
    """Expect: 100-continue is answered before the body, and by the refusal itself when the body is too large."""
    data = json.dumps(chat()).encode()
    with Raw(port) as raw:
        raw.send(f"{POST}\r\ncontent-length: {len(data)}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert raw.reply().status == 100
        assert raw.send(data).reply().status == 200
        raw.send(f"{POST}\r\ncontent-length: 9999999\r\nexpect: 100-continue\r\n\r\n".encode())
        assert raw.reply().status == 413


def test_leave_to_send_is_not_written_into_a_stream(port: int) -> None:
    """A request sent ahead with Expect does not break the chunks of the stream before it."""
    data = json.dumps(chat("second")).encode()
    with Raw(port) as raw:
        raw.post(CHAT, chat("first", stream=True, max_tokens=40, ignore_eos=True))
        raw.send(f"{POST}\r\ncontent-length: {len(data)}\r\nexpect: 100-continue\r\n\r\n".encode())
        first = raw.reply()
        assert first.events()[-1] == "[DONE]"
        assert raw.send(data).reply().status == 200


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    """Slow before quick, streamed before whole: each answer in its turn, on one connection."""
    with Raw(port) as raw:
        raw.post(CHAT, chat("a", stream=True, max_tokens=30, ignore_eos=True))
        raw.get("/v1/models").get("/nowhere").post(CHAT, chat("b", n=2)).get("/live")
        replies = [raw.reply() for _ in range(5)]
    assert [reply.status for reply in replies] == [200, 200, 404, 200, 200]
    assert replies[0].events()[-1] == "[DONE]"
    assert replies[1].json()["object"] == "list"
    assert len(replies[3].json()["choices"]) == 2
    assert replies[4].json() == {"status": "live"}


def test_nonsense_behind_good_requests_is_answered_last(port: int) -> None:
    """The good ones get their answers first, the nonsense gets its 400, then the connection ends."""
    with Raw(port) as raw:
        raw.post(CHAT, chat("a", stream=True)).get("/live").send(b"nonsense\r\n\r\n")
        assert [raw.reply().status for _ in range(3)] == [200, 200, 400]
        assert raw.at_end()


def test_requests_sent_ahead_are_bounded(port: int) -> None:
    """Past the bound the next is refused; those within it are answered."""
    with Raw(port) as raw:
        raw.post(CHAT, chat("a", stream=True, max_tokens=100, ignore_eos=True))
        raw.send(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 40)
        statuses = [raw.reply().status for _ in range(18)]
    assert statuses == [200] * 17 + [429]


def test_bodies_sent_ahead_are_bounded_together(port: int) -> None:
    """Sixteen places do not mean sixteen times the largest body in memory."""
    with Raw(port) as raw:
        raw.post(CHAT, chat("a", stream=True, max_tokens=200, ignore_eos=True))
        raw.until(b"data: ")
        for _ in range(2):
            raw.post(CHAT, b" " * 700_000)
        while (line := raw.until(b"\r\n")) != b"0\r\n":
            assert line
        raw.until(b"\r\n")
        assert [raw.reply().status for _ in range(2)] == [400, 429]


def test_http_1_0_closes_unless_asked_to_stay(port: int) -> None:
    """A whole answer and a stream without chunks; keep-alive where it is asked for."""
    with Raw(port) as raw:
        reply = raw.post(CHAT, chat(stream=True), version="1.0").reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.events()[-1] == "[DONE]"
    with Raw(port) as raw:
        assert raw.post(CHAT, chat(), version="1.0").reply().headers["connection"] == "close"
        assert raw.at_end()
    with Raw(port) as raw:
        for _ in range(2):
            reply = raw.post(CHAT, chat(), "connection: keep-alive\r\n", "1.0").reply()
            assert (reply.status, reply.headers["connection"]) == (200, "keep-alive")


def test_head_has_the_headers_and_no_body(port: int) -> None:
    """As for GET, and the connection stays usable."""
    with Raw(port) as raw:
        head = raw.get("/v1/models", method="HEAD").reply(head_only=True)
        whole = raw.get("/v1/models").reply()
    assert head.status == whole.status == 200
    assert head.headers["content-length"] == str(len(whole.body))


def test_a_connection_serves_many_requests_and_closes_when_asked(port: int) -> None:
    """Keep-alive by default; `Connection: close` is said back and done."""
    with Raw(port) as raw:
        for _ in range(5):
            assert raw.post(CHAT, chat()).reply().status == 200
        reply = raw.get("/live", "connection: close\r\n").reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert raw.at_end()


def test_a_proxy_request_is_refused(port: int) -> None:
    """CONNECT has no place here."""
    reply = ask_once(port, b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, POST, OPTIONS")
    assert "CONNECT" in reply.error["message"]


def test_a_slow_sender_is_told_and_cut(port: int) -> None:
    """A byte now and then does not keep a request open: 408 after the time for one request."""
    with Raw(port) as raw:
        began_s = time.monotonic()
        raw.send(f"{POST}\r\ncontent-length: 1000\r\n\r\n".encode())
        raw.sock.settimeout(0.2)
        while True:
            raw.send(b" ")
            try:
                raw.until(b"HTTP/1.1 408")
                break
            except TimeoutError:
                assert time.monotonic() - began_s < 60
        raw.sock.settimeout(60)
        assert b"did not arrive within 6 s" in raw.until(b"}}")
        assert raw.at_end()
        assert time.monotonic() - began_s > 5.9


def test_many_small_pieces_make_a_request(port: int) -> None:
    """Byte by byte, head and body."""
    data = json.dumps(chat()).encode()
    whole = f"{POST}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    with Raw(port) as raw:
        for place in range(len(whole)):
            raw.send(whole[place : place + 1])
        assert raw.reply().status == 200


def test_what_comes_behind_a_last_request_is_not_answered(deployment: Deployment, port: int) -> None:
    """`Connection: close` and more bytes in the same packet: the request is answered, the rest is read and forgotten,
    and no error is logged."""
    before = deployment.log("frontend").count("Traceback")
    last = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\nXYZ\r\n\r\n"
    for request in (last, b"GET /live HTTP/1.0\r\n\r\n\xff"):
        with Raw(port) as raw:
            assert raw.send(request).reply().status == 200
            assert raw.at_end()
    assert deployment.log("frontend").count("Traceback") == before


# -- the wish for another protocol: answered in the one that is spoken, and nothing else that was said is lost


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_the_wish_for_another_protocol_is_ignored(port: int, upgrade: str) -> None:
    """Some clients add an upgrade to every request, body and all: it is answered as HTTP/1.1, once."""
    wish = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    with Raw(port) as raw:
        reply = raw.post(CHAT, chat("upgraded"), wish).reply()
        assert reply.status == 200
        assert raw.get("/live", wish).reply().json() == {"status": "live"}
        assert raw.get("/v1/models").reply().status == 200


@pytest.mark.parametrize(
    "header",
    [
        "connection: close, Upgrade",
        "connection: Upgrade,Close , HTTP2-Settings",
        "connection: close\r\nconnection: Upgrade",
        "connection: Upgrade\r\nconnection: close",
    ],
)
def test_a_wish_for_another_protocol_hides_no_close(port: int, header: str) -> None:
    """However the two are listed, the connection ends as asked."""
    with Raw(port) as raw:
        reply = raw.get("/live", f"{header}\r\nupgrade: h2c\r\n").reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert raw.at_end()


def test_a_wish_for_another_protocol_hides_no_version(port: int) -> None:
    """A client of HTTP/1.0 gets no chunks."""
    with Raw(port) as raw:
        wish = "connection: Upgrade\r\nupgrade: h2c\r\n"
        reply = raw.post(CHAT, chat(stream=True), wish, version="1.0").reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.events()[-1] == "[DONE]"

"""The request reader alone: any cut of the bytes gives the same requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.wire.http.request import HttpBounds, HttpRequest, RefusedRequest, RequestReader

BOUNDS = HttpBounds(header_bytes_max=2000, body_bytes_max=5000)

token = st.text(st.characters(categories=["Ll", "Lu", "Nd"], max_codepoint=127), min_size=1, max_size=10)
headers = st.dictionaries(token.map(lambda name: f"x-{name}"), token, max_size=5)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request as some client may write it."""
    method = draw(st.sampled_from(["GET", "POST", "PUT"]))
    version = draw(st.sampled_from(["1.0", "1.1"]))
    lines = [f"{method} /{draw(token)}?q HTTP/{version}", "connection: keep-alive", "host: x"]
    lines += [f"{name}: {value}" for name, value in draw(headers).items()]
    body = draw(st.binary(max_size=200))
    if version == "1.1" and draw(st.booleans()):
        lines.append("transfer-encoding: chunked")
        sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        lines.append(f"content-length: {len(body)}")
        sent = body
    if version == "1.1" and draw(st.booleans()):
        lines[1] = "connection: upgrade"
        lines.append("upgrade: h2c")
    return "\r\n".join([*lines, "", ""]).encode() + sent


def read(pieces: list[bytes]) -> tuple[list[HttpRequest], int]:
    """All requests, and the status of the refusal that ended it, if one did."""
    got: list[HttpRequest] = []
    reader = RequestReader(BOUNDS, got.append, lambda: None)
    try:
        for piece in pieces:
            reader.feed(piece)
    except RefusedRequest as refused:
        return got, refused.status
    return got, 0


@settings(max_examples=200, deadline=None)
@given(st.lists(requests(), max_size=4), st.lists(st.integers(0, 3000), max_size=30))
def test_any_cut_gives_the_same_requests(made: list[bytes], cuts: list[int]) -> None:
    """Byte by byte, all at once, or anything between: all of them, in order, and none refused."""
    data = b"".join(made)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:end] for start, end in itertools.pairwise(places)]
    whole, status = read([data])
    assert (len(whole), status) == (len(made), 0)
    assert read(pieces) == (whole, 0)
    assert read([data[place : place + 1] for place in range(len(data))]) == (whole, 0)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_requests_or_a_refusal(data: bytes, started: bool) -> None:
    """Nothing but RefusedRequest is raised, and its status is the client's fault."""
    _, status = read([b"POST / HTTP/1.1\r\n" + data if started else data, b"\r\n\r\n"])
    assert status == 0 or 400 <= status < 500


@given(st.integers(1, 3000))
def test_an_endless_header_is_refused_within_its_bound(step: int) -> None:
    """However it is cut: memory is bounded by the limit and one piece."""
    fed = 0
    reader = RequestReader(BOUNDS, lambda request: None, lambda: None)
    reader.feed(b"GET / HTTP/1.1\r\nhost: y\r\nx: ")
    status = 0
    while not status:
        fed += step
        try:
            reader.feed(b"a" * step)
        except RefusedRequest as refused:
            status = refused.status
    assert status == 431
    assert fed <= BOUNDS.header_bytes_max + step


def test_many_wishes_for_an_upgrade_do_not_pile_up() -> None:
    """Each is read again without it, one after another and not inside one another."""
    one = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    got, status = read([one * 2000])
    assert (len(got), status) == (2000, 0)


@pytest.mark.parametrize("upgrade", ["", "connection: upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize(
    ("version", "host", "status"),
    [("1.1", "", 400), ("1.1", "host: x\r\nHost: y\r\n", 400), ("1.1", "Host:\r\n", 0), ("1.0", "", 0)],
)
def test_http_1_1_needs_one_host(version: str, host: str, status: int, upgrade: str) -> None:
    """RFC 9112, 3.2; an empty one will do, and an older version needs none."""
    assert read([f"GET / HTTP/{version}\r\n{host}{upgrade}\r\n".encode()])[1] == status


def test_a_head_decides_how_much_of_its_body_is_read() -> None:
    """Before any of the body has come, and for bodies without a length while they arrive; without a body it is not
    asked."""
    asked: list[HttpRequest] = []

    def at_most(head: HttpRequest) -> int:
        asked.append(head)
        if head.path == "/none":
            raise RefusedRequest(401, "no key")
        return 10

    def status(data: bytes) -> int:
        reader = RequestReader(BOUNDS, lambda request: None, lambda: None, at_most)
        try:
            reader.feed(data)
        except RefusedRequest as refused:
            return refused.status
        return 0

    head = b"POST %s HTTP/1.1\r\nhost: x\r\n%s\r\n"
    chunked = b"transfer-encoding: chunked\r\n"
    assert status(head % (b"/", b"")) == 0
    assert asked == []
    assert status(head % (b"/none", b"content-length: 4000\r\n")) == 401
    assert status(head % (b"/none", chunked)) == 401
    assert status(head % (b"/", b"content-length: 11\r\n")) == 413
    assert status(head % (b"/", b"content-length: 10\r\n") + b"0123456789") == 0
    assert status(head % (b"/", chunked) + b"6\r\n012345\r\n") == 0
    assert status(head % (b"/", chunked) + b"6\r\n012345\r\n" * 2) == 413
    assert {(one.method, one.headers[b"host"], one.body) for one in asked} == {("POST", b"x", b"")}

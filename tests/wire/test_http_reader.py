"""The request reader alone: any cut of the bytes gives the same requests."""

from __future__ import annotations

import itertools

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
    lines = [f"{method} /{draw(token)}?q HTTP/{version}", "connection: keep-alive"]
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
    reader.feed(b"GET / HTTP/1.1\r\nx: ")
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
    one = b"GET /a HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    got, status = read([one * 2000])
    assert (len(got), status) == (2000, 0)

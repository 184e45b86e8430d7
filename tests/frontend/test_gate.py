"""What a request must bring, at the edge: a JSON body as it is, and for a web page, the operator's leave."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from http_rig import Raw, chat, one_more_frontend

from holdfast.frontend.gate import Gate
from holdfast.testing.deployment import Deployment
from holdfast.testing.place import free_port

CHAT = "/v1/chat/completions"
HOME = "https://chat.example.org"


@pytest.fixture(scope="module")
def open_to_pages(deployment: Deployment) -> Iterator[int]:
    """The port of one more frontend: with keys, on all addresses of both families, and open to one page."""
    port = free_port()
    asked = {"api_keys": ["a-key"], "cors_origins": [HOME], "address": f"tcp://[::]:{port}"}
    with one_more_frontend(deployment, "pages", port, asked):
        yield port


@pytest.mark.parametrize(
    "header",
    [
        "content-type: text/plain\r\n",
        "content-type: application/x-www-form-urlencoded\r\n",
        "content-type: multipart/form-data; boundary=x\r\n",
        "content-type: text/json\r\n",
        "content-type: \r\n",
    ],
)
def test_a_body_that_does_not_say_it_is_json_starts_nothing(deployment: Deployment, header: str) -> None:
    """Any page in a browser may send those, unasked: 415 names what it got and what it should be."""
    with Raw(deployment.port) as raw:
        reply = raw.post(CHAT, chat(), header).reply()
        assert (reply.status, reply.error["code"]) == (415, "unsupported_content_type")
        assert "application/json" in reply.error["message"]
        assert reply.headers["accept"] == "application/json"
        assert raw.post(CHAT, chat()).reply().status == 200  # the connection is good for more


def test_a_body_without_a_content_type_starts_nothing(deployment: Deployment) -> None:
    """A browser leaves it out for a blob of no type."""
    body = json.dumps(chat()).encode()
    with Raw(deployment.port) as raw:
        raw.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
        reply = raw.reply()
    assert (reply.status, reply.error["code"]) == (415, "unsupported_content_type")


@pytest.mark.parametrize("media", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"])
def test_json_is_json_however_it_is_spelt(deployment: Deployment, media: str) -> None:
    """With parameters, in any case, or as a kind of JSON."""
    with Raw(deployment.port) as raw:
        assert raw.post(CHAT, chat(), f"content-type: {media}\r\n").reply().status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZip, deflate"])
def test_a_compressed_body_is_named(deployment: Deployment, encoding: str) -> None:
    """Not "invalid JSON at byte 0": 415 says which encoding is not read, and which is."""
    body = gzip.compress(json.dumps(chat()).encode())
    with Raw(deployment.port) as raw:
        reply = raw.post(CHAT, body, f"content-encoding: {encoding}\r\n").reply()
        assert (reply.status, reply.error["code"]) == (415, "unsupported_content_encoding")
        assert encoding.lower() in reply.error["message"]
        assert reply.headers["accept-encoding"] == "identity"
        assert raw.post(CHAT, chat(), "content-encoding: identity\r\n").reply().status == 200


def ask(port: int, method: str, headers: dict[str, str], body: Any = None) -> http.client.HTTPResponse:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request(method, CHAT, json.dumps(body) if body else None, headers)
    response = client.getresponse()
    response.read()
    client.close()
    return response


def ask_first(port: int, origin: str) -> http.client.HTTPResponse:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return ask(port, "OPTIONS", {"origin": origin, **wanted})


def test_a_page_of_a_named_origin_may_ask_and_read(open_to_pages: int) -> None:
    """The browser's first question is answered without a key, and every answer says that the page may read it."""
    first = ask_first(open_to_pages, HOME)
    assert first.status == 200
    assert first.headers["access-control-allow-origin"] == HOME
    assert "POST" in first.headers["access-control-allow-methods"]
    assert first.headers["access-control-allow-headers"] == "authorization,content-type"
    sent = {"origin": HOME, "content-type": "application/json"}
    refused = ask(open_to_pages, "POST", sent, chat())
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, HOME)
    answered = ask(open_to_pages, "POST", {**sent, "authorization": "Bearer a-key"}, chat(stream=True))
    assert (answered.status, answered.headers["access-control-allow-origin"]) == (200, HOME)
    assert "x-request-id" in answered.headers["access-control-expose-headers"]
    assert answered.headers["vary"] == "origin"


def test_a_page_of_another_origin_may_not(open_to_pages: int, deployment: Deployment) -> None:
    """Where it is not named, and by default everywhere: no header that a browser would take for a yes."""
    for port, status in ((open_to_pages, 401), (deployment.port, 405)):
        first = ask_first(port, "https://elsewhere.example")
        assert first.status == status
        assert not [name for name in first.headers if name.startswith("access-control-")]


def test_both_families_are_served_on_all_addresses(open_to_pages: int) -> None:
    """`--host ::` is everyone: who comes by IPv4, and who comes by IPv6."""
    with Raw(open_to_pages) as raw:
        assert raw.get("/live").reply().status == 200
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    client = http.client.HTTPConnection("::1", open_to_pages, timeout=20)
    client.request("GET", "/live")
    assert client.getresponse().status == 200
    client.close()


def test_an_empty_key_lets_nobody_in() -> None:
    """Whoever hands it down: it would be the key of everyone who sends none."""
    with pytest.raises(ValueError, match="API key is empty"):
        Gate(frozenset({"good", ""}))

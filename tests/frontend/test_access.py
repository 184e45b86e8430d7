"""What a request must bring, at the edge: a path and a method there are, a key, a JSON body as it is, and for a web
page, the operator's leave. Unknown things are refused by name, probes stay open, odd spellings are understood."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.spec.launch import FrontendLaunch
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from tests.rigs.frontend.raw_http import Raw, chat, one_more_frontend

CHAT = "/v1/chat/completions"
HOME = "https://chat.example.org"


@pytest.fixture(scope="module")
def port(deployment: Deployment) -> int:
    return deployment.port


@pytest.fixture(scope="module")
def guarded(deployment: Deployment) -> Iterator[int]:
    """The port of one more frontend: with keys, on all addresses of both families, and open to one page."""
    port = free_port()
    asked = {"api_keys": ["first-key", "clé", "gold==premium"], "cors_origins": [HOME], "address": f"tcp://[::]:{port}"}
    with one_more_frontend(deployment, "guarded", port, asked):
        yield port


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/modelsx", "/v1/embeddings", "/v1/chat/completions/", "//", "*"]
)
def test_an_unknown_path_is_404_by_any_method(port: int, method: str, path: str) -> None:
    """Its name comes back in the message, with what there is instead."""
    with Raw(port) as raw:
        reply = raw.get(path, "content-length: 0\r\n", method=method).reply()
    assert reply.status == 404
    assert path in reply.error["message"]
    assert "/v1/chat/completions" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("/v1/chat/completions", "GET", "POST"),
        ("/v1/chat/completions", "HEAD", "POST"),
        ("/v1/completions", "DELETE", "POST"),
        ("/v1/models", "POST", "GET, HEAD"),
        ("/v1/models/holdfast-sim", "DELETE", "GET, HEAD"),
        ("/health", "POST", "GET, HEAD"),
        ("/metrics", "PUT", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405_and_says_which_is_right(port: int, path: str, method: str, allow: str) -> None:
    """With the Allow header that HTTP asks for."""
    with Raw(port) as raw:
        reply = raw.get(path, "content-length: 0\r\n", method=method).reply(head_only=method == "HEAD")
        assert reply.status == 405
        assert reply.headers["allow"] == allow
        assert method == "HEAD" or method in reply.error["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/models?limit=1", "/live?", "http://example.org/live", "http://x/v1/models?a=b", "/health?x=/v1/models"],
)
def test_query_strings_and_hosts_are_ignored(port: int, path: str) -> None:
    """What follows the path, and what a proxy puts before it, changes nothing."""
    with Raw(port) as raw:
        assert raw.get(path).reply().status == 200


@pytest.mark.parametrize("name", ["nothing", "", "org%2Fname", "a/b", "%F0%9F%A6%91", "%FF"])
def test_an_unknown_model_is_404_by_name(port: int, name: str) -> None:
    """Also where its name had to be written with percent signs."""
    with Raw(port) as raw:
        reply = raw.get(f"/v1/models/{name}").reply()
    assert reply.status == 404
    assert (reply.error["param"], reply.error["code"]) == ("model", "model_not_found")


def test_a_model_is_found_by_its_escaped_name(port: int) -> None:
    """As clients write it that escape everything."""
    with Raw(port) as raw:
        assert raw.get("/v1/models/holdfast%2Dsim").reply().json()["id"] == "holdfast-sim"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "authorization: Bearer wrong\r\n",
        "authorization: Bearer \r\n",
        "authorization: first-key x\r\n",
        "authorization: Bearer first-ke\r\n",
        "authorization: Bearer \xff\xfe\r\n",
        "authorization: first-key\r\n",
        "authorization: Basic first-key\r\n",
        "authorization: Bearerfirst-key\r\n",
        "authorization: Bearer Bearer first-key\r\n",
        "authorization: Bearer gold==premium\r\n",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere"])
def test_without_a_key_nothing_is_told(guarded: int, path: str, header: str) -> None:
    """401 in OpenAI's shape, the same for paths that exist and that do not."""
    with Raw(guarded) as raw:
        reply = raw.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n{header}\r\n".encode("latin-1")).reply()
    assert reply.status == 401
    assert reply.error["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first-key", "clé", "gold="])
def test_any_of_the_keys_opens(guarded: int, key: str) -> None:
    """Also one that is not ASCII, and one with a tier, by what stands before that."""
    with Raw(guarded) as raw:
        raw.send(f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
        assert raw.reply().status == 200
    if key.isascii():
        with Raw(guarded) as raw:
            assert raw.post("/v1/chat/completions", chat(), f"authorization: Bearer {key}\r\n").reply().status == 200


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer", "bEaReR "])
def test_the_scheme_of_a_key_is_read_in_any_case(guarded: int, scheme: str) -> None:
    """As HTTP has it."""
    with Raw(guarded) as raw:
        assert raw.get("/v1/models", f"authorization: {scheme} first-key\r\n").reply().status == 200


@pytest.mark.parametrize("header", ["gold", "", "premium, standard", "2"])
def test_an_unknown_tier_is_400_and_names_those_there_are(guarded: int, port: int, header: str) -> None:
    """With a key and without; any other word would be served silently as something else."""
    for own, more in ((port, ""), (guarded, "authorization: Bearer gold=\r\n")):
        with Raw(own) as raw:
            reply = raw.post(CHAT, chat(), f"x-priority-tier: {header}\r\n{more}").reply()
            assert (reply.status, reply.error["param"]) == (400, "x-priority-tier")
            assert "premium, standard, best_effort" in reply.error["message"]
            for tier in ("premium", "Standard", "BEST_EFFORT"):
                assert raw.post(CHAT, chat(), f"x-priority-tier: {tier}\r\n{more}").reply().status == 200


@pytest.mark.parametrize("path", ["/health", "/live", "/metrics"])
def test_probes_need_no_key(guarded: int, path: str) -> None:
    """Those who probe and scrape have none."""
    with Raw(guarded) as raw:
        assert raw.get(path).reply().status == 200


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
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request(method, CHAT, json.dumps(body) if body else None, headers)
    response = client.getresponse()
    response.read()
    client.close()
    return response


def ask_first(port: int, origin: str) -> http.client.HTTPResponse:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return ask(port, "OPTIONS", {"origin": origin, **wanted})


def test_a_page_of_a_named_origin_may_ask_and_read(guarded: int) -> None:
    """The browser's first question is answered without a key, and every answer says that the page may read it."""
    first = ask_first(guarded, HOME)
    assert first.status == 200
    assert first.headers["access-control-allow-origin"] == HOME
    assert "POST" in first.headers["access-control-allow-methods"]
    assert first.headers["access-control-allow-headers"] == "authorization,content-type"
    sent = {"origin": HOME, "content-type": "application/json"}
    refused = ask(guarded, "POST", sent, chat())
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, HOME)
    answered = ask(guarded, "POST", {**sent, "authorization": "Bearer first-key"}, chat(stream=True))
    assert (answered.status, answered.headers["access-control-allow-origin"]) == (200, HOME)
    assert "x-request-id" in answered.headers["access-control-expose-headers"]
    assert answered.headers["vary"] == "origin"


def test_a_page_of_another_origin_may_not(guarded: int, deployment: Deployment) -> None:
    """Where it is not named, and by default everywhere: no header that a browser would take for a yes."""
    for port, status in ((guarded, 401), (deployment.port, 405)):
        first = ask_first(port, "https://elsewhere.example")
        assert first.status == status
        assert not [name for name in first.headers if name.startswith("access-control-")]


def test_both_families_are_served_on_all_addresses(guarded: int) -> None:
    """`--host ::` is everyone: who comes by IPv4, and who comes by IPv6."""
    with Raw(guarded) as raw:
        assert raw.get("/live").reply().status == 200
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    client = http.client.HTTPConnection("::1", guarded, timeout=60)
    client.request("GET", "/live")
    assert client.getresponse().status == 200
    client.close()


def test_an_empty_key_lets_nobody_in() -> None:
    """It would be the key of every client that sends none, also with a tier behind it."""
    with pytest.raises(ValueError, match="API key is empty"):
        FrontendLaunch(deployment="d", api_keys=("good", "=premium")).check()

"""Paths, methods and keys: unknown things are refused by name, probes stay open, odd spellings are understood."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_rig import Raw, chat, one_more_frontend

from holdfast.testing.deployment import Deployment
from holdfast.testing.place import free_port


@pytest.fixture(scope="module")
def port(deployment: Deployment) -> int:
    return deployment.port


@pytest.fixture(scope="module")
def guarded(deployment: Deployment) -> Iterator[int]:
    """The port of one more frontend of the same deployment, which asks for keys."""
    with one_more_frontend(deployment, "guarded", free_port(), {"api_keys": ["first-key", "clé"]}) as port:
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


@pytest.mark.parametrize("key", ["first-key", "clé"])
def test_any_of_the_keys_opens(guarded: int, key: str) -> None:
    """Also one that is not ASCII."""
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


@pytest.mark.parametrize("path", ["/health", "/live", "/metrics"])
def test_probes_need_no_key(guarded: int, path: str) -> None:
    """Those who probe and scrape have none."""
    with Raw(guarded) as raw:
        assert raw.get(path).reply().status == 200

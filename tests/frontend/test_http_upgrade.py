"""A client may wish for another protocol: it is answered in the one it speaks, and nothing else it said is lost."""

from __future__ import annotations

import pytest
from http_rig import Raw, chat

from holdfast.testing.deployment import Deployment

CHAT = "/v1/chat/completions"


@pytest.fixture
def port(deployment: Deployment) -> int:
    return deployment.port


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

"""Who may ask a frontend over HTTP: its keys and the web pages it answers, checked before anything starts."""

from __future__ import annotations

from urllib.parse import urlsplit

from holdfast.core.errors import Refused


def check_keys(keys: list[str] | None) -> list[str] | None:
    """A key that is empty is a variable that was not set: it must not open the server."""
    for key in keys or ():
        if not key.strip():
            raise Refused("--api-key is empty; is a variable unset? Leave the option out to let everyone ask")
        if key != key.strip() or not key.isprintable():
            raise Refused("--api-key has spaces at its ends or control characters, which no client can send")
    return keys


def check_origins(origins: list[str] | None) -> list[str] | None:
    """Origins as a browser names them."""
    for origin in origins or ():
        parts = urlsplit(origin)
        if origin != "*" and not (parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
            raise Refused(f"--cors-origin {origin!r} is no origin; e.g. https://chat.example.org, or '*' for any")
    return origins

"""What an HTTP request must bring: a key where there are keys, a JSON body as it is, and for a web page, leave to read;
and what it is called, in its answer's `x-request-id` and in the log where it failed.

Always true: nothing is told to who has no key, not even which paths there are; a page of another origin can start
nothing, because a browser asks before it sends JSON, and hears no unless the operator named that origin. A name is
short and of harmless characters, whoever chose it, so it can neither forge a log line nor a header; a client that sent
none, or one that will not do, gets one of ours.
"""

from __future__ import annotations

import hmac
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.core.tiers import Tier, UnknownTier, tier_of
from holdfast.frontend.api.errors import INVALID_REQUEST, ApiError, invalid
from holdfast.streams.kills import NAME
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.response import Headers

# How long a browser may remember what it was allowed: a day, the longest that one of them takes.
_REMEMBER_S = b"86400"
_READABLE = b"retry-after, x-request-id, x-holdfast-reason"

_NAME_HEADER = b"x-request-id"
TIER_HEADER = b"x-priority-tier"


class Caller(NamedTuple):
    """Who asks: the key, and the highest tier that it may ask for; None: any."""

    key: str
    tier: Tier | None


ANYONE = Caller("", None)  # where there are no keys


class RequestNames:
    """Names requests, and their answers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def of(self, headers: Mapping[bytes, bytes]) -> str:
        """The client's own name for it, or a new one."""
        given = headers.get(_NAME_HEADER, b"").decode("latin-1")
        if NAME.fullmatch(given):
            return given
        return f"req-{self._rng.getrandbits(96):024x}"

    def of_answer(self, endpoint: str) -> str:
        """The id that an answer has, known before there is one."""
        return f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{self._rng.getrandbits(96):024x}"


class GateError(ApiError):
    """A refusal with headers of its own."""

    def __init__(
        self, status: int, message: str, headers: Headers, kind: str = INVALID_REQUEST, code: str | None = None
    ) -> None:
        super().__init__(status, message, kind, code=code)
        self._own = headers

    @property
    def headers(self) -> Headers:
        return (*self._own, *super().headers)


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may ask, and how."""

    api_keys: Mapping[str, Tier | None] = field(default_factory=dict)  # none: everyone; as `key_tiers` has them
    cors_origins: frozenset[str] = frozenset()  # of pages that may ask from a browser; "*": any

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("an API key is empty: that would let everyone in who sends none")

    def check_key(self, request: HttpRequest) -> Caller:
        """`Authorization: Bearer KEY`, the scheme in any case (RFC 9110, 11.1)."""
        if not self.api_keys:
            return ANYONE
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        known = [key for key in self.api_keys if hmac.compare_digest(given, key.encode())]
        if scheme.lower() != b"bearer" or not known:
            message = "missing or wrong API key; send 'Authorization: Bearer KEY'"
            wants = ((b"www-authenticate", b"Bearer"),)
            raise GateError(401, message, wants, "authentication_error", "invalid_api_key")
        return Caller(known[0], self.api_keys[known[0]])

    def tier_of(self, request: HttpRequest, caller: Caller) -> Tier:
        """The tier of a request of this one."""
        asked = request.headers.get(TIER_HEADER)
        try:
            return tier_of(None if asked is None else asked.decode("latin-1"), caller.tier)
        except UnknownTier as error:
            raise invalid(TIER_HEADER.decode(), str(error)) from None

    def check_method(self, request: HttpRequest, *allowed: str) -> None:
        if request.method not in allowed:
            message = f"method {request.method} is not allowed for {request.path[:200]!r}; use {' or '.join(allowed)}"
            raise GateError(405, message, ((b"allow", ", ".join(allowed).encode()),))

    def check_body(self, request: HttpRequest) -> None:
        """JSON, and not compressed. A form or plain text may come from any page in a browser, unasked."""
        encoding = request.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            shown = encoding[:40].decode("latin-1")
            message = f"content-encoding {shown!r} is not read here; send the body uncompressed"
            raise GateError(415, message, ((b"accept-encoding", b"identity"),), code="unsupported_content_encoding")
        media = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media != b"application/json" and not (media.startswith(b"application/") and media.endswith(b"+json")):
            shown = repr(media[:80].decode("latin-1")) if media else "none"
            message = f"content-type must be application/json; got {shown}"
            raise GateError(415, message, ((b"accept", b"application/json"),), code="unsupported_content_type")

    # -- web pages

    def headers_for(self, request: HttpRequest) -> Headers:
        """What tells a browser that its page may read the answer."""
        origin = request.headers.get(b"origin")
        if origin is None or not self.cors_origins:
            return ()
        vary = ((b"vary", b"origin"),)
        if not self._allows(origin):
            return vary
        return (*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _READABLE))

    def may_ask_first(self, request: HttpRequest) -> Headers | None:
        """The answer to a browser that asks whether its page may send a request; None: it is no such question."""
        wanted = request.headers.get(b"access-control-request-method")
        if request.method != "OPTIONS" or wanted is None or not self._allows(request.headers.get(b"origin", b"")):
            return None
        headers = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
        return (
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", headers),
            (b"access-control-max-age", _REMEMBER_S),
        )

    def _allows(self, origin: bytes) -> bool:
        return "*" in self.cors_origins or origin.decode("latin-1") in self.cors_origins

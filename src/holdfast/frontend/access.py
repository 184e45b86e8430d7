"""Access to the API: keys, tiers, methods, kinds of body, web pages of other origins (CORS); and the names of requests.

Always true:
- A client without a key learns nothing, not even which paths exist.
- A web page of another origin can start nothing: a browser asks before it sends JSON, and is refused unless the
  operator named that origin.
- A request's name (`x-request-id`) is short and has only harmless characters, so it cannot forge a log line or a
  header. A client that sent no valid name gets a generated one.
"""

from __future__ import annotations

import hmac
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.core.tiers import Tier, UnknownTier, tier_of
from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.streams.kills import NAME
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.response import Headers

# How long a browser may cache the permission: a day, the longest that any browser accepts.
_REMEMBER_S = b"86400"
_READABLE = b"retry-after, x-request-id, x-holdfast-reason, x-holdfast-queued-ms"

_NAME_HEADER = b"x-request-id"
TIER_HEADER = b"x-priority-tier"


class Caller(NamedTuple):
    """A client: its key, and the highest tier that it may ask for (None: any)."""

    key: str
    tier: Tier | None


ANYONE = Caller("", None)  # used if no keys are configured


class RequestNames:
    """Names requests, and their answers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the client's own name for its request, or a new one."""
        given = headers.get(_NAME_HEADER, b"").decode("latin-1")
        if NAME.fullmatch(given):
            return given
        return f"req-{self._rng.getrandbits(96):024x}"

    def of_answer(self, endpoint: str) -> str:
        """Return a new id for an answer; it is fixed before the answer exists."""
        return f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{self._rng.getrandbits(96):024x}"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Decides which requests are let in. No key is empty (`FrontendLaunch.check`)."""

    api_keys: Mapping[str, Tier | None] = field(default_factory=dict)  # from `key_tiers`; empty: no key is needed
    cors_origins: frozenset[str] = frozenset()  # of pages that may ask from a browser; "*": any

    def check_key(self, request: HttpRequest) -> Caller:
        """Check `Authorization: Bearer KEY`, the scheme in any case (RFC 9110, 11.1)."""
        if not self.api_keys:
            return ANYONE
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        known = [key for key in self.api_keys if hmac.compare_digest(given, key.encode())]
        if scheme.lower() != b"bearer" or not known:
            message = "missing or wrong API key; send 'Authorization: Bearer KEY'"
            wants = ((b"www-authenticate", b"Bearer"),)
            raise ApiError(401, message, "authentication_error", code="invalid_api_key", headers=wants)
        return Caller(known[0], self.api_keys[known[0]])

    def tier_of(self, request: HttpRequest, caller: Caller) -> Tier:
        """Return the tier of this client's request."""
        asked = request.headers.get(TIER_HEADER)
        try:
            return tier_of(None if asked is None else asked.decode("latin-1"), caller.tier)
        except UnknownTier as error:
            raise invalid(TIER_HEADER.decode(), str(error)) from None

    def check_method(self, request: HttpRequest, *allowed: str) -> None:
        if request.method not in allowed:
            message = f"method {request.method} is not allowed for {request.path[:200]!r}; use {' or '.join(allowed)}"
            raise ApiError(405, message, headers=((b"allow", ", ".join(allowed).encode()),))

    def check_body(self, request: HttpRequest) -> None:
        """Require uncompressed JSON. Browsers let any page send a form or plain text without asking first."""
        encoding = request.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            shown = encoding[:40].decode("latin-1")
            message = f"content-encoding {shown!r} is not read here; send the body uncompressed"
            uncompressed = ((b"accept-encoding", b"identity"),)
            raise ApiError(415, message, code="unsupported_content_encoding", headers=uncompressed)
        media = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media != b"application/json" and not (media.startswith(b"application/") and media.endswith(b"+json")):
            shown = repr(media[:80].decode("latin-1")) if media else "none"
            message = f"content-type must be application/json; got {shown}"
            raise ApiError(415, message, code="unsupported_content_type", headers=((b"accept", b"application/json"),))

    # -- web pages

    def headers_for(self, request: HttpRequest) -> Headers:
        """Return the headers that tell a browser that its page may read the answer."""
        origin = request.headers.get(b"origin")
        if origin is None or not self.cors_origins:
            return ()
        vary = ((b"vary", b"origin"),)
        if not self._allows(origin):
            return vary
        return (*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _READABLE))

    def may_ask_first(self, request: HttpRequest) -> Headers | None:
        """Return the headers that answer an allowed CORS preflight request; None if it is none."""
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

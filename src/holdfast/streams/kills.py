"""Ends requests at any frontend through the store: every frontend that has a named request ends it.

The asking process writes a record, `v1/kills/TOKEN`. Every frontend writes what it ended to `v1/kills/TOKEN/PEER`. The
frontends' reports in the store say which frontends exist. The asking process removes the record and its answers when
all have answered or the time is over. If that process died, the next frontend that reads the record removes it.

Always true:
- A frontend that did not answer is named in the outcome; its silence does not mean that it has no such request.
- A record says which requests it may end: those of one API key, by its digest (without keys: those that came without
  one), or all, which needs write access to the store.
- The API key itself is never written to the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Mapping

import msgspec

from holdfast.core.tasks import beside
from holdfast.discovery.keys import KILLS, REPORTS
from holdfast.health.records import ReportRecord
from holdfast.store.contract import Store
from holdfast.store.mirror import Mirror

ANSWER_S = 3.0  # frontends see the record within milliseconds
STORE_S = 2.0  # timeout of one call
STALE_S = 60.0  # far longer than any process waits, and than clocks differ
# A client's name for its request. Room for two UUIDs or a W3C trace parent; a longer name is a mistake.
NAME = re.compile(r"[A-Za-z0-9._:/+=@,~-]{1,128}")
OPERATOR, KEY = "operator", "key"
ANY_FRONTEND = "any frontend"  # named as silent if the store has no frontend's report


class KillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The record that names the requests to end."""

    name: str  # an answer's id, or a name that clients chose: then all requests with that name
    deployment: str = ""  # only frontends of this deployment; "": of any
    by: str = OPERATOR  # OPERATOR, or KEY: a client, through a frontend
    whose: str = ""  # digest of the requests' API key; ignored for the operator
    at_unix_s: float = 0.0

    def may_end(self, api_key: str) -> bool:
        """Return whether it may end requests that came with this key."""
        return self.by == OPERATOR or self.whose == digest(api_key)


class KillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one frontend ended."""

    ended: list[str] = []  # ids
    over: str = ""  # the state of the latest matching request that was over already


class KillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What all frontends ended."""

    ended: list[str] = []
    over: str = ""
    silent: list[str] = []  # frontends that did not answer, by their processes' names


_kill = msgspec.json.Decoder(KillRequest).decode
_answer = msgspec.json.Decoder(KillAnswer).decode
_report = msgspec.json.Decoder(ReportRecord).decode


def digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest() if api_key else ""


def read(value: bytes) -> KillRequest | None:
    """Decode a record; return None if it cannot be read."""
    try:
        return _kill(value)
    except (ValueError, RecursionError):
        return None


async def ask(store: Store, kill: KillRequest, token: str) -> KillOutcome:
    """Ask all frontends to end requests, and return what they ended. `token` must be new. Raise StoreUnavailable if the
    store cannot be reached."""
    key = KILLS + token
    reports = REPORTS + (f"{kill.deployment}/" if kill.deployment else "")
    mirror = Mirror(store, (reports, f"{key}/"))
    await store.put(key, msgspec.json.encode(kill), STORE_S)
    async with beside(mirror.run(), "what frontends say"):
        try:
            return await _heard(mirror, kill, reports, f"{key}/")
        finally:
            await store.delete(key, STORE_S)


async def _heard(mirror: Mirror, kill: KillRequest, reports: str, answers: str) -> KillOutcome:
    """Return the outcome when all frontends have answered, the named id was ended, or the time is over."""
    known: dict[str, str] = {}  # also frontends whose report expired meanwhile: a stopped one soon loses its lease
    found = KillOutcome(silent=[ANY_FRONTEND])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            await mirror.whole.wait()
            while found.silent and kill.name not in found.ended:  # an id belongs to one request
                mirror.news.clear()
                known |= _frontends(mirror.values, reports)
                found = outcome(known, {key: value for key, value in mirror.values.items() if key.startswith(answers)})
                if found.silent and kill.name not in found.ended:
                    await mirror.news.wait()
    return found


def outcome(frontends: Mapping[str, str], answers: Mapping[str, bytes]) -> KillOutcome:
    """Return what the frontends (process names by peer name) have answered so far. Pure."""
    heard = {key.rpartition("/")[2]: _read_answer(value) for key, value in answers.items()}
    silent = sorted({name for peer, name in frontends.items() if peer not in heard})
    return KillOutcome(
        ended=[id for one in heard.values() for id in one.ended],
        over=next((one.over for one in heard.values() if one.over), ""),
        silent=silent if heard or silent else [ANY_FRONTEND],
    )


def _read_answer(value: bytes) -> KillAnswer:
    try:
        return _answer(value)
    except (ValueError, RecursionError):
        return KillAnswer()


def _frontends(values: Mapping[str, bytes], reports: str) -> dict[str, str]:
    """Return the frontends' process names by peer name."""
    found = {}
    for key, value in values.items():
        if key.startswith(reports):
            peer = key.rpartition("/")[2]
            with contextlib.suppress(ValueError, RecursionError):
                found[peer] = _report(value).process or peer
            found.setdefault(peer, peer)
    return found

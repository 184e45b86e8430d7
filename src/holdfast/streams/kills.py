"""Requests that are to end by somebody's word, asked for through the store: whichever frontends have them end them.

Who asks writes a record, `v1/kills/TOKEN`; every frontend answers it beside that record, `v1/kills/TOKEN/PEER`, with
what it ended. Which frontends there are, their reports say. Who asked removes the record when all have answered or the
time is over, and answers go with it; a record whose writer died is removed by the next frontend that reads it.

Always true: a frontend that did not answer is named, and nobody says for it that it has no such request; a record says
whose requests it may end, by their key's digest (without keys: of those that came without one), or anybody's, which
only who can write the store says; an API key itself never stands there.
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
from holdfast.health.records import Report
from holdfast.store.contract import Store
from holdfast.store.mirror import Mirror

ANSWER_S = 3.0  # frontends hear of it within milliseconds
STORE_S = 2.0  # of one call
STALE_S = 60.0  # far longer than anybody waits, and than clocks differ
# What a request is called by its client. Room for two UUIDs or a W3C trace parent; a longer one is somebody's mistake.
NAME = re.compile(r"[A-Za-z0-9._:/+=@,~-]{1,128}")
OPERATOR, KEY = "operator", "key"
NOBODY = "any frontend"  # did not answer: the store knows of none


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are to end."""

    name: str  # an answer's id, or what clients called theirs: then all of that name
    deployment: str = ""  # of the frontend that has it; "": of any
    by: str = OPERATOR  # who says so: KEY, through a frontend, or the operator
    whose: str = ""  # their key's digest; of the operator's word: anybody's
    at_unix_s: float = 0.0

    def may_end(self, api_key: str) -> bool:
        """Whether it speaks of requests that came with this key."""
        return self.by == OPERATOR or self.whose == digest(api_key)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one frontend did about it."""

    ended: list[str] = []  # ids
    over: str = ""  # it had one that was over already: the state of the latest


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them did."""

    ended: list[str] = []
    over: str = ""
    silent: list[str] = []  # frontends that did not answer, by their processes' names


_kill = msgspec.json.Decoder(Kill).decode
_answer = msgspec.json.Decoder(Answer).decode
_report = msgspec.json.Decoder(Report).decode


def digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest() if api_key else ""


def read(value: bytes) -> Kill | None:
    """None: it cannot be read."""
    try:
        return _kill(value)
    except (ValueError, RecursionError):
        return None


def is_answer(key: str) -> bool:
    """Whether it is one, and no question."""
    return "/" in key.removeprefix(KILLS)


def answer_key(key: str, peer: str) -> str:
    return f"{key}/{peer}"


async def ask(store: Store, kill: Kill, token: str) -> Outcome:
    """What frontends did. `token`: used once. StoreUnavailable, if the store is."""
    key = KILLS + token
    reports = REPORTS + (f"{kill.deployment}/" if kill.deployment else "")
    mirror = Mirror(store, (reports, f"{key}/"))
    await store.put(key, msgspec.json.encode(kill), STORE_S)
    async with beside(mirror.run(), "what frontends say"):
        try:
            return await _heard(mirror, kill, reports, f"{key}/")
        finally:
            await store.delete(key, STORE_S)


async def _heard(mirror: Mirror, kill: Kill, reports: str, answers: str) -> Outcome:
    """Once all has been heard that there is to hear, or when the time is over."""
    known: dict[str, str] = {}  # also who is lost meanwhile: one that is stopped keeps its lease for a moment only
    found = Outcome(silent=[NOBODY])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            await mirror.whole.wait()
            while found.silent and kill.name not in found.ended:  # an id is one request's
                mirror.news.clear()
                known |= _frontends(mirror.values, reports)
                found = outcome(known, {key: value for key, value in mirror.values.items() if key.startswith(answers)})
                if found.silent and kill.name not in found.ended:
                    await mirror.news.wait()
    return found


def outcome(frontends: Mapping[str, str], answers: Mapping[str, bytes]) -> Outcome:
    """What frontends, known by their peer names, have answered. Pure."""
    heard = {key.rpartition("/")[2]: _read_answer(value) for key, value in answers.items()}
    silent = sorted({name for peer, name in frontends.items() if peer not in heard})
    return Outcome(
        ended=[id for one in heard.values() for id in one.ended],
        over=next((one.over for one in heard.values() if one.over), ""),
        silent=silent if heard or silent else [NOBODY],
    )


def _read_answer(value: bytes) -> Answer:
    try:
        return _answer(value)
    except (ValueError, RecursionError):
        return Answer()


def _frontends(values: Mapping[str, bytes], reports: str) -> dict[str, str]:
    """By peer name: what its process is called."""
    found = {}
    for key, value in values.items():
        if key.startswith(reports):
            peer = key.rpartition("/")[2]
            with contextlib.suppress(ValueError, RecursionError):
                found[peer] = _report(value).process or peer
            found.setdefault(peer, peer)
    return found

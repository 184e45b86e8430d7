"""Clients that ask again and again while a deployment is changed, and what became of each of their answers.

Each client has one request, always the same. It is answered alike by every worker of one set; so every answer is
compared with those that the deployment gave before anything changed and after everything had.

Always true: an answer that is another than those is wrong, unless it says itself that it is not exact; one that did not
come to its end is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.core.tasks import Tasks
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import Received, StreamClient, open_client, read_answer
from holdfast.testing.workload import Workload

END_S = 120.0  # for answers under way when the clients are told to stop
AFTER_FAILURE_S = 0.1
LONG = 8  # every so manieth client asks for a long answer


@dataclass(slots=True)
class Asked:
    """One request, from beginning to end."""

    client: int
    began_s: float
    ended_s: float
    answer: Answer


@dataclass(frozen=True, slots=True)
class Found:
    """Counts what the clients saw."""

    answers: int
    lost: list[str]
    wrong: list[str]
    inexact: int
    resumed: int
    cut: int  # whose frontend was killed under them
    pause_s: float = 0.0  # the longest between two tokens of an answer
    wait_s: float = 0.0  # the longest for a first one
    silence_s: float = 0.0  # the longest in which no client had one

    def as_dict(self) -> dict[str, object]:
        shown: dict[str, object] = {"answers": self.answers, "lost": len(self.lost), "wrong": len(self.wrong)}
        shown |= {"inexact": self.inexact, "resumed": self.resumed, "cut": self.cut}
        shown |= {name: round(getattr(self, name), 3) for name in ("pause_s", "wait_s", "silence_s")}
        told = sorted({*self.lost, *self.wrong})[:5]
        return shown | ({"what": told} if told else {})


class Clients:
    """Half of them keep their connection, the others open one for each request."""

    def __init__(self, port: int, load: Workload, long_tokens: int) -> None:
        self.model = load.model  # asked for from now on
        self._port = port
        self._load = load
        self._long = {"max_tokens": long_tokens}
        self.asked: list[Asked] = []
        self.again = 0  # requests that found their connection closed at that moment
        self._kept: dict[int, StreamClient] = {}
        self._tasks = Tasks("clients")
        self._over = False

    async def once(self) -> list[Answer]:
        """Each asks once, on a connection of its own."""
        done = await asyncio.gather(*(self._ask(number, keeps=False) for number in range(self._load.streams)))
        return [one.answer for one in done]

    @contextlib.asynccontextmanager
    async def all_the_time(self) -> AsyncIterator[None]:
        """While the body runs; then answers under way come to their ends."""
        self._over = False
        running = [self._tasks.spawn(self._keep_asking(number), f"{number}") for number in range(self._load.streams)]
        try:
            yield
            self._over = True
            await asyncio.wait_for(asyncio.gather(*running), END_S)
        finally:
            await self._tasks.stop()
            for client in self._kept.values():
                client.close()
            self._kept.clear()

    async def _keep_asking(self, number: int) -> None:
        while not self._over:
            one = await self._ask(number, keeps=number % 2 == 0)
            self.asked.append(one)
            if one.answer.wrong:
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _ask(self, number: int, *, keeps: bool) -> Asked:
        path, body = self._load.body(number)
        body |= {"model": self.model} | (self._long if number % LONG == 0 else {})
        began_s = time.monotonic()
        try:
            received = await self._send(number, path, json.dumps(body).encode(), keeps=keeps)
        except OSError as error:
            return Asked(number, began_s, time.monotonic(), Answer(error={"message": f"no connection: {error}"}))
        return Asked(number, began_s, time.monotonic(), read_answer(received))

    async def _send(self, number: int, path: str, body: bytes, *, keeps: bool) -> Received:
        """On the client's own connection, while that is open. One that its server closed just now, without a byte of an
        answer, was too old, and another is tried, as clients do."""
        kept = self._kept.pop(number, None)
        if kept is not None and kept.is_open:
            received = await kept.request(path, body)
            if received.pieces or not received.error:
                self._put_back(number, kept, received)
                return received
            self.again += 1
        client = await open_client(self._port)
        received = await client.request(path, body)
        if keeps:
            self._put_back(number, client, received)
        else:
            client.close()
        return received

    def _put_back(self, number: int, client: StreamClient, received: Received) -> None:
        if received.error or "connection: close" in received.head().lower():
            client.close()
        else:
            self._kept[number] = client


def alike(expected: Answer, answer: Answer) -> str:
    """How an answer differs from another but for its tokens, which arithmetic by batches does not make twice. One that
    went on elsewhere says so."""
    said, right = ((len(one.tokens), one.finish, one.exact or one.resumed > 0) for one in (answer, expected))
    return answer.wrong or ("" if said == right else f"{said} instead of {right}")


def judge(
    asked: Sequence[Asked],
    known: Sequence[Sequence[Answer]],
    cuts: Sequence[tuple[float, float]],
    differs: Callable[[Answer, Answer], str] = difference,
) -> Found:
    """`known`: the right answers of each set, by client; `cuts`: when frontends were killed, and back."""
    lost, wrong, inexact, cut = [], [], 0, 0
    for one in asked:
        whys = [differs(right[one.client], one.answer) for right in known]
        if "" in whys:
            continue
        if one.answer.wrong:
            if any(one.began_s <= until_s and one.ended_s >= from_s for from_s, until_s in cuts):
                cut += 1
            else:
                lost.append(one.answer.wrong[:200])
        elif one.answer.exact is False:
            inexact += 1
        else:
            wrong.append("; ".join(sorted(set(whys)))[:200])
    resumed = sum(one.answer.resumed > 0 for one in asked)
    return Found(len(asked), lost, wrong, inexact, resumed, cut, *_waits_s(asked))


def _waits_s(asked: Sequence[Asked]) -> tuple[float, float, float]:
    """Return the longest pause in an answer, before one, and of all together."""
    began = [(one.began_s, one.answer.token_times_s) for one in asked if one.answer.token_times_s]
    pauses_s = [gap_s for one in asked for gap_s in one.answer.gaps_s]
    all_s = sorted(at_s for _, times_s in began for at_s in times_s)
    silent_s = (later - earlier for earlier, later in pairwise(all_s))
    return max(pauses_s, default=0.0), max((t[0] - s for s, t in began), default=0.0), max(silent_s, default=0.0)

"""Long streams and short probes against one deployment, and what became of them.

The sim engine's answers are a function of prompt and seed, so what is right is known without an unbroken run.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.requests import Sampling
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import load
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Stream
from holdfast.testing.waiting import wait_until

STREAMS = 8
TPOT_MS = 20
TOKENS = 1000  # 20 s: an alarm, what follows from it and the way back happen inside of it
PROBE_TOKENS = 4
PROBE_EVERY_S = 0.5
PROBE_S = 45.0  # a probe that is held goes on within the hold of 30 s
# What a stream takes, what it may be held for, and one more load on a machine that is busy.
ENDS_S = TOKENS * TPOT_MS / 1000 + 30.0 + 100.0
PATH = "/v1/completions"


def prompt(number: int) -> list[int]:
    """More than two blocks of 16, and each number's differs from the first token on."""
    return [100 + number, *range(40, 80)]


def expected(number: int, tokens: int) -> list[int]:
    """The tokens that a sound engine answers."""
    sequence = Sequence(load(), prompt(number), len(prompt(number)), Sampling(tokens, number, 0.8, ignore_eos=True))
    return [sequence.advance() for _ in range(tokens)]


def body(model: str, number: int, tokens: int) -> dict[str, object]:
    asked = {"model": model, "prompt": prompt(number), "max_tokens": tokens, "seed": number, "temperature": 0.8}
    return asked | {"ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Ended:
    """One long stream, judged: `lost` says why it is no whole answer, `code` is the error's name."""

    lost: str = ""
    code: str = ""
    wrong: bool = False
    flagged: bool = False
    gap_s: float = 0.0  # the longest between two tokens
    failed_s: float = 0.0  # after its last token, until its client was told


@dataclass(frozen=True, slots=True)
class Probe:
    began_s: float
    ended_s: float
    failed: str = ""


@dataclass(slots=True)
class Probes:
    """A client that asks for a few tokens, again and again, in a thread of its own."""

    port: int
    model: str
    seen: list[Probe] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._ask_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(PROBE_S + 5.0)

    def _ask_on(self) -> None:
        number = 1000
        while not self._over.is_set():
            number += 1
            began_s = time.monotonic()
            try:
                failed = self._one(number)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                failed = f"{type(error).__name__}: {error}"
            self.seen.append(Probe(began_s, time.monotonic(), failed[:300]))
            self._over.wait(PROBE_EVERY_S)

    def _one(self, number: int) -> str:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PROBE_S)) as connection:
            headers = {"content-type": "application/json", "x-priority-tier": "premium"}
            connection.request("POST", PATH, json.dumps(body(self.model, number, PROBE_TOKENS)), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            return "" if response.status == 200 else f"{response.status} {answer['error']['code']}"


def longest_away_s(probes: list[Probe], since_s: float, until_s: float) -> float:
    """The longest time without a good answer, from `since_s` on: between the ends of two good ones, or to the end."""
    good = [probe.ended_s for probe in probes if not probe.failed and since_s <= probe.ended_s <= until_s]
    ends = [since_s, *good, until_s]
    return max((later - earlier for earlier, later in itertools.pairwise(ends)), default=0.0)


def begin(port: int, model: str, tokens: int) -> list[Stream]:
    """The long streams, each with some tokens."""
    asked = (body(model, number, tokens) | {"stream": True} for number in range(STREAMS))
    streams = [Stream(port, one, PATH, x_priority_tier="premium") for one in asked]
    for stream in streams:
        stream.wait_tokens(3)
    return streams


def end(streams: list[Stream], tokens: int) -> list[Ended]:
    """Wait for the ends of all streams, with a bound, and judge each."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: all(stream.is_over for stream in streams), "the streams' ends", ENDS_S, every_s=0.2)
    now_s = time.perf_counter()
    return [_judged(stream, number, tokens, now_s) for number, stream in enumerate(streams)]


def _judged(stream: Stream, number: int, tokens: int, now_s: float) -> Ended:
    answer: Answer = stream.answer(0.0) if stream.is_over else stream.so_far()
    lost = answer.wrong if stream.is_over else f"it did not end within {ENDS_S:g} s"
    last_s = answer.token_times_s[-1] if answer.token_times_s else now_s
    told_s = stream.events[-1][0] if stream.is_over and stream.events else now_s
    right = expected(number, tokens)
    return Ended(
        lost=lost[:300],
        code=str((answer.error or {}).get("code") or ""),
        wrong=answer.tokens != right[: len(answer.tokens)] or (not lost and len(answer.tokens) != tokens),
        flagged=answer.exact is False,
        gap_s=max(answer.gaps_s, default=0.0),
        failed_s=max(0.0, told_s - last_s) if lost else 0.0,
    )

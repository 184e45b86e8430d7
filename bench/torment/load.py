"""Clients of a deployment under torment: what they ask, how they read it, and when an answer is right.

They are threads with the standard library's own HTTP client and kept-alive connections, so what they read is what a
user's client reads: framing that ends early, or bytes left over from the last answer, show as errors here. Every
request is one of a few dozen scripts whose unbroken answer is known; an answer is right only if it equals that one in
text, tokens and reason of its end, choice by choice.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.testing.answers import Answer, difference, events_of, read_events, read_whole

# An answer takes seconds; held streams go on within the frontends' hold of 30 s. What takes longer than this hangs.
ANSWER_S = 90.0
FIRST_ID, IDS = 1000, 4000  # plain words in the tiny model's vocabulary
LONG_TOKENS = 600
CANCEL_SHARE = 0.15
AFTER_FAILURE_S = 0.2  # what refuses need not be asked a thousand times a second
LEARNERS = 4  # clients that ask for unbroken answers at once
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.9, "logprobs": True},
)


@dataclass(slots=True)
class Script:
    """One request that is asked again and again, and its unbroken answer."""

    path: str
    body: dict[str, Any]
    expected: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer, judged. `wrong` is empty if it was right."""

    script: int
    began_s: float
    ended_s: float
    kind: str  # streamed, whole, cancelled
    wrong: str = ""


@dataclass(slots=True)
class Clients:
    """Threads that ask until told to stop. `seen` is only ever appended to."""

    port: int
    scripts: list[Script]
    count: int
    seed: int
    seen: list[Seen] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.count):
            rng = random.Random(self.seed * 1000 + number)
            thread = threading.Thread(target=self._ask_on, args=(rng,), name=f"client-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> list[str]:
        """Ask no more, wait for what is under way; the names of clients that hang."""
        self._over.set()
        until_s = time.monotonic() + ANSWER_S + 10.0
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def wrong(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.wrong]

    def _ask_on(self, rng: random.Random) -> None:
        with contextlib.closing(_connect(self.port)) as connection:
            while not self._over.is_set():
                number = rng.randrange(len(self.scripts))
                seen = one(connection, number, self.scripts[number], rng)
                self.seen.append(seen)
                if seen.wrong or seen.kind == "cancelled":
                    connection.close()  # the next request opens it again
                if seen.wrong:
                    self._over.wait(AFTER_FAILURE_S)


def _connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)


def one(connection: http.client.HTTPConnection, number: int, script: Script, rng: random.Random) -> Seen:
    """Ask a script once, streamed or whole or left in the middle, and judge the answer."""
    began_s = time.monotonic()
    cancel_after = rng.randrange(1, 40) if rng.random() < CANCEL_SHARE else 0
    kind = "cancelled" if cancel_after else "streamed" if rng.random() < 0.75 else "whole"
    try:
        said = ask(connection, script, stream=kind != "whole", cancel_after=cancel_after)
        wrong = judged(script.expected, said, part=kind == "cancelled")
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        wrong = f"{type(error).__name__}: {error}"[:500]
    return Seen(number, began_s, time.monotonic(), kind, wrong)


def ask(
    connection: http.client.HTTPConnection, script: Script, *, stream: bool, cancel_after: int = 0
) -> list[Answer]:
    """One request on a kept connection; a refusal is a `ValueError` with its words."""
    body = script.body | {"stream": stream}
    connection.request("POST", script.path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read(400)!r}")
    if not stream:
        return read_whole(json.loads(response.read()))
    events = list(itertools.islice(events_of(response), cancel_after or None))
    return [read_events(events, index) for index in range(script.body.get("n", 1))]


def judged(expected: list[Answer], said: list[Answer], *, part: bool = False) -> str:
    """How the choices differ from the unbroken ones; "" if they do not."""
    if len(expected) != len(said):
        return f"{len(said)} choices instead of {len(expected)}"
    differences = [difference(right, got, part=part) for right, got in zip(expected, said, strict=True)]
    return "; ".join(f"choice {index}: {wrong}" for index, wrong in enumerate(differences) if wrong)


def scripts(seed: int, model: str, count: int, long_answer: int = 0) -> list[Script]:
    """Mixed sampling, chat and raw, short prompts and long ones, one answer or three; still without their answers. With
    `long_answer` every tenth has an answer of so many tokens, which is under way while several faults happen."""
    rng = random.Random(seed)
    made = [_script(rng, seed, model, number) for number in range(count)]
    for script in made[1::10] if long_answer else ():
        script.body |= {"max_tokens": long_answer, "n": 1}
    return made


def _script(rng: random.Random, seed: int, model: str, number: int) -> Script:
    body: dict[str, Any] = {
        "model": model,
        "seed": seed * 1000 + number,
        "max_tokens": rng.randrange(20, 140),
        "ignore_eos": True,
        "return_token_ids": True,
        "n": rng.choice((1, 1, 1, 2, 3)),
        **SAMPLING[number % len(SAMPLING)],
    }
    ids = [FIRST_ID + rng.randrange(IDS) for _ in range(LONG_TOKENS if rng.random() < 0.25 else rng.randrange(3, 60))]
    if number % 2:
        if body.get("logprobs"):
            body["logprobs"] = 2
        return Script("/v1/completions", body | {"prompt": ids})
    words = " ".join(f"word{number} {one_id}" for one_id in ids[: len(ids) // 4 + 1])
    return Script("/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]})


def learn(port: int, asked: list[Script], seed: int, tell: Callable[[str], None]) -> None:
    """Ask each script unbroken, whole and streamed; both must agree. Every third then gets a stop string out of the
    middle of its own answer, and is asked again."""
    with ThreadPoolExecutor(LEARNERS) as learners:
        for number in learners.map(partial(_learn, port, seed), range(len(asked)), asked):
            tell(f"unbroken answer {number + 1} of {len(asked)}")


def _learn(port: int, seed: int, number: int, script: Script) -> int:
    """Learn one script's answer; return its number."""
    rng = random.Random(seed * 1000 + number)
    with contextlib.closing(_connect(port)) as connection:
        script.expected = ask(connection, script, stream=False)
        if number % 3 == 0 and len(text := script.expected[0].text) > 20:
            at = rng.randrange(len(text) // 2, len(text) - 4)
            script.body["stop"] = [text[at : at + rng.randrange(1, 5)], "\u0001never"]
            script.expected = ask(connection, script, stream=False)
        streamed = ask(connection, script, stream=True)
    if wrong := judged(script.expected, streamed):
        raise AssertionError(f"script {number} unbroken, streamed and whole differ: {wrong}: {script.body}")
    return number

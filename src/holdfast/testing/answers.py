"""Reads streamed answers from the events that a client got, and compares them with the same request's uninterrupted
one.

Always true: an answer is wrong, whatever its text, if it does not end with `[DONE]`, has an event after it, or has an
error event.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Event = tuple[float, str]  # time of its last byte, and its text

DATA, DONE = "data: ", "data: [DONE]"
WAITING = (": queued ", ": provisioning", ": held")  # beginnings of comments about waiting


@dataclass(slots=True)
class Answer:
    """One choice of an answer, as the client got it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    done: bool = False  # [DONE] came
    error: dict[str, Any] | None = None
    resumed: int = 0
    exact: bool | None = None
    reason: str = ""  # why it is not exact, if the server said so
    token_times_s: list[float] = field(default_factory=list)  # of chunks with content
    logprobs: list[float] = field(default_factory=list)
    waiting: int = 0  # number of comments about waiting

    @property
    def gaps_s(self) -> list[float]:
        """Return the seconds between chunks with content."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]

    @property
    def wrong(self) -> str:
        """Return why the answer is incomplete; "" if it is complete."""
        return str(self.error.get("message", self.error)) if self.error else "" if self.done else "no [DONE]"


def read_events(events: Iterable[Event], index: int = 0) -> Answer:
    """Assemble one choice of a streamed answer from its events."""
    answer = Answer()
    for at_s, text in events:
        if text.startswith(DATA) and answer.done:
            answer.error = {"message": f"an event after [DONE]: {text[:200]}"}
        elif text.startswith(WAITING):
            answer.waiting += 1
        elif text == DONE:
            answer.done = True
        elif text.startswith(DATA):
            _read_chunk(answer, at_s, json.loads(text.removeprefix(DATA)), index)
    return answer


def _read_chunk(answer: Answer, at_s: float, chunk: dict[str, Any], index: int) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    for choice in chunk["choices"]:
        if choice["index"] != index:
            continue
        text = (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
        answer.text += text
        answer.tokens += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        answer.logprobs += [entry["logprob"] for entry in logprobs.get("content", [])]
        answer.logprobs += logprobs.get("token_logprobs", [])
        if text or choice.get("token_ids"):
            answer.token_times_s.append(at_s)
        if choice["finish_reason"] is not None:
            answer.finish = choice["finish_reason"]
            answer.resumed = chunk["holdfast"]["resumed"]
            answer.exact, answer.reason = chunk["holdfast"]["exact"], chunk["holdfast"].get("reason", "")


def read_whole(body: dict[str, Any]) -> list[Answer]:
    """Return the choices of an answer that was not streamed."""
    return [
        Answer(
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice.get("token_ids") or [],
            choice["finish_reason"],
            done=True,
        )
        for choice in sorted(body["choices"], key=lambda choice: int(choice["index"]))
    ]


def events_of(response: http.client.HTTPResponse) -> Iterator[Event]:
    """Yield events as the standard library's HTTP client reads them; it raises an error if the chunk framing ends
    early."""
    while line := response.readline():
        if line.strip():
            yield time.perf_counter(), line.decode().rstrip("\n")


def difference(expected: Answer, answer: Answer, *, part: bool = False) -> str:
    """Return how an answer differs from the uninterrupted one; "" if it does not. A `part` may be only its
    beginning."""
    if answer.wrong and not (part and not answer.error):
        return answer.wrong
    if part and expected.text.startswith(answer.text) and expected.tokens[: len(answer.tokens)] == answer.tokens:
        return ""
    if answer.tokens != expected.tokens:
        pairs = zip(expected.tokens, answer.tokens, strict=False)
        at = next((place for place, (right, got) in enumerate(pairs) if right != got), None)
        where = f"token {at} differs" if at is not None else f"{len(answer.tokens)} tokens"
        return f"{where}, of {len(expected.tokens)}"
    if (answer.text, answer.finish) != (expected.text, expected.finish):
        said, right = (f"{one.finish!r} {one.text[-60:]!r}" for one in (answer, expected))
        return f"{said} instead of {right}"
    return ""

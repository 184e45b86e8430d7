"""`make prove-bit-flips`: random bits, 1 to 8 at a time, flipped in the weights of one worker with a real model.

Each injection is a command to the worker's fault socket (`flip_bits`, by seed), and is undone after it. It is looked
for as control looks: the known questions of the model, one a check, judged by `health.expectations` against what the
sound worker answered. Beside that ordinary prompts are asked, to see whether anybody would have noticed. What ends
otherwise than well is counted as what it was: an engine that found numbers which are not finite ended by itself.

A bound is missed if the sound worker was ever accused, or fewer injections were made than meant. How many are caught is
reported, and has no bound: a bit that moves no answer cannot be found by asking, and harms nobody.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.prove import Row, Rows, tell
from holdfast.control.questions import questions_of
from holdfast.core.address import TcpAddress, UnixAddress, parse_address
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.health.expectations import (
    PINNED_ENOUGH,
    TOP,
    Answer,
    Expectations,
    Heard,
    Key,
    Question,
    Sets,
    State,
    answer_of,
)
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import VERSION, Generate, Hello, Message, Step, Welcome, decode_to_frontend

INJECTIONS, INJECTIONS_MIN = 60, 50
RUN_S = 780.0  # about ten minutes on two idle cores; a busy machine makes fewer injections, and says so
# Questions that are asked in turn, check after check: what all of them do not show the next check does not.
CHECKS = PINNED_ENOUGH
ANSWER_S = 60.0
BACK_S = 180.0  # a standby takes over at once; where it is not ready yet it imports torch on a busy machine first
MODEL = "smollm2-135m-instruct"
OPTIONS = ("--engine", "torch", "--model", "default", "--fast", "--allow-chaos", "--controls", "0")
PANEL_TOKENS = 12
# Short of a KV block each, so that nothing of an earlier answer is found and used again.
PANEL = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time there was",
    "The three primary colours are",
    "Dear Sir or Madam, I am writing",
)
FIGURES = (
    "injections", "caught_share", "caught_by_check", "ended_by_engine", "missed", "silent_share",
    "found_of_harmful_share", "false_alarms",
)  # fmt: skip


class Gone(Exception):
    """The worker's process ended while it was asked."""


class Asker:
    """A canary's connection to one worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter, self._heard = FrameSplitter(), list[Message]()
        self._numbers = 0
        self.welcome: Welcome

    @classmethod
    async def connect(cls, address: str) -> Asker:
        where = parse_address(address)
        if isinstance(where, UnixAddress):
            made = cls(*await asyncio.open_unix_connection(where.path))
        else:
            assert isinstance(where, TcpAddress)
            made = cls(*await asyncio.open_connection(where.host, where.port))
        made._send(Hello(VERSION, "canary", "prove-bit-flips"))
        welcome = await made._next()
        assert isinstance(welcome, Welcome), welcome
        made.welcome = welcome
        return made

    async def ask(self, question: Question) -> Answer:
        self._numbers += 1
        sampling = Sampling(question.tokens, 0, temperature=0.0, top_logprobs=TOP, ignore_eos=True)
        prompt = list(question.prompt)
        self._send(Generate(self._numbers, GenerateRequest("canary", prompt, len(prompt), sampling)))
        outputs: list[Output] = []
        while not outputs or (outputs[-1].finish is None and outputs[-1].failure is None):
            message = await self._next()
            if isinstance(message, Step):
                outputs += [output for output in message.outputs if output.stream == self._numbers]
        if outputs[-1].failure is not None:
            raise Gone(outputs[-1].failure.message)
        tokens = [token for output in outputs for token in output.tokens]
        return answer_of(tokens, [each for output in outputs for each in output.logprobs or []])

    def close(self) -> None:
        self._writer.close()

    def _send(self, message: Message) -> None:
        self._writer.write(encode(message))

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(ANSWER_S):
                while not self._heard:
                    data = await self._reader.read(1 << 16)
                    if not data:
                        raise Gone("the connection ended")
                    self._heard += [decode_to_frontend(payload) for payload in self._splitter.feed(data)]
        except (TimeoutError, ConnectionError) as error:
            raise Gone(repr(error)) from error
        return self._heard.pop(0)


@dataclass(slots=True)
class Bench:
    """A deployment whose active engine is asked and broken."""

    up: Supervised
    expectations: Expectations | None = None
    pinned: list[int] = field(default_factory=list)
    panel: list[list[int]] = field(default_factory=list)  # what the sound one says
    asker: Asker | None = None
    name: str = ""

    async def find(self) -> Asker:
        """The engine that is active now."""
        if self.asker is None:
            await in_thread(self.up.wait_until, lambda: self.up.engine("active"), "an active engine", BACK_S)
            active = await in_thread(self.up.active)
            self.name = active.name
            self.asker = await Asker.connect(self.up.records()[active.name]["address"])
        return self.asker

    async def learn(self) -> None:
        """What the sound one answers to the model's own questions, until enough of them are fit."""
        asker = await self.find()
        said = asker.welcome
        questions = questions_of(said.checksum, said.vocabulary)
        key = Key(said.checksum, said.build, said.dtype, said.device)
        known = self.expectations = Expectations(key, questions)
        known.step(Sets({"sound": True}), 0.0)
        for number, question in enumerate(questions):
            known.step(Heard("sound", number, await asker.ask(question)), 0.0)
            if known.record().entries[number].state is State.PINNED:
                self.pinned.append(number)
            if len(self.pinned) == CHECKS:
                break
        assert self.pinned, "no question of this model is fit"
        self.panel = await self.ordinary()

    async def ordinary(self) -> list[list[int]]:
        """What clients are answered, one after the other: a batch rounds otherwise."""
        return [await self._client(prompt) for prompt in PANEL]

    async def _client(self, prompt: str) -> list[int]:
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": PANEL_TOKENS, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        received = await ask(self.up.port, "/v1/completions", body)
        answer = read_answer(received)
        if answer.wrong:
            raise Gone(answer.wrong)
        if answer.resumed:
            raise Gone("it went on elsewhere")
        return answer.tokens

    async def inject(self, seed: int) -> Row:
        """One injection, to its end."""
        await self.find()
        flipped = (await in_thread(lambda: self.up.chaos(self.name, "flip_bits", seed=seed)))["active"]["flipped"]
        row: Row = {"seed": seed, "bits": len(flipped), "flipped": flipped}
        try:
            row |= await self.look()
            await in_thread(lambda: self.up.chaos(self.name, "clear"))
            row["false_alarm"] = await self.judged(self.pinned[seed % len(self.pinned)])
        except Gone as gone:
            row |= {"outcome": "ended", "why": str(gone)}
            self.lost()
        return row

    def lost(self) -> None:
        if self.asker is not None:
            self.asker.close()
        self.asker = None

    async def judged(self, question: int) -> str:
        known, asker = self.expectations, await self.find()
        assert known is not None
        return known.judge(question, await asker.ask(known.questions[question]))

    async def look(self) -> Row:
        """Every check there is, and what clients would have been told."""
        found = [await self.judged(question) for question in self.pinned]
        panel = await self.ordinary()
        changed = sum(1 for was, now in zip(self.panel, panel, strict=True) if was != now)
        check = next((place for place, why in enumerate(found, 1) if why), 0)
        outcome = "caught" if check else "missed" if changed else "silent"
        return {"outcome": outcome, "check": check, "why": next(filter(None, found), ""), "answers_changed": changed}


async def _run(up: Supervised) -> Row:
    bench = Bench(up)
    await bench.learn()
    rows: list[Row] = []
    until_s = asyncio.get_running_loop().time() + RUN_S
    for seed in range(1, INJECTIONS + 1):
        if asyncio.get_running_loop().time() > until_s:
            break
        rows.append(await bench.inject(seed))
        counts = Counter(row["outcome"] for row in rows)
        tell(f"{len(rows)} of {INJECTIONS}: {dict(counts)}")
    bench.lost()
    return _told(rows, bench)


def _told(rows: list[Row], bench: Bench) -> Row:
    counts = Counter(row["outcome"] for row in rows)
    checks = Counter(row["check"] for row in rows if row["outcome"] == "caught")
    alarms = [row for row in rows if row.get("false_alarm")]
    harmful = len(rows) - counts["silent"]
    assert rows, "not one injection was made in time"
    return {
        "model": MODEL,
        "injections": len(rows),
        "questions": len(bench.pinned),
        "panel": f"{len(PANEL)} prompts, {PANEL_TOKENS} tokens each, temperature 0",
        "outcomes": dict(counts),
        "caught_share": round(counts["caught"] / len(rows), 3),
        "caught_by_check": {str(check): checks[check] for check in sorted(checks)},
        "ended_by_engine": counts["ended"],
        "missed": counts["missed"],  # an ordinary answer changed, and no canary did
        "silent_share": round(counts["silent"] / len(rows), 3),
        "found_of_harmful_share": round((counts["caught"] + counts["ended"]) / harmful, 3) if harmful else 1.0,
        "caught_without_changed_answer": sum(
            1 for row in rows if row["outcome"] == "caught" and not row["answers_changed"]
        ),
        "false_alarms": len(alarms),
        "by_injection": rows,
        "bound": f"at least {INJECTIONS_MIN} injections, the sound worker never accused",
        "met": len(rows) >= INJECTIONS_MIN and not alarms,
    }


def _flips() -> Row:
    with Supervised(*OPTIONS, start_s=BACK_S) as up:
        return uvloop.run(_run(up))


ROWS: Rows = {"flips": _flips}

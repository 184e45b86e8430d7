"""One deployment with a real model: bits of its active engine's weights are flipped, looked for, and flipped back.

Always true: an injection begins on weights that are as they were written, which the engine itself has verified after
the one before; what it finds is judged against what this very engine answered before the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.bit_flips.asker import Asker, Gone
from bench.prove import Row
from holdfast.control.questions import questions_of
from holdfast.health.expectations import PINNED_ENOUGH, AnswerHeard, Expectations, Key, QuestionState, SetsPresent
from holdfast.testing.clients import ask, read_answer
from holdfast.testing.rig import fetch, get_json
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread, until

# Questions that are asked in turn, check after check: what all of them do not show the next check does not.
CHECKS = PINNED_ENOUGH
BACK_S = 180.0  # a standby takes over at once; where it is not ready yet it imports torch on a busy machine first
LOOK_EVERY_S = 0.1  # a look asks every engine
VERIFY_S = 70.0  # a lever answers within 60
AS_WRITTEN = "the weights are as they were written"
PANEL_TOKENS = 12
SOUND_EVERY = 5  # after so many injections ordinary answers are asked of sound weights: do they differ by themselves?
# Short of a KV block each, so that nothing of an earlier answer is found and used again.
PANEL = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time there was",
    "The three primary colours are",
    "Dear Sir or Madam, I am writing",
)


@dataclass(slots=True)
class Patient:
    """A deployment whose active engine is asked and broken."""

    up: Supervised
    model: str = ""
    expectations: Expectations | None = None
    pinned: list[int] = field(default_factory=list)
    panel: list[list[int]] = field(default_factory=list)  # what the sound one says
    unsteady: int = 0  # ordinary answers that differed without any injection, over all the times they were asked so
    steadied: int = 0  # how many were asked so
    asker: Asker | None = None
    name: str = ""

    async def find(self) -> Asker:
        """The engine that is active now."""
        if self.asker is None:

            async def active() -> Any:
                return await in_thread(self.up.engine, "active")

            found = await until(active, "an active engine", BACK_S, every_s=LOOK_EVERY_S)
            self.name = found.name
            self.asker = await Asker.connect(self.up.records()[found.name]["address"])
        return self.asker

    def lose(self) -> None:
        if self.asker is not None:
            self.asker.close()
        self.asker = None

    async def learn(self) -> None:
        """What the sound one answers to the model's own questions, until enough of them are fit."""
        self.model = (await in_thread(get_json, f"127.0.0.1:{self.up.port}", "/v1/models"))["data"][0]["id"]
        asker = await self.find()
        said = asker.welcome
        questions = questions_of(said.checksum, said.vocabulary)
        key = Key(said.checksum, said.build, said.dtype, said.device)
        known = self.expectations = Expectations(key, questions)
        known.step(SetsPresent({"sound": True}), 0.0)
        for number, question in enumerate(questions):
            known.step(AnswerHeard("sound", number, await asker.ask(question)), 0.0)
            if known.record().entries[number].state is QuestionState.PINNED:
                self.pinned.append(number)
            if len(self.pinned) == CHECKS:
                break
        assert self.pinned, "no question of this model is fit"
        self.panel = await self.ordinary()

    async def ordinary(self) -> list[list[int]]:
        """What clients are answered, one after the other: a batch rounds otherwise."""
        return [await self._client(prompt) for prompt in PANEL]

    async def _client(self, prompt: str) -> list[int]:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": PANEL_TOKENS, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        answer = read_answer(await ask(self.up.port, "/v1/completions", body))
        if answer.wrong:
            raise Gone(answer.wrong)
        if answer.resumed:
            raise Gone("it went on elsewhere")
        return answer.tokens

    async def inject(self, seed: int) -> Row:
        """One injection, to its end: the weights are as they were written again."""
        await self.find()
        flipped = (await in_thread(lambda: self.up.chaos(self.name, "flip_bits", seed=seed)))["active"]["flipped"]
        row: Row = {"seed": seed, "bits": len(flipped), "flipped": flipped}
        try:
            row |= await self._look()
            await in_thread(lambda: self.up.chaos(self.name, "clear"))
        except Gone as gone:
            row |= {"outcome": "ended", "why": str(gone)}
            self.lose()
        return row | await self._restored(seed)

    async def _look(self) -> Row:
        """Every check there is, and what clients would have been told."""
        found = [await self._judged(question) for question in self.pinned]
        panel = await self.ordinary()
        changed = self._changed(panel)
        check = next((place for place, why in enumerate(found, 1) if why), 0)
        outcome = "caught" if check else "missed" if changed else "silent"
        return {"outcome": outcome, "check": check, "why": next(filter(None, found), ""), "answers_changed": changed}

    def _changed(self, panel: list[list[int]]) -> int:
        return sum(1 for was, now in zip(self.panel, panel, strict=True) if was != now)

    async def _judged(self, question: int) -> str:
        known, asker = self.expectations, await self.find()
        assert known is not None
        return known.find_error(question, await asker.ask(known.questions[question]))

    async def _restored(self, seed: int) -> Row:
        """Return what the engine that serves now says of its weights, and whether a check accuses it, sound as it is.
        Where an engine ended with its damage in memory that its successor shares, verifying loads them again."""
        await self.find()
        row: Row = {}
        if said := await in_thread(self._doubt):
            row["loaded_anew"] = said
            self.lose()  # its load has another number
            await self.find()
            said = await in_thread(self._doubt)
        if seed % SOUND_EVERY == 0:
            self.steadied += len(self.panel)
            self.unsteady += self._changed(await self.ordinary())
        return row | {"doubt": said, "false_alarm": await self._judged(self.pinned[seed % len(self.pinned)])}

    def _doubt(self) -> str:
        """What the engine says of its weights when asked to verify them; "": they are as they were written."""
        status = self.up.records()[self.name]["status"]
        said = fetch(status, "/engine/verify", "POST", timeout_s=VERIFY_S)[1].decode(errors="replace")
        return "" if AS_WRITTEN in said else said

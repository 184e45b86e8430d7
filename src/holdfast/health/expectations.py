"""Holds the answers that the workers of one kind must give to canaries, and decides which answer is right when they
differ. Pure: no I/O, no clock (`now_s` is passed in, and never goes back).

Theory (facts 22, 23). Corrupted weights still produce fluent text, and NaN appears in only a hundredth of cases. So
tokens and their logprobs are compared. A busy batch sums in another order, which moves logprobs (in 16 bits by
hundredths of a nat, seldom by a step or two of 1/8) and flips a token where two are close. Hence two rules:
- A question is *fit* only if each token of its answer leads the second candidate by a nat, which no batch flips.
- Logprobs may differ within a band: half that lead for a single token, a fifth of the band for their mean. Rounding
  scatters the logprobs, corruption shifts them.
Corruption that changes no token and no logprob of any question is not found here.

The expected answer comes with the card (tokens, and a range of their logprobs), or is learnt. It is learnt when more
than half of the sets of weights, and at least two, give the same answer; a single set is enough if its load was
verified. Each set of weights has one vote, because an active worker and its standby share weights, corruption included.
Expectations are kept per `Key`: another build, dtype or device rounds differently.

A card's question must be fit too. If the first answers show that it is not, it is dropped and reported.

An expectation can be wrong too (a bad card, a build that changed under its old name); then all sets differ from it at
once. So a different answer is only an accusation, and the other sets are asked the same question:
- A set that gives the expected answer is a witness against the accused; one that gives the accused's answer is a
  witness for it. With more witnesses against it than for it the accused is convicted.
- Otherwise the expectation is withdrawn, reported, and learnt again. If no other set answers, nothing changes.
- If there is only one set, its own earlier answer is the witness: the same load once gave the expected answer.
- An expectation that was learnt from a single set is withdrawn too, if there is only one witness against the accused.
Sets that differ, with no majority for any answer, are *disputed*. A dispute ends when a third set answers, a set leaves
or is reloaded, or a set answers differently when it is asked again.

Always true:
- `TABLE` contains every change of a question's state.
- A set is convicted only by witnesses, never by its vote, and never by one other set if the expected answer was learnt
  from a single set.
- A witness is not convicted itself, so of several sets at least one never is.
- A convicted set does not vote, and is not convicted again unless it was acquitted since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast.core.ports import DeadlineReached
from holdfast.core.requests import TokenLogprobs
from holdfast.health.bounds import Count, UnixS

LOGPROB_MAX = 0.01  # below 0 by definition; sums of exponentials round
JURY_S = 60.0  # how long an accusation waits for other sets: each may need several tries (`canary.TRY_S`)
WITHDRAWALS_MAX = 3  # a question becomes unfit after so many withdrawals of its expectation
PINNED_ENOUGH = 4  # questions with known answers: enough to check different rows of the weights in turn
ASKED_AT_ONCE = 4  # questions that a fresh load is asked one after the other; and if none of them was usable:
ASKED_AT_ONCE_MAX = 12
CONVICTED_MAX = 64  # convicted loads that are remembered, because another worker may map them later
TOP = 5  # candidates to ask for at each token: with eight tokens, forty numbers


@dataclass(frozen=True, slots=True)
class Band:
    """How far logprobs may lie from the expected ones, and how far the first token must lead; in nats."""

    one: float
    mean: float  # of the absolute differences
    margin: float  # at least twice `one`: two tokens that move towards each other keep their order


# Four steps of bfloat16 logits up to 32. Busy batches of an 8B model moved them by up to 0.26, an answer's by 0.05 on
# average (bench/results/engine-gpu.json, canaries-8b).
WIDE = Band(0.5, 0.1, 1.0)
BANDS = {
    "float32": Band(0.05, 0.01, 1.0),  # or TF32, with steps of 1/64
    "exact": Band(0.01, 0.002, 0.1),  # for an engine with answers that do not depend on the batch: the simulator
}


@dataclass(frozen=True, slots=True)
class Key:
    """The properties that workers must share to give equal answers."""

    card: str  # checksum
    build: str  # of the engine
    dtype: str
    device: str  # kind
    questions: str = ""  # the name of the questions in its card; empty: it has none


@dataclass(frozen=True, slots=True)
class CanaryQuestion:
    """A question that is asked at temperature 0, with `TOP` logprobs, and past an end of text."""

    prompt: tuple[int, ...]
    tokens: int = 8


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    tokens: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # for each token, best first; empty: the engine reports none
    within: tuple[float, float] | None = None  # in a card's expectation: the range of each token's logprob


def answer_of(tokens: Sequence[int], logprobs: Iterable[TokenLogprobs] | None) -> CanaryAnswer:
    return CanaryAnswer(tuple(tokens), tuple(tuple((t, lp) for t, lp in entry.top) for entry in logprobs or ()))


def is_fit(answer: CanaryAnswer, band: Band) -> bool:
    """Return True if every token leads by the band's margin, so that no batch flips it."""
    return len(answer.top) == len(answer.tokens) > 0 and all(
        len(top) > 1 and top[0][0] == token and top[0][1] - top[1][1] >= band.margin
        for token, top in zip(answer.tokens, answer.top, strict=True)
    )


def is_close(expected: CanaryAnswer, answer: CanaryAnswer, band: Band) -> bool:
    """Return True if the answer leads by less than the margin at a compared token, so that rounding may explain a
    difference."""
    for wanted, said, top in zip(expected.tokens, answer.tokens, answer.top, strict=False):
        if wanted != said:
            listed = dict(top)
            return wanted in listed and max(listed.values()) - listed[wanted] < band.margin
    return bool(answer.top) and not is_fit(answer, band)


def flaw_of(answer: CanaryAnswer) -> str:
    """Return what in the answer no sound engine can produce, for any question; empty: nothing."""
    values = [value for top in answer.top for _, value in top]
    bad = next((value for value in values if not math.isfinite(value) or value > LOGPROB_MAX), None)
    return "" if bad is None else f"a logprob of {bad:g}"


def difference(expected: CanaryAnswer, answer: CanaryAnswer, band: Band) -> str:
    """Return how the answer differs from the expected one, if by more than a busy batch explains; else ""."""
    pairs = zip(expected.tokens, answer.tokens, strict=False)
    other = next((place for place, (want, got) in enumerate(pairs) if want != got), None)
    if other is not None:
        return f"token {answer.tokens[other]} at place {other}, expected {expected.tokens[other]}"
    if len(answer.tokens) != len(expected.tokens):
        return f"{len(answer.tokens)} tokens, expected {len(expected.tokens)}"
    if (outside := _outside(expected, answer, band)) is not None:
        return outside
    moves = []
    for place, (wants, gots) in enumerate(zip(expected.top, answer.top, strict=False)):
        listed = dict(gots)
        # A token that is not listed has at most the last listed logprob: it moved by at least that difference.
        least = min(listed.values(), default=0.0)
        for token, want in wants:
            move = abs(listed[token] - want) if token in listed else max(0.0, want - least)
            if not move <= band.one:  # NaN too
                return f"the logprob of {token} at place {place} is off by {move:.2f}"
            moves.append(move)
    mean = sum(moves) / len(moves) if moves else 0.0
    return f"logprobs are off by {mean:.2f} on average" if mean > band.mean else ""


def _outside(expected: CanaryAnswer, answer: CanaryAnswer, band: Band) -> str | None:
    """Return which token's logprob is out of the card's range by more than a busy batch explains, or None."""
    if expected.within is None:
        return None
    low, high = expected.within
    for place, (token, top) in enumerate(zip(answer.tokens, answer.top, strict=False)):
        value = dict(top).get(token)
        if value is not None and not low - band.one <= value <= high + band.one:
            return f"the logprob of {token} at place {place} is {value:.2f}, expected {low:g} to {high:g}"
    return None


# -- states


class QuestionState(StrEnum):
    LEARNING = "learning"  # no answer is expected yet
    PINNED = "pinned"
    UNFIT = "unfit"  # asked only if there is no other question


class QuestionCause(StrEnum):
    GIVEN = "given with the card"
    AGREED = "agreed on"
    VERIFIED = "from a verified load"
    CLOSE = "its margins are too small"
    WITHDRAWN = "withdrawn"
    UNSTABLE = "withdrawn too often"


TABLE: dict[QuestionState, dict[QuestionCause, QuestionState]] = {
    QuestionState.LEARNING: {
        QuestionCause.GIVEN: QuestionState.PINNED,
        QuestionCause.AGREED: QuestionState.PINNED,
        QuestionCause.VERIFIED: QuestionState.PINNED,
        QuestionCause.CLOSE: QuestionState.UNFIT,
    },
    QuestionState.PINNED: {
        QuestionCause.WITHDRAWN: QuestionState.LEARNING,
        QuestionCause.UNSTABLE: QuestionState.UNFIT,
        QuestionCause.CLOSE: QuestionState.UNFIT,
    },
    QuestionState.UNFIT: {},
}


# -- events


@dataclass(frozen=True, slots=True)
class SetsPresent:
    """The sets of weights that workers of this key have now, each by the unique name of its load."""

    present: Mapping[str, bool]  # True: its load was verified, its bytes compared with the source's


@dataclass(frozen=True, slots=True)
class AnswerHeard:  # a worker with these weights gave a complete answer, for whatever reason it was asked
    weights: str
    question: int
    answer: CanaryAnswer


@dataclass(frozen=True, slots=True)
class WeightsAccused:
    """A worker with these weights answered wrongly again and again (`canary.Accuse`)."""

    weights: str
    question: int
    asked_at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsAcquitted:
    """These weights equal their source: a process or a device computed wrongly with them."""

    weights: str


ExpectationsEvent = SetsPresent | AnswerHeard | WeightsAccused | WeightsAcquitted | DeadlineReached


# -- effects


@dataclass(frozen=True, slots=True)
class AskSet:
    """Ask one worker with these weights this question, now."""

    weights: str
    question: int
    reason: str


@dataclass(frozen=True, slots=True)
class Convict:
    """These weights are corrupt: every worker that has them failed the canary sent at `asked_at_s` as WRONG."""

    weights: str
    asked_at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ExpectationsNote:
    reason: str
    grave: bool = False  # an operator must read it: the card's expected answer is wrong or unusable


ExpectationsEffect = AskSet | Convict | ExpectationsNote


@dataclass(slots=True)
class QuestionEntry:
    """The state of one question; plain data."""

    state: QuestionState = QuestionState.LEARNING
    why: str = ""
    expected: CanaryAnswer | None = None
    given: list[str] = field(default_factory=list)  # sets of weights that gave the expected answer
    withdrawals: Count = 0
    refuted: str = ""  # why the card's expectation was dropped; empty: it was not, or the card has none
    disputed: list[str] = field(default_factory=list)  # sets with different answers, of which none has a majority


@dataclass(frozen=True, slots=True)
class ExpectationsRecord:
    """The stored part of the state; plain data. Votes and accusations are not stored: new answers bring them again."""

    key: Key
    questions: tuple[CanaryQuestion, ...]
    entries: tuple[QuestionEntry, ...]
    convicted: tuple[str, ...]
    at_unix_s: UnixS = 0.0  # when it was written; without workers, when the last one left


@dataclass(slots=True)
class _Jury:
    accused: WeightsAccused
    until_s: float
    # Sets that gave the expected answer, the accused's, or another one.
    right: set[str] = field(default_factory=set)
    alike: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)


class Expectations:
    """The expected answers of one key. `given`: the card's expected answers, by question."""

    def __init__(
        self, key: Key, questions: Sequence[CanaryQuestion], given: Mapping[int, CanaryAnswer] | None = None
    ) -> None:
        assert questions
        self.key = key
        self.questions = tuple(questions)
        self._band = BANDS.get(key.dtype, WIDE)
        self._entries = [QuestionEntry() for _ in self.questions]
        self._sets: dict[str, bool] = {}
        self._heard: list[dict[str, CanaryAnswer]] = [{} for _ in self.questions]  # the last answer, by set
        self._convicted: dict[str, None] = {}  # in order
        self._wrong_lately: set[str] = set()  # sets that answered a known question wrongly the last time
        self._juries: dict[tuple[int, str], _Jury] = {}
        self._split: set[int] = set()  # questions that were reported to have no majority
        for question, answer in (given or {}).items():
            fit = not answer.top or is_fit(answer, self._band)  # without logprobs the first answers show it
            if fit and len(answer.tokens) == self.questions[question].tokens:
                self._pin(question, answer, QuestionCause.GIVEN, [])
            else:
                self._turn(question, QuestionCause.CLOSE)

    @property
    def next_deadline_s(self) -> float | None:  # when the caller must send `DeadlineReached`
        return min((jury.until_s for jury in self._juries.values()), default=None)

    @property
    def disputed(self) -> set[str]:  # sets that may be wrong: other sets give different answers
        there = self._sets.keys() - self._convicted.keys()
        return {each for entry in self._entries if len(apart := there & set(entry.disputed)) > 1 for each in apart}

    def record(self) -> ExpectationsRecord:
        entries = (replace(e, given=list(e.given), disputed=list(e.disputed)) for e in self._entries)
        return ExpectationsRecord(self.key, self.questions, tuple(entries), tuple(self._convicted))

    def restore(self, record: ExpectationsRecord) -> bool:  # False: it is about other questions and was ignored
        if (record.key, record.questions, len(record.entries)) != (self.key, self.questions, len(self.questions)):
            return False
        self._entries = [replace(e, given=list(e.given), disputed=list(e.disputed)) for e in record.entries]
        self._convicted = dict.fromkeys(record.convicted)
        return True

    def question_at(self, turn: int) -> int:
        """Return the question of this turn: a pinned one if there is any, else one being learnt, else an unfit one."""
        for state in (QuestionState.PINNED, QuestionState.LEARNING, QuestionState.UNFIT):
            if places := [place for place, entry in enumerate(self._entries) if entry.state is state]:
                return places[turn % len(places)]
        raise AssertionError("there are questions")

    def expected_of(self, question: int, weights: str) -> CanaryAnswer | None:
        """Return the expected answer; None if there is none or these weights are accused."""
        return None if any(accused == weights for _, accused in self._juries) else self._entries[question].expected

    def find_error(self, question: int, answer: CanaryAnswer) -> str:
        """Return what is known to be wrong with the answer, in words; empty: nothing."""
        expected = self._entries[question].expected
        if (flaw := flaw_of(answer)) or expected is None:
            return flaw
        return "" if self._may_be_rounding(question, answer) else difference(expected, answer, self._band)

    def _may_be_rounding(self, question: int, answer: CanaryAnswer) -> bool:
        """Return True if rounding may explain how the answer differs from the card's (`is_close`)."""
        expected = self._entries[question].expected
        return expected is not None and not expected.top and is_close(expected, answer, self._band)

    def step(self, event: ExpectationsEvent, now_s: float) -> tuple[ExpectationsEffect, ...]:
        match event:
            case SetsPresent():
                return self._on_sets(event, now_s)
            case AnswerHeard() if event.weights in self._sets:
                return self._on_answer(event, now_s)
            case WeightsAccused() if event.weights in self._sets and event.weights not in self._convicted:
                return self._accuse(event, now_s)
            case WeightsAcquitted():
                self._convicted.pop(event.weights, None)
            case DeadlineReached():
                return self._decide(now_s)
        return ()

    def _on_sets(self, event: SetsPresent, now_s: float) -> tuple[ExpectationsEffect, ...]:
        self._sets = dict(event.present)
        for entry, heard in zip(self._entries, self._heard, strict=True):
            entry.given = [each for each in entry.given if each in self._sets]
            for gone in heard.keys() - self._sets.keys():
                del heard[gone]
        self._juries = {key: jury for key, jury in self._juries.items() if key[1] in self._sets}
        self._wrong_lately &= self._sets.keys()
        learnt = [effect for question in range(len(self.questions)) for effect in self._learn(question)]
        return (*learnt, *self._decide(now_s))

    def _on_answer(self, event: AnswerHeard, now_s: float) -> tuple[ExpectationsEffect, ...]:
        question, weights = event.question, event.weights
        if len(event.answer.tokens) < self.questions[question].tokens:
            return ()  # the answer was cut short, which says nothing about the weights
        entry, first = self._entries[question], weights not in self._heard[question]
        if entry.state is QuestionState.LEARNING and weights in self._wrong_lately and len(self._sets) == 1:
            return ()  # no other set could show that this is wrong too
        self._heard[question][weights] = event.answer
        close = self._drop_close(question)
        if not (wrong := self.find_error(question, event.answer)) and entry.expected and weights not in entry.given:
            entry.given.append(weights)
            entry.why = (
                str(QuestionCause.AGREED) if entry.why == QuestionCause.VERIFIED and entry.given[1:] else entry.why
            )
        if wrong or entry.expected:
            (self._wrong_lately.add if wrong else self._wrong_lately.discard)(weights)
        for (asked, accused), jury in self._juries.items():
            if asked == question and accused != weights:
                self._count_witness(jury, event, wrong)
        effects = [*close, *self._learn(question), *self._decide(now_s)]
        if weights not in self._convicted and (unasked := self._unasked(weights, first)) is not None:
            effects.append(AskSet(weights, unasked, "what it answers is to be learnt"))
        elif weights not in entry.disputed and (apart := self._in_dispute(weights)) is not None:
            effects.append(AskSet(weights, apart, "others answered otherwise"))
        return tuple(effects)

    def _in_dispute(self, weights: str) -> int | None:
        """Return a question to which these weights and others gave different answers, or None. It is asked again after
        each check with another question: the process that answered wrongly may be gone, which ends the dispute."""
        asked = (place for place, entry in enumerate(self._entries) if weights in entry.disputed)
        return next(asked, None) if weights in self.disputed else None

    def _unasked(self, weights: str, first: bool) -> int | None:
        """Return the next question to ask these weights for the first time, or None. A fresh load is asked several at
        once, pinned ones first, because its answers are its witness later. After that one question to be learnt
        follows each check, until enough are pinned."""
        # The card's questions do not count: they may be few and short.
        pinned = sum(
            entry.state is QuestionState.PINNED and entry.why != QuestionCause.GIVEN for entry in self._entries
        )
        asked = sum(weights in heard for heard in self._heard)
        for place, entry in enumerate(self._entries if first and asked < ASKED_AT_ONCE else ()):
            if entry.state is QuestionState.PINNED and weights not in (*entry.given, *self._heard[place]):
                return place
        if pinned >= PINNED_ENOUGH or (first and asked >= (ASKED_AT_ONCE if pinned else ASKED_AT_ONCE_MAX)):
            return None
        for question, entry in enumerate(self._entries):
            if entry.state is QuestionState.LEARNING and weights not in self._heard[question]:
                return question
        return None

    def _drop_close(self, question: int) -> tuple[ExpectationsEffect, ...]:
        """Drop a card's question if most sets answer it with a lead below the margin."""
        sets = self._sets.keys() - self._convicted.keys()
        heard = {each: answer for each, answer in self._heard[question].items() if each in sets}
        if 2 * sum(self._may_be_rounding(question, answer) for answer in heard.values()) <= len(sets):
            return ()
        self._juries = {place: jury for place, jury in self._juries.items() if place[0] != question}
        self._turn(question, QuestionCause.CLOSE)
        self._entries[question].refuted = str(QuestionCause.CLOSE)
        return (
            ExpectationsNote(
                f"question {question}, which the card brings, is not asked any more: {QuestionCause.CLOSE}", grave=True
            ),
        )

    # -- learning

    def _learn(self, question: int) -> tuple[ExpectationsEffect, ...]:
        if self._entries[question].state is not QuestionState.LEARNING:
            return ()
        sets = self._sets.keys() - self._convicted.keys()
        votes = {each: answer for each, answer in self._heard[question].items() if each in sets}
        close = sum(not is_fit(answer, self._band) and not flaw_of(answer) for answer in votes.values())
        if 2 * close > len(sets):
            return self._drop(question)
        best = self._largest_party(votes)
        if not best or flaw_of(votes[best[0]]):
            return ()
        if len(best) > 1 and 2 * len(best) > len(sets):
            return self._agree(question, best, votes)
        if len(sets) == 1 and self._sets[best[0]]:
            self._pin(question, votes[best[0]], QuestionCause.VERIFIED, best)
            return (ExpectationsNote(f"question {question} is pinned: {QuestionCause.VERIFIED}"),)
        entry, apart = self._entries[question], sorted(votes) if len(sets) > 1 else []
        if len(votes) < len(sets) or (question in self._split and entry.disputed == apart):
            return ()
        entry.disputed = apart
        self._split.add(question)
        why = "there is no other to compare it with" if len(sets) == 1 else "there is no majority for any answer"
        return (ExpectationsNote(f"nothing is expected of question {question}: {why}"),)

    def _largest_party(self, votes: Mapping[str, CanaryAnswer]) -> list[str]:
        """Return the largest group of sets that answer like its first member; of equal groups the earliest."""
        parties = [
            [each, *(other for other in votes if other != each and not self._differ(votes[each], votes[other]))]
            for each in votes
        ]
        return max(parties, key=len, default=[])

    def _differ(self, one: CanaryAnswer, another: CanaryAnswer) -> bool:
        return bool(difference(one, another, self._band))

    def _agree(
        self, question: int, party: list[str], votes: Mapping[str, CanaryAnswer]
    ) -> tuple[ExpectationsEffect, ...]:
        if not is_fit(votes[party[0]], self._band):
            return self._drop(question)
        self._pin(question, votes[party[0]], QuestionCause.AGREED, party)
        note = ExpectationsNote(
            f"question {question} is pinned: {QuestionCause.AGREED} by {len(party)} of {len(self._sets)}"
        )
        return (note, *(AskSet(each, question, "it was outvoted") for each in votes if each not in party))

    def _pin(self, question: int, answer: CanaryAnswer, cause: QuestionCause, given: list[str]) -> None:
        self._turn(question, cause)
        self._entries[question].expected = answer
        self._entries[question].given = list(given)

    def _drop(self, question: int) -> tuple[ExpectationsEffect, ...]:
        self._turn(question, QuestionCause.CLOSE)
        return (ExpectationsNote(f"question {question} is not asked any more: {QuestionCause.CLOSE}"),)

    def _turn(self, question: int, cause: QuestionCause) -> None:
        entry = self._entries[question]
        entry.state = TABLE[entry.state][cause]
        entry.why, entry.expected, entry.given, entry.disputed = str(cause), None, [], []
        self._split.discard(question)

    # -- accusations

    def _accuse(self, event: WeightsAccused, now_s: float) -> tuple[ExpectationsEffect, ...]:
        place = (event.question, event.weights)
        answer = self._heard[event.question].get(event.weights)
        if place in self._juries or answer is None or not self.find_error(event.question, answer):
            return ()  # the accusation is already being decided, or the expectation has changed
        self._juries[place] = _Jury(event, now_s + JURY_S)
        others, why = self._sets.keys() - {event.weights}, f"{event.weights} answers otherwise"
        return (*(AskSet(each, event.question, why) for each in sorted(others)), *self._decide(now_s))

    def _count_witness(self, jury: _Jury, event: AnswerHeard, wrong: str) -> None:
        accused = self._heard[event.question].get(jury.accused.weights)
        for side in (jury.right, jury.alike, jury.other):
            side.discard(event.weights)
        alike = accused is not None and not self._differ(accused, event.answer)
        (jury.right if not wrong else jury.alike if alike else jury.other).add(event.weights)

    def _decide(self, now_s: float) -> tuple[ExpectationsEffect, ...]:
        """Decide every accusation for which the other sets' answers suffice, or the waiting time is over."""
        effects: list[ExpectationsEffect] = []
        for place, jury in list(self._juries.items()):
            if place not in self._juries:
                continue  # an earlier iteration withdrew its expectation
            others = self._sets.keys() - {jury.accused.weights}
            right, alike = (jury.right & others) - self._convicted.keys(), jury.alike & others
            spoke = (jury.right | jury.alike | jury.other) & others
            if 2 * len(right) <= len(others) and len(spoke) < len(others) and now_s < jury.until_s:
                continue
            del self._juries[place]
            given = jury.accused.weights in self._entries[jury.accused.question].given
            alone = len(right) == 1 and not given and self._has_single_source(jury.accused)
            if (len(right) > len(alike) and not alone) or (not others and given):
                effects += self._convict(jury.accused, len(right))
            elif spoke or not others:
                effects += self._withdraw(jury.accused, len(alike))
            else:
                effects.append(
                    ExpectationsNote(f"{jury.accused.weights}: {jury.accused.reason}; and no other set answered")
                )
        return tuple(effects)

    def _has_single_source(self, accused: WeightsAccused) -> bool:
        """Return True if the expectation was learnt from a single verified set, and the accused's answer has no flaw
        that shows it to be wrong by itself."""
        answer = self._heard[accused.question].get(accused.weights)
        return self._entries[accused.question].why == QuestionCause.VERIFIED and not (answer and flaw_of(answer))

    def _convict(self, accused: WeightsAccused, witnesses: int) -> tuple[ExpectationsEffect, ...]:
        self._convicted = dict.fromkeys([*self._convicted, accused.weights][-CONVICTED_MAX:])
        self._juries = {place: jury for place, jury in self._juries.items() if place[1] != accused.weights}
        witness = (
            f"other sets that answer as expected: {witnesses}" if witnesses else "this load answered otherwise before"
        )
        return (Convict(accused.weights, accused.asked_at_s, f"{accused.reason}; {witness}"),)

    def _withdraw(self, accused: WeightsAccused, alike: int) -> tuple[ExpectationsEffect, ...]:
        question, weights, entry = accused.question, accused.weights, self._entries[accused.question]
        if entry.state is not QuestionState.PINNED:
            return (ExpectationsNote(f"{weights}: {accused.reason}; no worker answers question {question} soundly"),)
        source = entry.why
        self._wrong_lately.clear()  # they were wrong by the withdrawn expectation
        entry.withdrawals += alike > 0 or len(self._sets) != 2  # two sets that differ say nothing about the question
        self._turn(question, QuestionCause.WITHDRAWN if entry.withdrawals < WITHDRAWALS_MAX else QuestionCause.UNSTABLE)
        waiting = [place[1] for place in self._juries if place[0] == question]
        self._juries = {place: jury for place, jury in self._juries.items() if place[0] != question}
        note = ExpectationsNote(
            f"what question {question} expects ({source}) is withdrawn: {weights} answers otherwise, {alike} like it,"
            f" no more as expected: {accused.reason}",
            grave=source == QuestionCause.GIVEN,
        )
        entry.refuted = f"{weights} answers otherwise, {alike} like it: {accused.reason}" if note.grave else ""
        again = tuple(AskSet(each, question, "what it was judged by is withdrawn") for each in (weights, *waiting))
        return (note, *self._learn(question), *again)

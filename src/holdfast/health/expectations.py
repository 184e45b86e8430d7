"""What the workers of one kind must answer to canaries: where that comes from, and who is believed when answers differ.
Pure: no I/O, no clock (`now_s` is passed in, and never goes back).

Theory (facts 22, 23). Weights that rotted answer fluently, and NaN shows in a hundredth of cases: so tokens are
compared and the probabilities beside them. A busy batch adds up in another order, which moves logprobs (in 16 bits by
hundredths of a nat, seldom by a step or two of 1/8) and flips a token where two are near. Hence two rules. A question
is *fit* only if at every place of its answer the first token leads the second by a nat: no batch flips that. And
logprobs have a band: half that lead for any one of them, a fifth of the band for their mean, because rounding scatters
and rot pushes. What moves neither a token nor a logprob of any question is not found here.

What is expected comes with the card (tokens, and a range of their logprobs), or is learnt: it is what more than half of
the sets of weights answer alike, two at least. A worker alone is believed if its load was verified. Votes count per set
of weights, for an active and its standby share theirs and rot together. All is held per `Key`: another build, dtype or
device rounds otherwise.

A card's question is fit as any other is: that it leads by its margin is seen in the first answers to it, and one that
does not is dropped and told.

An expectation can be wrong too (a bad card, a build that changed under its old name), and then everybody differs from
it at once. So a difference is only an accusation: the other sets are asked the same question. Who gives the expected
answer speaks against the accused, who gives the accused's own speaks for it, and without more of the first nobody is
convicted: the expectation is withdrawn, told, and learnt anew. Where there is one set and no other, its own earlier
answer is the witness: the same load once gave it and does not now. But what one set was believed because it was alone
is one word against another's, and withdrawn too. Sets that differ, with no majority for any answer, are *disputed*
until a third speaks, one goes or is loaded anew, or one answers otherwise when it is asked again.

Always true: `TABLE` is every change of a question's state; nobody is convicted by its vote, without a witness or by one
other's word alone; the witness is not convicted itself, so of several sets one at least never is; a convicted set does
not vote, and is convicted once, unless it was acquitted since.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast.core.requests import TokenLogprobs
from holdfast.health.bounds import Count, UnixS

LOGPROB_MAX = 0.01  # below 0 by definition; sums of exponentials round
JURY_S = 60.0  # that an accusation waits for the others: each may have a round of retries before (`canary.TRY_S`)
WITHDRAWALS_MAX = 3  # a question whose expectation was withdrawn so often is not asked for its answer any more
PINNED_ENOUGH = 4  # questions whose answers are known: enough to see other rows of the weights at each turn
ASKED_AT_ONCE = 4  # questions that a load is asked one after the other; and if none of them was good for anything:
ASKED_AT_ONCE_MAX = 12
CONVICTED_MAX = 64  # convicted loads that are remembered: whoever maps them again must hear of it
TOP = 5  # alternatives to ask for at each place: with eight tokens, forty numbers


@dataclass(frozen=True, slots=True)
class Band:
    """How far logprobs may lie from what is expected, and how far the first token must be ahead; in nats."""

    one: float
    mean: float  # of all, without their signs
    margin: float  # at least twice `one`: two tokens that move towards each other do not change places


# Four steps of bfloat16 logits up to 32. Busy batches of an 8B model moved them by up to 0.26, an answer's by 0.05 on
# average (bench/results/engine-gpu.json, canaries-8b).
WIDE = Band(0.5, 0.1, 1.0)
BANDS = {
    "float32": Band(0.05, 0.01, 1.0),  # or TF32, with steps of 1/64
    "exact": Band(0.01, 0.002, 0.1),  # of an engine whose answers no batch can move: the sim's
}


@dataclass(frozen=True, slots=True)
class Key:
    """What must be the same for answers to be the same."""

    card: str  # checksum
    build: str  # of the engine
    dtype: str
    device: str  # kind
    questions: str = ""  # those that its card brings, by a name of their own; empty: none


@dataclass(frozen=True, slots=True)
class Question:
    """To be asked at temperature 0, with `TOP` logprobs, and past an end of text."""

    prompt: tuple[int, ...]
    tokens: int = 8


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # at each place, best first; empty: the engine tells none
    within: tuple[float, float] | None = None  # of what a card expects: each token's logprob lies in this range


def answer_of(tokens: Sequence[int], logprobs: Iterable[TokenLogprobs] | None) -> Answer:
    """An answer as workers give it."""
    return Answer(tuple(tokens), tuple(tuple((t, lp) for t, lp in entry.top) for entry in logprobs or ()))


def is_fit(answer: Answer, band: Band) -> bool:
    """Whether every token was the first by the band's margin, so that no batch flips it."""
    return len(answer.top) == len(answer.tokens) > 0 and all(
        len(top) > 1 and top[0][0] == token and top[0][1] - top[1][1] >= band.margin
        for token, top in zip(answer.tokens, answer.top, strict=True)
    )


def is_close(expected: Answer, answer: Answer, band: Band) -> bool:
    """Return True if an answer does not lead by the margin where it was to be compared: it may differ by rounding."""
    for wanted, said, top in zip(expected.tokens, answer.tokens, answer.top, strict=False):
        if wanted != said:
            listed = dict(top)
            return wanted in listed and max(listed.values()) - listed[wanted] < band.margin
    return bool(answer.top) and not is_fit(answer, band)


def flaw_of(answer: Answer) -> str:
    """What no sound engine answers, whatever it was asked."""
    values = [value for top in answer.top for _, value in top]
    bad = next((value for value in values if not math.isfinite(value) or value > LOGPROB_MAX), None)
    return "" if bad is None else f"a logprob of {bad:g}"


def difference(expected: Answer, answer: Answer, band: Band) -> str:
    """How an answer differs from what is expected, by more than a busy batch explains; empty: it does not."""
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
        # What is not listed is at most what the last that is listed has: it moved by so much at least.
        least = min(listed.values(), default=0.0)
        for token, want in wants:
            move = abs(listed[token] - want) if token in listed else max(0.0, want - least)
            if not move <= band.one:  # NaN too
                return f"the logprob of {token} at place {place} is off by {move:.2f}"
            moves.append(move)
    mean = sum(moves) / len(moves) if moves else 0.0
    return f"logprobs are off by {mean:.2f} on average" if mean > band.mean else ""


def _outside(expected: Answer, answer: Answer, band: Band) -> str | None:
    """Return which token's logprob is out of the card's range, by more than a busy batch explains; None: none."""
    if expected.within is None:
        return None
    low, high = expected.within
    for place, (token, top) in enumerate(zip(answer.tokens, answer.top, strict=False)):
        value = dict(top).get(token)
        if value is not None and not low - band.one <= value <= high + band.one:
            return f"the logprob of {token} at place {place} is {value:.2f}, expected {low:g} to {high:g}"
    return None


# -- states


class State(StrEnum):
    LEARNING = "learning"  # nothing is expected yet
    PINNED = "pinned"
    UNFIT = "unfit"  # asked no more, where there is another


class Cause(StrEnum):
    GIVEN = "given with the card"
    AGREED = "agreed on"
    VERIFIED = "from a verified load"
    CLOSE = "its margins are too small"
    WITHDRAWN = "withdrawn"
    UNSTABLE = "withdrawn too often"


TABLE: dict[State, dict[Cause, State]] = {
    State.LEARNING: {
        Cause.GIVEN: State.PINNED,
        Cause.AGREED: State.PINNED,
        Cause.VERIFIED: State.PINNED,
        Cause.CLOSE: State.UNFIT,
    },
    State.PINNED: {Cause.WITHDRAWN: State.LEARNING, Cause.UNSTABLE: State.UNFIT, Cause.CLOSE: State.UNFIT},
    State.UNFIT: {},
}


# -- what happens


@dataclass(frozen=True, slots=True)
class Sets:
    """All sets of weights of this key that are there, each by a name that no other load has."""

    present: Mapping[str, bool]  # whether its load was verified: its bytes compared with the source's


@dataclass(frozen=True, slots=True)
class Heard:  # a worker with these weights gave a whole answer, to whatever purpose it was asked
    weights: str
    question: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Accused:
    """It answered wrongly again and again (`canary.Accuse`)."""

    weights: str
    question: int
    asked_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Acquitted:
    """These weights are as they were written: it was a process, or a device, that answered wrongly with them."""

    weights: str


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline_s` has come."""


Event = Sets | Heard | Accused | Acquitted | Tick


# -- what is to be done


@dataclass(frozen=True, slots=True)
class AskSet:
    """Ask one worker with these weights this question, now."""

    weights: str
    question: int
    reason: str


@dataclass(frozen=True, slots=True)
class Convict:
    """These weights are not what they were: every worker that has them failed a canary, asked then, as WRONG."""

    weights: str
    asked_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    reason: str
    grave: bool = False  # an operator must read it: what the card expects does not hold


Effect = AskSet | Convict | Note


@dataclass(slots=True)
class Entry:
    """One question as it stands; plain data."""

    state: State = State.LEARNING
    why: str = ""
    expected: Answer | None = None
    given: list[str] = field(default_factory=list)  # sets of weights that gave the expected answer
    withdrawals: Count = 0
    refuted: str = ""  # why what the card expects is not asked for any more; empty: it is, or the card says nothing
    disputed: list[str] = field(default_factory=list)  # sets that gave answers of which none has a majority


@dataclass(frozen=True, slots=True)
class Record:
    """What must outlive the process that keeps this; plain data. Votes and accusations come again."""

    key: Key
    questions: tuple[Question, ...]
    entries: tuple[Entry, ...]
    convicted: tuple[str, ...]
    at_unix_s: UnixS = 0.0  # when it was written: when its last worker left, if none is there


@dataclass(slots=True)
class _Jury:
    accused: Accused
    until_s: float
    # By set: it gave what is expected; else, whether it gave what the accused did.
    right: set[str] = field(default_factory=set)
    alike: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)


class Expectations:
    """Of one key. `given`: what the card says must be answered, by question."""

    __slots__ = (
        "_band", "_convicted", "_doubted", "_entries", "_heard", "_juries", "_sets", "_split", "key", "questions",
    )  # fmt: skip

    def __init__(self, key: Key, questions: Sequence[Question], given: Mapping[int, Answer] | None = None) -> None:
        assert questions
        self.key = key
        self.questions = tuple(questions)
        self._band = BANDS.get(key.dtype, WIDE)
        self._entries = [Entry() for _ in self.questions]
        self._sets: dict[str, bool] = {}
        self._heard: list[dict[str, Answer]] = [{} for _ in self.questions]  # by set, the last
        self._convicted: dict[str, None] = {}  # in order
        self._doubted: set[str] = set()  # whose last answer to a known question was wrong
        self._juries: dict[tuple[int, str], _Jury] = {}
        self._split: set[int] = set()  # questions of which it was told that there is no majority
        for question, answer in (given or {}).items():
            fit = not answer.top or is_fit(answer, self._band)  # without logprobs it is seen when it is answered
            if fit and len(answer.tokens) == self.questions[question].tokens:
                self._pin(question, answer, Cause.GIVEN, [])
            else:
                self._turn(question, Cause.CLOSE)

    def __repr__(self) -> str:
        return f"{self.key.card}: {Counter(str(entry.state) for entry in self._entries)}"

    @property
    def next_deadline_s(self) -> float | None:  # of a `Tick`, if nothing else happens before
        return min((jury.until_s for jury in self._juries.values()), default=None)

    @property
    def disputed(self) -> set[str]:  # sets of which nobody knows whether they are right: others answer otherwise
        there = self._sets.keys() - self._convicted.keys()
        return {each for entry in self._entries if len(apart := there & set(entry.disputed)) > 1 for each in apart}

    def record(self) -> Record:
        entries = (replace(e, given=list(e.given), disputed=list(e.disputed)) for e in self._entries)
        return Record(self.key, self.questions, tuple(entries), tuple(self._convicted))

    def restore(self, record: Record) -> bool:  # False: it is not about these questions, and nothing is taken
        if (record.key, record.questions, len(record.entries)) != (self.key, self.questions, len(self.questions)):
            return False
        self._entries = [replace(e, given=list(e.given), disputed=list(e.disputed)) for e in record.entries]
        self._convicted = dict.fromkeys(record.convicted)
        return True

    def question_at(self, turn: int) -> int:
        """What to ask at this turn: one whose answer is known, or may become so, where there is one."""
        for state in (State.PINNED, State.LEARNING, State.UNFIT):
            if places := [place for place, entry in enumerate(self._entries) if entry.state is state]:
                return places[turn % len(places)]
        raise AssertionError("there are questions")

    def expected_of(self, question: int, weights: str) -> Answer | None:
        """What stands expected of these weights, by which they are known to be right; nothing while accused."""
        return None if any(who == weights for _, who in self._juries) else self._entries[question].expected

    def judge(self, question: int, answer: Answer) -> str:
        """What is wrong with an answer, in words; empty: nothing that is known."""
        expected = self._entries[question].expected
        if (flaw := flaw_of(answer)) or expected is None:
            return flaw
        return "" if self._may_be_rounding(question, answer) else difference(expected, answer, self._band)

    def _may_be_rounding(self, question: int, answer: Answer) -> bool:
        """Return True if the card expects what this answer does not lead with by its margin."""
        expected = self._entries[question].expected
        return expected is not None and not expected.top and is_close(expected, answer, self._band)

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take what happened; what is to be done, in order."""
        match event:
            case Sets():
                return self._see(event, now_s)
            case Heard() if event.weights in self._sets:
                return self._hear(event, now_s)
            case Accused() if event.weights in self._sets and event.weights not in self._convicted:
                return self._accuse(event, now_s)
            case Acquitted():
                self._convicted.pop(event.weights, None)
            case Tick():
                return self._decide(now_s)
        return ()

    def _see(self, event: Sets, now_s: float) -> tuple[Effect, ...]:
        self._sets = dict(event.present)
        for entry, heard in zip(self._entries, self._heard, strict=True):
            entry.given = [each for each in entry.given if each in self._sets]
            for gone in heard.keys() - self._sets.keys():
                del heard[gone]
        self._juries = {key: jury for key, jury in self._juries.items() if key[1] in self._sets}
        self._doubted &= self._sets.keys()
        learnt = [effect for question in range(len(self.questions)) for effect in self._learn(question)]
        return (*learnt, *self._decide(now_s))

    def _hear(self, event: Heard, now_s: float) -> tuple[Effect, ...]:
        question, weights = event.question, event.weights
        if len(event.answer.tokens) < self.questions[question].tokens:
            return ()  # cut short: that is no answer, and says nothing of the weights
        entry, first = self._entries[question], weights not in self._heard[question]
        if entry.state is State.LEARNING and weights in self._doubted and len(self._sets) == 1:
            return ()  # no other could say that this is as wrong
        self._heard[question][weights] = event.answer
        close = self._drop_close(question)
        if not (wrong := self.judge(question, event.answer)) and entry.expected and weights not in entry.given:
            entry.given.append(weights)
            entry.why = str(Cause.AGREED) if entry.why == Cause.VERIFIED and entry.given[1:] else entry.why
        if wrong or entry.expected:
            (self._doubted.add if wrong else self._doubted.discard)(weights)
        for (asked, accused), jury in self._juries.items():
            if asked == question and accused != weights:
                self._testify(jury, event, wrong)
        effects = [*close, *self._learn(question), *self._decide(now_s)]
        if weights not in self._convicted and (unasked := self._unasked(weights, first)) is not None:
            effects.append(AskSet(weights, unasked, "what it answers is to be learnt"))
        elif weights not in entry.disputed and (apart := self._in_dispute(weights)) is not None:
            effects.append(AskSet(weights, apart, "others answered otherwise"))
        return tuple(effects)

    def _in_dispute(self, weights: str) -> int | None:
        """Return a question to which these weights and others gave different answers. It is asked again after every
        other check: a process that answered wrongly may be gone, and then the dispute ends."""
        asked = (place for place, entry in enumerate(self._entries) if weights in entry.disputed)
        return next(asked, None) if weights in self.disputed else None

    def _unasked(self, weights: str, first: bool) -> int | None:
        """The next question that these weights were not asked, if it is time: of a fresh load some at once, known ones
        first (what it answers then is its witness later); then one to learn after each check, until enough are."""
        # A card's may be few and short: so many are learnt besides.
        pinned = sum(entry.state is State.PINNED and entry.why != Cause.GIVEN for entry in self._entries)
        asked = sum(weights in heard for heard in self._heard)
        for place, entry in enumerate(self._entries if first and asked < ASKED_AT_ONCE else ()):
            if entry.state is State.PINNED and weights not in (*entry.given, *self._heard[place]):
                return place
        if pinned >= PINNED_ENOUGH or (first and asked >= (ASKED_AT_ONCE if pinned else ASKED_AT_ONCE_MAX)):
            return None
        for question, entry in enumerate(self._entries):
            if entry.state is State.LEARNING and weights not in self._heard[question]:
                return question
        return None

    def _drop_close(self, question: int) -> tuple[Effect, ...]:
        """Drop a card's question that most sets answer without leading by the margin."""
        sets = self._sets.keys() - self._convicted.keys()
        heard = {each: answer for each, answer in self._heard[question].items() if each in sets}
        if 2 * sum(self._may_be_rounding(question, answer) for answer in heard.values()) <= len(sets):
            return ()
        self._juries = {place: jury for place, jury in self._juries.items() if place[0] != question}
        self._turn(question, Cause.CLOSE)
        self._entries[question].refuted = str(Cause.CLOSE)
        return (Note(f"question {question}, which the card brings, is not asked any more: {Cause.CLOSE}", grave=True),)

    # -- learning

    def _learn(self, question: int) -> tuple[Effect, ...]:
        if self._entries[question].state is not State.LEARNING:
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
            self._pin(question, votes[best[0]], Cause.VERIFIED, best)
            return (Note(f"question {question} is pinned: {Cause.VERIFIED}"),)
        entry, apart = self._entries[question], sorted(votes) if len(sets) > 1 else []
        if len(votes) < len(sets) or (question in self._split and entry.disputed == apart):
            return ()
        entry.disputed = apart
        self._split.add(question)
        why = "there is no other to compare it with" if len(sets) == 1 else "there is no majority for any answer"
        return (Note(f"nothing is expected of question {question}: {why}"),)

    def _largest_party(self, votes: Mapping[str, Answer]) -> list[str]:
        """The sets that answer alike, first the one with most that are like it; the earliest, if equal."""
        parties = [
            [each, *(other for other in votes if other != each and not self._differ(votes[each], votes[other]))]
            for each in votes
        ]
        return max(parties, key=len, default=[])

    def _differ(self, one: Answer, another: Answer) -> bool:
        return bool(difference(one, another, self._band))

    def _agree(self, question: int, party: list[str], votes: Mapping[str, Answer]) -> tuple[Effect, ...]:
        if not is_fit(votes[party[0]], self._band):
            return self._drop(question)
        self._pin(question, votes[party[0]], Cause.AGREED, party)
        told = Note(f"question {question} is pinned: {Cause.AGREED} by {len(party)} of {len(self._sets)}")
        return (told, *(AskSet(each, question, "it was outvoted") for each in votes if each not in party))

    def _pin(self, question: int, answer: Answer, cause: Cause, given: list[str]) -> None:
        self._turn(question, cause)
        self._entries[question].expected = answer
        self._entries[question].given = list(given)

    def _drop(self, question: int) -> tuple[Effect, ...]:
        self._turn(question, Cause.CLOSE)
        return (Note(f"question {question} is not asked any more: {Cause.CLOSE}"),)

    def _turn(self, question: int, cause: Cause) -> None:
        entry = self._entries[question]
        entry.state = TABLE[entry.state][cause]
        entry.why, entry.expected, entry.given, entry.disputed = str(cause), None, [], []
        self._split.discard(question)

    # -- accusations

    def _accuse(self, event: Accused, now_s: float) -> tuple[Effect, ...]:
        place = (event.question, event.weights)
        answer = self._heard[event.question].get(event.weights)
        if place in self._juries or answer is None or not self.judge(event.question, answer):
            return ()  # it is being looked into, or what it was judged by is not expected any more
        self._juries[place] = _Jury(event, now_s + JURY_S)
        others, why = self._sets.keys() - {event.weights}, f"{event.weights} answers otherwise"
        return (*(AskSet(each, event.question, why) for each in sorted(others)), *self._decide(now_s))

    def _testify(self, jury: _Jury, event: Heard, wrong: str) -> None:
        accused = self._heard[event.question].get(jury.accused.weights)
        for side in (jury.right, jury.alike, jury.other):
            side.discard(event.weights)
        alike = accused is not None and not self._differ(accused, event.answer)
        (jury.right if not wrong else jury.alike if alike else jury.other).add(event.weights)

    def _decide(self, now_s: float) -> tuple[Effect, ...]:
        """Close every accusation on which the others have spoken, or that waited long enough for them."""
        effects: list[Effect] = []
        for place, jury in list(self._juries.items()):
            if place not in self._juries:
                continue  # with the expectation that was withdrawn meanwhile
            others = self._sets.keys() - {jury.accused.weights}
            right, alike = (jury.right & others) - self._convicted.keys(), jury.alike & others
            spoke = (jury.right | jury.alike | jury.other) & others
            if 2 * len(right) <= len(others) and len(spoke) < len(others) and now_s < jury.until_s:
                continue
            del self._juries[place]
            given = jury.accused.weights in self._entries[jury.accused.question].given
            alone = len(right) == 1 and not given and self._is_one_word(jury.accused)
            if (len(right) > len(alike) and not alone) or (not others and given):
                effects += self._convict(jury.accused, len(right))
            elif spoke or not others:
                effects += self._withdraw(jury.accused, len(alike))
            else:
                effects.append(Note(f"{jury.accused.weights}: {jury.accused.reason}; and no other set answered"))
        return tuple(effects)

    def _is_one_word(self, accused: Accused) -> bool:
        """Whether what it is judged by is another set's word, who was believed alone. A flaw needs no witness."""
        answer = self._heard[accused.question].get(accused.weights)
        return self._entries[accused.question].why == Cause.VERIFIED and not (answer and flaw_of(answer))

    def _convict(self, accused: Accused, witnesses: int) -> tuple[Effect, ...]:
        self._convicted = dict.fromkeys([*self._convicted, accused.weights][-CONVICTED_MAX:])
        self._juries = {place: jury for place, jury in self._juries.items() if place[1] != accused.weights}
        who = f"other sets that answer as expected: {witnesses}" if witnesses else "this load answered otherwise before"
        return (Convict(accused.weights, accused.asked_s, f"{accused.reason}; {who}"),)

    def _withdraw(self, accused: Accused, alike: int) -> tuple[Effect, ...]:
        question, weights, entry = accused.question, accused.weights, self._entries[accused.question]
        if entry.state is not State.PINNED:
            return (Note(f"{weights}: {accused.reason}; nobody answers question {question} soundly"),)
        source = entry.why
        self._doubted.clear()  # by what is no longer expected
        entry.withdrawals += alike > 0 or len(self._sets) != 2  # two that differ say nothing of the question
        self._turn(question, Cause.WITHDRAWN if entry.withdrawals < WITHDRAWALS_MAX else Cause.UNSTABLE)
        waiting = [place[1] for place in self._juries if place[0] == question]
        self._juries = {place: jury for place, jury in self._juries.items() if place[0] != question}
        told = Note(
            f"what question {question} expects ({source}) is withdrawn: {weights} answers otherwise, {alike} like it,"
            f" no more as expected: {accused.reason}",
            grave=source == Cause.GIVEN,
        )
        entry.refuted = f"{weights} answers otherwise, {alike} like it: {accused.reason}" if told.grave else ""
        again = tuple(AskSet(each, question, "what it was judged by is withdrawn") for each in (weights, *waiting))
        return (told, *self._learn(question), *again)

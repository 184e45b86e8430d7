"""Workers with their canaries, expectations, standings and breakers, coupled as whoever keeps them couples them, on
time made up here. How each worker answers is said by the story."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from holdfast.health import breaker as b
from holdfast.health import canary as c
from holdfast.health import expectations as x
from holdfast.health import standing as s

KEY = x.Key("card-1", "build-1", "bfloat16", "gpu-1")
QUESTIONS = (x.Question((1, 2, 3), 4), x.Question((4, 5, 6), 4))


def answer(question: int, *, shift: int = 0, drift: float = 0.0, margin: float = 2.0, tokens: int = 4) -> x.Answer:
    """An engine's answer; `shift` makes it another one, `drift` moves all its logprobs down."""
    said = tuple(1000 + 100 * question + 10 * place + shift for place in range(tokens))
    top = tuple(tuple((token + rank, -0.1 - margin * rank - drift) for rank in range(x.TOP)) for token in said)
    return x.Answer(said, top)


@dataclass(slots=True)
class Worker:
    """How it answers now."""

    weights: str
    load: int = 1
    shift: int = 0  # 0: rightly
    drift: float = 0.0
    margin: float = 2.0
    took_s: float = 0.02
    factor: float = 1.0
    occupancy: float = 0.0
    how: str = "answers"  # or: silent, lost, refuses
    moving: bool = False
    cut_off: bool = False  # whoever asks reaches nobody


class CanarySet:
    """A set of workers of one key, and whoever keeps them."""

    def __init__(
        self,
        workers: dict[str, str],
        *,
        verified: bool = False,
        given: dict[int, x.Answer] | None = None,
        say: Callable[[str, str], None] = lambda name, text: None,
    ) -> None:
        self.now = 100.0
        self.workers = {name: Worker(weights) for name, weights in workers.items()}
        self.canaries = {name: c.Canary(name, lambda: 0.5) for name in workers}
        self.standings = {name: s.Standing() for name in workers}
        self.breakers = {name: b.Breaker(name, lambda: 0.5) for name in workers}
        self.expectations = x.Expectations(KEY, QUESTIONS, given)
        self.verified = verified
        self.say = say
        self.asks: list[tuple[float, str, int]] = []
        self.effects: list[tuple[str, object]] = []
        self._queue: list[tuple[float, int, str, c.Event]] = []
        self._count = 0

    def named(self, weights: str) -> str:
        """The name of these weights that no other load has."""
        loads = [worker.load for worker in self.workers.values() if worker.weights == weights]
        return f"{weights}.{max(loads)}"

    def of(self, kind: type) -> list[tuple[str, object]]:
        return [(name, effect) for name, effect in self.effects if isinstance(effect, kind)]

    def quarantined(self) -> set[str]:
        return {name for name, standing in self.standings.items() if standing.quarantined}

    # -- what happens

    def begin(self, *names: str, serving: bool = False) -> None:
        """They are there, with the weights they have."""
        for name in names or tuple(self.workers):
            worker = self.workers[name]
            present = s.Present(worker.load, serving)
            self.tell_expectations(x.Sets(self.sets()))
            self.tell_canary(name, c.Present(worker.load))
            self.tell_standing(name, present)

    def sets(self) -> dict[str, bool]:
        return {self.named(worker.weights): self.verified for worker in self.workers.values()}

    def reload(self, name: str) -> None:
        """Fresh weights, for all that share them."""
        worker = self.workers[name]
        sharing = [each for each, other in self.workers.items() if other.weights == worker.weights]
        fresh = worker.load + 1
        for each in sharing:
            self.workers[each].load = fresh
        self.begin(*sharing)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            due_s, due = self.next_due()
            if due_s > until:
                break
            self.now = max(self.now, due_s)
            due()
        self.now = until

    def next_due(self) -> tuple[float, Callable[[], None]]:
        dues: list[tuple[float, Callable[[], None]]] = []
        if self._queue:
            dues.append((self._queue[0][0], self._deliver))
        for name, canary in self.canaries.items():
            if canary.next_deadline_s is not None:
                dues.append((canary.next_deadline_s, lambda name=name: self.tell_canary(name, c.Tick())))
        for name, breaker in self.breakers.items():
            if breaker.next_deadline_s is not None:
                dues.append((breaker.next_deadline_s, lambda name=name: self.tell_breaker(name, b.Tick())))
        for name, standing in self.standings.items():
            if (due_s := s.next_deadline_s(standing)) is not None:
                dues.append((due_s, lambda name=name: self.tell_standing(name, s.Tick())))
        if self.expectations.next_deadline_s is not None:
            dues.append((self.expectations.next_deadline_s, lambda: self.tell_expectations(x.Tick())))
        return min(dues, key=lambda due: due[0], default=(float("inf"), lambda: None))

    def restart(self) -> None:
        """Whoever keeps them dies with all that is out, and another goes on from what was written down."""
        canaries = {name: canary.record() for name, canary in self.canaries.items()}
        written = msgspec.json.encode((canaries, self.expectations.record(), self.standings))
        kept = msgspec.json.decode(written, type=tuple[dict[str, c.Record], x.Record, dict[str, s.Standing]])
        self._queue.clear()
        self.canaries = {name: c.Canary(name, lambda: 0.5) for name in self.workers}
        for name, record in kept[0].items():
            self.canaries[name].restore(record)
        self.expectations = type(self.expectations)(KEY, QUESTIONS)
        assert self.expectations.restore(kept[1])
        self.standings = {name: s.restore(standing, self.now) for name, standing in kept[2].items()}
        self.begin()

    # -- the four machines, coupled

    def tell_canary(self, name: str, event: c.Event) -> None:
        for effect in self.canaries[name].step(event, self.now):
            self.effects.append((name, effect))
            match effect:
                case c.Send():
                    self._send(name, effect)
                case c.Accuse():
                    self.say(name, f"is accused: {effect.reason}")
                    weights = self.named(self.workers[name].weights)
                    self.tell_expectations(x.Accused(weights, effect.question, effect.asked_s, effect.reason))
                case c.AskPeers():
                    for other in self.others(name):
                        self.tell_canary(other, c.Asked(f"{name} is late", peer=True))
                case c.Note():
                    self.say(name, f"note: {effect.reason}")
                case b.CanaryAnswered():
                    self.tell_breaker(name, effect)
                case s.CanaryPassed():
                    self.say(name, "passed")
                    self.tell_standing(name, effect)
                case s.CanaryFailed():
                    self.say(name, f"failed, {effect.failing}: {effect.reason}")
                    self.tell_standing(name, effect)

    def tell_expectations(self, event: x.Event) -> None:
        for effect in self.expectations.step(event, self.now):
            self.effects.append(("", effect))
            match effect:
                case x.AskSet():
                    first = next(name for name, w in self.workers.items() if self.named(w.weights) == effect.weights)
                    self.tell_canary(first, c.Asked(effect.reason, question=effect.question))
                case x.Convict():
                    self.say("set", f"convicts {effect.weights}: {effect.reason}")
                    for name, worker in self.workers.items():
                        if self.named(worker.weights) == effect.weights:
                            failed = s.CanaryFailed(worker.load, effect.asked_s, s.Failing.WRONG, effect.reason)
                            self.tell_standing(name, failed)
                case x.Note():
                    self.say("set", f"note: {effect.reason}")

    def tell_standing(self, name: str, event: s.Event) -> None:
        self.standings[name], effects = s.step(self.standings[name], event, self.now)
        for effect in effects:
            self.effects.append((name, effect))
            match effect:
                case s.Weigh():
                    self.say(name, f"{effect.status.name}, weight {effect.weight:g}: {effect.reason}")
                case s.Quarantine():
                    self.say(name, "quarantined")
                case s.MoveStreams():
                    self.say(name, "its streams are moved")
                case s.AskCanary():
                    self.tell_canary(name, c.Asked(effect.reason))

    def tell_breaker(self, name: str, event: b.Event) -> None:
        for effect in self.breakers[name].step(event, self.now):
            self.effects.append((name, effect))
            match effect:
                case b.AskCanary():
                    self.tell_canary(name, c.Asked("its breaker is half open", number=effect.number))
                case b.Opened() | b.Closed():
                    self.say(name, f"its breaker {type(effect).__name__.lower()}: {effect.reason}")
                    self.tell_standing(name, effect)

    # -- the world

    def others(self, name: str) -> list[str]:
        return [other for other in self.workers if other != name]

    def _send(self, name: str, effect: c.Send) -> None:
        worker = self.workers[name]
        question, asked = self.expectations.question(effect.question)
        self.asks.append((self.now, name, question))
        took_s = worker.took_s * worker.factor
        if worker.how == "lost":
            return
        if worker.how == "refuses":
            self._later(0.0, name, c.Refused(effect.number))
        elif worker.how == "silent" or took_s > effect.within_s:
            sound = not worker.cut_off
            self._later(effect.within_s, name, c.Unanswered(effect.number, "nothing came", worker.moving, sound))
        else:
            answered = c.Answered(effect.number, question, took_s, asked.tokens, worker.occupancy)
            self._later(took_s, name, answered)

    def _later(self, seconds: float, name: str, event: c.Event) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, name, event))

    def _deliver(self) -> None:
        _, _, name, event = heapq.heappop(self._queue)
        canary = self.canaries[name]
        if isinstance(event, c.Answered):
            worker = self.workers[name]
            said = answer(event.question, shift=worker.shift, drift=worker.drift, margin=worker.margin)
            self.tell_expectations(x.Heard(self.named(worker.weights), event.question, said))
            wrong = self.expectations.judge(event.question, said)
            peers = c.pace_of((self.canaries[other] for other in self.others(name)), canary.began_s or self.now)
            event = replace(event, wrong=wrong, peers=peers)
        self.tell_canary(name, event)

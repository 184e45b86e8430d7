"""Workers and a `HealthController`, on a made-up clock, beside a store that holds the written records and nothing
else. How each worker answers is said by the story."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from holdfast.control import health_controller as hc
from holdfast.control.health_controller import HealthController
from holdfast.control.worker_health import HealthLimits, WorkerFacts
from holdfast.core.ports import DeadlineReached
from holdfast.health import expectations as x
from holdfast.health import standing as s
from holdfast.health.records import HealthRecord

KEY = x.Key("card-1", "build-1", "bfloat16", "gpu-1")
E = TypeVar("E", bound=hc.HealthEffect)
QUESTIONS = (x.CanaryQuestion((1, 2, 3), 4), x.CanaryQuestion((4, 5, 6), 4))


def answer(
    question: int, *, shift: int = 0, drift: float = 0.0, margin: float = 2.0, tokens: int = 4
) -> x.CanaryAnswer:
    """An engine's answer; `shift` makes it another one, `drift` moves all its logprobs down."""
    said = tuple(1000 + 100 * question + 10 * place + shift for place in range(tokens))
    top = tuple(tuple((token + rank, -0.1 - margin * rank - drift) for rank in range(x.TOP)) for token in said)
    return x.CanaryAnswer(said, top)


@dataclass(slots=True)
class Worker:
    """One process, and how it answers now."""

    weights: str
    load: int = 1
    active: bool = True
    group: str = ""
    device: str = ""
    shift: int = 0  # 0: rightly
    only: int | None = None  # wrongly, but this question only
    drift: float = 0.0
    margin: float = 2.0
    took_s: float = 0.02
    factor: float = 1.0
    occupancy: float = 0.0
    how: str = "answers"  # or: silent, lost, refuses, fails
    moving: bool = False
    cut_off: bool = False  # control reaches no worker


class HealthRig:
    """Holds a set of workers of one key, their health controller, and the store."""

    def __init__(
        self,
        workers: dict[str, str],
        *,
        verified: bool = False,
        given: dict[int, x.CanaryAnswer] | None = None,
        draw: float = 0.5,  # of every jitter
        say: Callable[[str, str], None] = lambda name, text: None,
    ) -> None:
        self.draw = draw
        self.now = 100.0
        self.workers = {name: Worker(weights) for name, weights in workers.items()}
        self.verified = verified
        self.known = tuple((question, (given or {}).get(place)) for place, question in enumerate(QUESTIONS))
        self.say = say
        self.asks: list[tuple[float, str, int]] = []
        self.effects: list[hc.HealthEffect] = []
        self.store: dict[str, bytes] = {}  # health records, by path
        self.expected: dict[str, bytes] = {}
        self.devices: dict[str, hc.DeviceRead] = {}  # what stands of each
        self.controller = self.begin_controller()
        self._queue: list[tuple[float, int, hc.HealthEvent]] = []
        self._count = 0

    def begin_controller(self) -> HealthController:
        return HealthController("control-1", lambda: self.draw, HealthLimits())

    @property
    def standings(self) -> dict[str, s.WorkerStanding]:
        return self.controller.standings

    @property
    def expectations(self) -> x.ExpectationsRecord:
        (record,) = self.expected.values()
        return msgspec.json.decode(record, type=x.ExpectationsRecord)

    def record(self, name: str) -> HealthRecord:
        """As it is written down."""
        return msgspec.json.decode(self.store[name], type=HealthRecord)

    def told(self, what: hc.NoticeKind) -> list[str]:
        """Of whom that was told, or what, where it is about no one."""
        told = [effect for effect in self.effects if isinstance(effect, hc.Notice) and effect.what is what]
        return [effect.path or effect.text for effect in told]

    def asks_of(self, name: str) -> list[float]:
        """When it was asked."""
        return [at_s for at_s, path, _ in self.asks if path == name]

    def of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def quarantined(self) -> set[str]:
        return {name for name, standing in self.standings.items() if standing.quarantined}

    # -- what happens

    def begin(self, *names: str, serving: bool = False) -> None:
        """They are there, with the weights they have."""
        for name in names or tuple(self.workers):
            self.tell(hc.WorkerFound(name, self.facts(name), serving))

    def facts(self, name: str) -> WorkerFacts:
        worker = self.workers[name]
        return WorkerFacts(
            name=name,
            model=KEY.card,
            group=worker.group,
            build=KEY.build,
            dtype=KEY.dtype,
            kind=KEY.device,
            devices=(worker.device,) if worker.device else (),
            weights=worker.weights,
            load=worker.load,
            verified=self.verified,
            vocabulary=2000,
            known=self.known,
            active=worker.active,
        )

    def reload(self, name: str) -> None:
        """Load fresh weights, for all that share them."""
        worker = self.workers[name]
        sharing = [each for each, other in self.workers.items() if other.weights == worker.weights]
        fresh = worker.load + 1
        for each in sharing:
            self.workers[each].load = fresh
        self.begin(*sharing)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            tick_s = self.controller.next_deadline_s
            heard_s = self._queue[0][0] if self._queue else None
            due_s = min((each for each in (tick_s, heard_s) if each is not None), default=until + 1)
            if due_s > until:
                break
            self.now = max(self.now, due_s)
            self.tell(heapq.heappop(self._queue)[2] if due_s == heard_s else DeadlineReached())
        self.now = until

    def restart(self, *, serving: bool = False) -> None:
        """End the controller with all that is out; another goes on from what was written down."""
        self._queue.clear()
        self.controller = self.begin_controller()
        records = {path: msgspec.json.decode(record, type=HealthRecord) for path, record in self.store.items()}
        expected = {
            name: msgspec.json.decode(record, type=x.ExpectationsRecord) for name, record in self.expected.items()
        }
        self.controller.restore(records, expected, self.now)
        for told in self.devices.values():
            self.tell(told)
        self.begin(serving=serving)

    def tell(self, event: hc.HealthEvent) -> None:
        if isinstance(event, hc.DeviceRead):
            self.devices[event.device] = event
        for effect in self.controller.step(event, self.now):
            self.effects.append(effect)
            match effect:
                case hc.WriteVerdict():
                    self.store[effect.path] = msgspec.json.encode(effect.record)
                case hc.WriteExpectations():
                    self.expected[effect.name] = msgspec.json.encode(effect.record)
                    if effect.record is None:
                        del self.expected[effect.name]
                case hc.ForgetWorker():
                    del self.store[effect.path]
                    self.say(effect.path, "is forgotten")
                case hc.AskWorker():
                    self._ask(effect)
                case hc.FlagAnswers():
                    self.say(effect.path, f"what it made since {effect.since_s:.1f} is flagged")
                case hc.Notice():
                    self.say(effect.path or "set", _line(effect))

    # -- the world

    def _ask(self, ask: hc.AskWorker) -> None:
        question = next(place for place, each in enumerate(QUESTIONS) if each.prompt == ask.prompt)
        self.asks.append((self.now, ask.path, question))
        worker = self.workers[ask.path]
        assert worker.active, ask
        took_s = worker.took_s * worker.factor
        if worker.how == "lost":
            return
        if worker.how == "fails":
            self._later(
                took_s, hc.AnswerMissing(ask.path, ask.number, "EngineShutdown: it failed", moving=True, failed=True)
            )
            return
        if worker.how == "refuses":
            self._later(0.0, hc.CanaryRefused(ask.path, ask.number))
        elif worker.how == "silent" or took_s > ask.within_s:
            silence = hc.AnswerMissing(ask.path, ask.number, "nothing came", worker.moving, not worker.cut_off)
            self._later(ask.within_s, silence)
        else:
            shift = worker.shift if worker.only in (None, question) else 0
            said = answer(question, shift=shift, drift=worker.drift, margin=worker.margin)
            self._later(took_s, hc.AnswerReceived(ask.path, ask.number, said, took_s, worker.occupancy))

    def _later(self, seconds: float, event: hc.HealthEvent) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, event))


_WORDS = {
    hc.NoticeKind.PASSED: "passed",
    hc.NoticeKind.QUARANTINED: "quarantined",
    hc.NoticeKind.MOVED: "its streams are moved",
    hc.NoticeKind.DRAINED: "is drained",
    hc.NoticeKind.FAILED: "failed, {}",
    hc.NoticeKind.NOTE: "note: {}",
    hc.NoticeKind.ACCUSED: "is accused: {}",
    hc.NoticeKind.CONVICTED: "convicts {}",
    hc.NoticeKind.ACQUITTED: "acquits {}",
    hc.NoticeKind.BREAKER: "its breaker {}",
}


def _line(told: hc.Notice) -> str:
    return _WORDS.get(told.what, "{}").format(told.text)

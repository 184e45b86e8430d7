"""One worker in control's keeping: what is known of it, and its machines, as one record. Pure.

Theory. A worker is a process under one path in the store; what it answers with are *weights*, which other processes may
read too and which outlive it. A load of them has a name of its own (`Ward.loaded`), and a verdict on answers belongs to
that name. The machines count loads for each worker by themselves: the next number for any name that is not the last,
so that weights which are replaced by others are a fresh load too, whatever the engine's own count says.

Always true: `record` is all that another process needs to go on (`restored`); what is not found, asleep or lost has no
question out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.health import breaker as b
from holdfast.health import canary as c
from holdfast.health import expectations as x
from holdfast.health import standing as s
from holdfast.health.device_faults import SWITCHES
from holdfast.health.history import History
from holdfast.health.last_resort import doubt_of
from holdfast.health.outliers import Pace
from holdfast.health.records import HealthRecord, device_name
from holdfast.spec.health import HealthSettings
from holdfast.wire.messages import Welcome

# A record whose worker is not found by then is a dead one's. Longer than workers take to register again with a store
# that was away, because its streams move.
FIND_S = 60.0
# A control that begins has talked to all workers that can be reached by then. Until it has, it takes no worker for the
# last of its set, nor for one of several.
SOUGHT_S = 10.0
# Weights that were asked to be loaded anew and are not by then are asked again: whoever does it knows by the load's
# number that it has, or is about to. Also between loads that fail one after the other; twice as long each time, and up
# to a fifth more by chance: a device that computes wrongly is not mended by loads, and each costs its host minutes.
RELOAD_S = 60.0
RELOAD_S_MAX = 1800.0
RELOAD_JITTER = 0.2
# A worker that is held to be slow and has no traffic to show otherwise is asked this often: within `outliers.GAP_S`.
REPACE_S = 5.0
# A worker without traffic, for canaries that it owes, is asked this often whatever they cost: they take nobody's time.
OWED_S = 30.0
# And looked at this often: where no other can serve it is asked at once.
OWED_LOOK_S = 1.0
# A worker that serves only because too few others can is tried this often, whatever it costs: its streams have no other
# place, and it is well again as soon as it passes.
PROBE_S = 3.0
# A worker that was asked to hand over to its standby has done so by then, or it does not.
RELIEF_S = 10.0
# Engines of one group are not asked to hand over more often: where each of them fails, the fault is not the engine's.
RELIEF_AGAIN_S = 60.0
# Answers in a row, known to be right, that end a quarantine whose weights are as they were written.
RIGHTS = 5
DEVICES_MAX = 64  # of one worker: more than any machine has GPUs
TRIED = frozenset({s.Cause.CANARY_FAILING, s.Cause.UNCHECKED})  # what an answer ends
FAILING = frozenset({s.Cause.BREAKER, s.Cause.CANARY_FAILING})
SLOWNESS = frozenset({s.Cause.SLOW, s.Cause.CRAWLING})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a person may set."""

    canary: c.Limits = field(default_factory=c.Limits)
    breaker: b.Limits = field(default_factory=b.Limits)
    dead_s: float = 3600.0  # that the record of a dead worker is kept, in seconds: people read it


def limits_of(settings: HealthSettings) -> Limits:
    """As a person set them."""
    asked = c.Limits(interval_s=settings.canary_interval_s, share=settings.canary_share)
    failed = b.Limits(settings.breaker_failures, settings.breaker_open_s, settings.breaker_canaries)
    return Limits(asked, failed)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself (`wire.messages.Welcome`, its record and its card). Only what concerns comparing
    is believed; health it must earn."""

    name: str  # as `holdfast ps` calls it
    model: str  # its card's checksum
    group: str = ""
    build: str = ""
    dtype: str = ""
    kind: str = ""  # of its device
    devices: tuple[str, ...] = ()  # whose faults are its own (`devices_of`); none: not known
    weights: str = ""  # equal for engines that read the same memory; empty: its own
    load: int = 0  # of those weights; 0: it does not say
    verified: bool = False  # its bytes were compared with the source's at that load
    vocabulary: int = 0
    known: tuple[tuple[x.Question, x.Answer | None], ...] = ()  # what it is asked, with what its card expects
    questions: str = ""  # the name of what its card brings of these (`ModelCard.canaries_name`)
    active: bool = True  # False: it stands by, and is not asked

    @property
    def key(self) -> x.Key:
        """What must be the same for answers, and paces, to be compared."""
        return x.Key(self.model, self.build, self.dtype, self.kind, self.questions)


def facts_of(name: str, welcome: Welcome) -> WorkerFacts:
    """What a worker said when it was connected to; `name`: from its record."""
    return WorkerFacts(
        name=name,
        model=welcome.checksum,
        group=welcome.group,
        build=welcome.build,
        dtype=welcome.dtype,
        kind=welcome.device,
        weights=welcome.weights,
        load=welcome.load,
        verified=welcome.load > 0,  # engines that say it compare what they load with its source
        vocabulary=welcome.vocabulary,
        active=welcome.active,
        devices=devices_of(welcome.process.boot_id, [pci for pci, _ in welcome.gpus[:DEVICES_MAX]]),
    )


def devices_of(boot_id: str, pcis: Sequence[str]) -> tuple[str, ...]:
    """Return the devices whose faults are this worker's: its GPUs, and for several of them the NVLink switches too."""
    return tuple(device_name(boot_id, one) for one in (*pcis, *((SWITCHES,) if len(pcis) > 1 else ())))


class Ward:
    """One worker. Mutable: `Wards` steps its machines."""

    __slots__ = (
        "_dead_kept_s", "accused", "asked", "breaker", "canary", "dead_s", "errors", "facts", "failed_s", "find_s",
        "known", "loaded", "look_s", "moved_s", "owed_s", "pace_s", "paced_s", "path", "probe_s", "relief_s",
        "relief_until_s", "reload_in_dispute", "reload_next_s", "reloads", "rights", "sought_until_s", "spare",
        "standing", "verified",
    )  # fmt: skip

    def __init__(self, path: str, jitter: Callable[[], float], limits: Limits) -> None:
        self.path = path
        self._dead_kept_s = limits.dead_s
        self.facts: WorkerFacts | None = None  # None: not found, or lost
        self.known = HealthRecord(name=path)  # as it was last written down
        self.loaded = ""  # the name of its weights' load
        self.standing = s.Standing()
        self.breaker = b.Breaker(path, jitter, limits.breaker)
        self.canary = c.Canary(path, jitter, limits.canary)
        self.errors: History = ()
        self.spare = False
        self.reloads = 0  # in a row, also of loads that followed each other soon
        self.reload_next_s = 0.0
        self.reload_in_dispute = False  # it was last asked before any verdict
        self.accused = False  # it was this process that answered wrongly, not only one with the same weights
        self.verified = False  # since then its weights were found to be as they were written
        self.rights = 0  # right answers in a row since then
        self.failed_s = 0.0  # when it was last asked because requests failed on it
        self.probe_s = 0.0  # when it is tried again, while it is the last resort
        self.relief_s = 0.0  # when it was asked to hand over to its standby; 0: it was not
        self.relief_until_s: float | None = None  # it must have done so by then
        self.asked: tuple[int, int] | None = None  # the number of the try that is out, and its question
        self.moved_s = 0.0  # when its clients last had tokens
        self.pace_s: float | None = None  # seconds per token of its last canary
        self.paced_s = 0.0  # when its pace was last measured, by whatever
        self.owed_s = 0.0  # when it was last asked for a canary that it owes
        self.look_s = 0.0  # when it is looked whether it is to be asked for the next
        self.find_s: float | None = None  # it must be found by then
        self.sought_until_s: float | None = None  # it may yet be found by then, and is not
        self.dead_s: float | None = None  # when it was lost

    def __repr__(self) -> str:
        return f"{self.name}: {self.standing}"

    @property
    def name(self) -> str:
        return self.facts.name if self.facts else self.known.name

    @property
    def group(self) -> str:
        return self.facts.group if self.facts else self.known.group

    @property
    def awake(self) -> bool:
        return self.facts is not None and self.facts.active

    @property
    def model(self) -> str:
        return self.facts.model if self.facts else self.known.model

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs it is on, where that is known."""
        return self.facts.devices if self.facts else self.known.devices

    @property
    def reload_again_s(self) -> float | None:
        """When its weights are asked to be loaded anew, if they are not by then."""
        return self.reload_next_s if self.awake and self.in_doubt else None

    @property
    def in_doubt(self) -> bool:
        """Whether its weights are to be compared with what was written."""
        wrong = self.standing.quarantined and not self.verified
        return wrong or s.Cause.DISPUTED in self.standing.causes

    @property
    def set_of(self) -> tuple[str, str]:
        """The workers that can take its streams have the same: a namespace, and a card."""
        return self.path.rpartition("/")[0], self.model

    @property
    def verdict(self) -> tuple[float, int | None] | None:
        """The weight that it earned and how doubtful it is; None: it is not there, asleep or silent."""
        if not self.awake or s.Cause.LOST in self.standing.causes:
            return None
        return s.earned(self.standing), doubt_of(self.standing.causes, self.standing.heard_s)

    @property
    def probed(self) -> bool:
        """Whether it is tried every few seconds."""
        return self.awake and (self.standing.last_resort or self.misled)

    @property
    def failing(self) -> bool:
        """Whether it fails requests, which another process with the same weights may not."""
        return not FAILING.isdisjoint(self.standing.causes)

    @property
    def tried(self) -> bool:
        """Whether right answers would lift what is held against it."""
        causes = self.standing.causes
        return not TRIED.isdisjoint(causes) or (self.standing.quarantined and self.verified)

    @property
    def misled(self) -> bool:
        """Whether this process answers wrongly with weights that are right."""
        return self.standing.quarantined and self.verified and self.accused

    @property
    def pace(self) -> Pace:
        """As its standing has it."""
        if s.Cause.CRAWLING in self.standing.causes:
            return Pace.CRAWLING
        return Pace.SLOW if s.Cause.SLOW in self.standing.causes else Pace.NORMAL

    @property
    def repace_s(self) -> float | None:
        """When it is asked whether it is still slow, if traffic does not show it before."""
        slow = self.awake and not SLOWNESS.isdisjoint(self.standing.causes)
        return self.paced_s + REPACE_S if slow else None

    @property
    def owing(self) -> bool:
        """Whether it has no traffic only because of canaries that it owes."""
        held = (s.WEIGHTS[s.TABLE[s.Cause(cause)][0]] for cause in self.standing.causes)
        return self.awake and self.standing.owed > 1 and all(held)

    @property
    def forget_s(self) -> float | None:
        return None if self.dead_s is None else self.dead_s + self._dead_kept_s

    def deadlines_s(self) -> Iterator[float]:
        """When something is due."""
        if self.awake:
            due = (self.canary.next_deadline_s, self.breaker.next_deadline_s, s.next_deadline_s(self.standing))
            yield from (each for each in due if each is not None)
        if self.owing:
            yield self.look_s
        if self.probed:
            yield self.probe_s
        bounds = (self.find_s, self.forget_s, self.relief_until_s, self.sought_until_s)
        more = (*bounds, self.reload_again_s, self.repace_s)
        yield from (each for each in more if each is not None)

    def record(self, now_s: float, by: str) -> HealthRecord:
        weights, _, load = self.loaded.rpartition("@")
        return HealthRecord(
            name=self.name,
            group=self.group,
            model=self.model,
            weights=weights,
            load=int(load or 0),
            devices=self.devices,
            reloads=self.reloads,
            reload_next_s=self.reload_next_s,
            verified=self.verified,
            last_resort=self.standing.last_resort,
            standing=self.standing,
            breaker=self.breaker.record(),
            # A check that is under way is not in it.
            canary=self.canary.record() if self.asked is None else self.known.canary,
            spare=self.spare,
            errors=self.errors,
            at_unix_s=now_s,
            by=by,
        )

    def restore(self, record: HealthRecord, now_s: float) -> None:
        """Go on from what another process wrote down."""
        self.known = record
        self.loaded = name_of(record.weights, record.load)
        self.standing = s.restore(record.standing, now_s)
        self.breaker.restore(record.breaker, now_s)
        self.canary.restore(record.canary)
        self.spare, self.reloads, self.verified = record.spare, record.reloads, record.verified
        self.accused, self.errors = record.verified, record.errors
        self.reload_next_s = min(record.reload_next_s, now_s + RELOAD_S_MAX * (1 + RELOAD_JITTER))
        if s.Cause.GONE in self.standing.causes:
            self.dead_s = self.standing.since_s
        else:
            self.find_s, self.sought_until_s = now_s + FIND_S, now_s + SOUGHT_S

    def is_older(self, facts: WorkerFacts) -> bool:
        """Whether facts are of an earlier load of the same weights than is known: they come late."""
        weights, _, load = self.loaded.rpartition("@")
        return bool(load) and weights == (facts.weights or self.path) and (facts.load or 1) < int(load)


def next_reload(due_s: float, reloads: int, now_s: float, jitter: float) -> tuple[float, int]:
    """A load is asked for that was due then, after so many in a row: when the next is due, and how many it is now.
    `jitter` is from [0, 1). Where none was needed for long, it is the first again."""
    count = 1 if now_s > due_s + RELOAD_S_MAX else reloads + 1
    pause_s = min(RELOAD_S_MAX, RELOAD_S * 2.0 ** min(count - 1, 16))
    return now_s + pause_s * (1 + RELOAD_JITTER * jitter), count


def were_asked(loaded: str, wards: Iterable[Ward]) -> bool:
    """Whether that load of weights was asked before, whoever had it."""
    return any(ward.loaded == loaded and ward.standing.heard_s for ward in wards)


def errors_before(facts: WorkerFacts, wards: Iterable[Ward]) -> History:
    """Return the errors of the dead process that a new one replaces: the last that had its name, for its model."""
    same = [ward for ward in wards if ward.dead_s is not None and (ward.name, ward.model) == (facts.name, facts.model)]
    return max(same, key=lambda ward: ward.dead_s or 0.0).errors if same else ()


def name_of(weights: str, load: int) -> str:
    """The name of one load of weights, which no other load has."""
    return f"{weights}@{load}" if weights else ""

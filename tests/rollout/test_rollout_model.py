"""Whatever is asked for, breaks and dies: a rollout keeps its promises, and ends when the world is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.rollout import machine as m
from holdfast.rollout.machine import ReplicaStage
from holdfast.rollout.revision import Part, Revision
from holdfast.rollout.trial import RequestCounts
from tests.rigs.worlds.rollout import Driver, World

SETS = st.sampled_from("abcd")
FATES = st.sampled_from(["good", "good", "crashes", "refused", "canary", "never", "errors", "breaker"])
# Where they are 0 together, nothing can be replaced but in its place.
HOW = st.sampled_from([(1, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 0)])


@st.composite
def parts(draw: st.DrawFn) -> Part:
    surge, unavailable = draw(HOW)
    set_id, replicas, paused = draw(SETS), draw(st.integers(0, 3)), draw(st.integers(0, 9)) == 0
    how = {"deadline_s": 30.0, "drain_s": 6.0, "last_drain_s": 15.0, "swap_drain_s": 2.0}
    return Part(set_id=set_id, replicas=replicas, surge=surge, unavailable=unavailable, paused=paused, **how)


WISHES = st.fixed_dictionaries({"worker": parts()}, optional={"frontend": parts()})


class RolloutModel(RuleBasedStateMachine):
    """A driver and its world, against promises that are counted anew from the world itself."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.driver = Driver(self.world)
        self.undone = Counter[int]()  # how often, by revision

    @initialize(places=st.none() | st.integers(1, 4), roomy=st.booleans(), parts=WISHES)
    def begin(self, places: int | None, roomy: bool, parts: dict[str, Part]) -> None:
        """Something is in place."""
        if places is not None:
            self.world.places["worker"] = places
        if roomy:
            self.world.roomy.add("worker")
        self.apply(parts, "a", "good", 12)

    # -- what happens

    @rule(parts=WISHES, set_id=SETS, fate=FATES, count=st.integers(0, 25))
    def apply(self, parts: dict[str, Part], set_id: str, fate: str, count: int) -> None:
        """Ask for another revision; a set may turn out bad, or good."""
        self.world.fates[set_id] = fate
        self.driver.desired = Revision(number=self.driver.desired.number + 1, parts=parts, watch_s=3.0)
        self.pass_time(count)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        parts = {key: msgspec.structs.replace(part, paused=paused) for key, part in self.driver.desired.parts.items()}
        self.driver.desired = msgspec.structs.replace(self.driver.desired, parts=parts)

    @precondition(lambda self: self.world.bodies)
    @rule(data=st.data(), kills=st.booleans())
    def one(self, data: st.DataObject, kills: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.bodies)))
        if kills:
            self.world.kill(name)
        else:
            self.world.notch(name)

    @precondition(lambda self: self.world.bodies)
    @rule(data=st.data(), weight=st.sampled_from([0.0, 0.5, 1.0]), admitted=st.booleans())
    def weigh(self, data: st.DataObject, weight: float, admitted: bool) -> None:
        """Verdicts and admissions come and go."""
        body = self.world.bodies[data.draw(st.sampled_from(sorted(self.world.bodies)))]
        if body.stage is ReplicaStage.SERVING:
            body.weight, body.admitted = weight, admitted

    @rule(set_id=SETS, attempts=st.sampled_from([0, 5, 15, 25, 200]), failed=st.integers(0, 4))
    def ask(self, set_id: str, attempts: int, failed: int) -> None:
        """Customers come and go, and now and then a request fails."""
        self.world.traffic[set_id] = RequestCounts(attempts, min(attempts, failed))

    @rule(count=st.integers(1, 12))
    def pass_time(self, count: int) -> None:
        for _ in range(count):
            self.driver.now_s += 1.0
            for name in list(self.world.bodies):
                self.world.notch(name)
            self.step()

    @rule(writes=st.booleans(), carries=st.integers(0, 3))
    def die(self, writes: bool, carries: int) -> None:
        """The driver dies somewhere between its look and its last deed."""
        self.checked(lambda: self.driver.step(writes=writes, carries=carries))
        wish = self.driver.desired
        self.driver = self.driver.next_life()
        self.driver.desired = wish

    @rule()
    def forget(self) -> None:
        """What was written is lost, and with it what was in place, and what was undone."""
        self.driver.written = b""
        wish = self.driver.desired
        self.driver = self.driver.next_life()
        self.driver.desired = wish
        self.undone.clear()

    @rule()
    def step(self) -> None:
        """And then twice more with one look: what is said is said once, and a look says all at once."""
        self.checked(self.driver.step)
        due_s = m.next_deadline_s(self.driver.state)
        assert due_s is None or due_s > self.driver.now_s, "it would be looked at again and again"
        look = self.world.observe(self.driver.desired)
        once, acts = m.step(self.driver.state, look, self.driver.now_s)
        again, more = m.step(once, look, self.driver.now_s)
        assert (again, more) == (once, ()), (acts, more)

    # -- what must be true

    def counting(self) -> list[tuple[str, str]]:
        """Service and set of each that counts."""
        known = self.driver.state.replicas
        there = []
        for name, body in self.world.bodies.items():
            earned = body.weight >= 1.0 or (body.weight > 0 and name in known and known[name].counted)
            there += [(body.service, body.set_id)] * (body.stage is ReplicaStage.SERVING and body.admitted and earned)
        return there

    def checked(self, step: Callable[[], tuple[m.RolloutAction, ...]]) -> None:
        """A step whose deeds keep the floor and the surge, and take nobody away for a set on trial."""
        before, room = self.counting(), {key: self.world.room(key) for key in self.world.places}
        swaps = {body.service for body in self.world.bodies.values() if body.beside in self.world.bodies}
        last, there = self.driver.state, {(body.service, body.set_id) for body in self.world.bodies.values()}
        acts = step()
        after, memory = self.counting(), self.driver.state
        for service, part in memory.target.parts.items():
            cramped = room.get(service, 1) <= 0 or part.surge == part.unavailable == 0 or service in swaps
            floor = part.replicas - max(part.unavailable, 1 if cramped else 0)
            own = {(service, one) for one in "abcd"}
            for those in (own, own - {(service, part.set_id)}) if self.is_on_trial(service) else (own,):
                were, are = (sum(one in those for one in counted) for counted in (before, after))
                assert are >= min(were, floor), (service, those, before, after, acts)
            new = [act for act in acts if isinstance(act, m.StartReplica) and act.service == service and not act.beside]
            if new and not part.paused:  # a lost one comes back while it is paused, wanted or not
                assert len(self.world.housed(service)) <= part.replicas + part.surge, acts
            was_over, is_over = (one.trials.get(service, 0.0) is None for one in (last, memory))
            if is_over and not was_over:
                others = [one for one in there if one[0] == service and one[1] != part.set_id]
                assert not others or self.was_tried(service, part, last.trials.get(service)), (service, self.world)
        self.undone[memory.undone] += memory.undone != last.undone
        assert self.undone[memory.undone] <= 1 or memory.undone == 0
        number = memory.target.number
        assert number not in self.undone or number == 0, "what was undone is not tried again"

    def is_on_trial(self, service: str) -> bool:
        memory = self.driver.state
        is_new = memory.stable is None or memory.stable.sets.get(service) != memory.target.sets[service]
        return is_new and memory.trials.get(service, 0.0) is not None

    def was_tried(self, service: str, part: Part, until_s: float | None) -> bool:
        """Its customers' requests were enough and well, or there were hardly any, or its time is over."""
        traffic = self.world.traffic if service == "worker" else {}
        whole = sum(one.attempts for one in traffic.values())
        failed = sum(one.failed for one in traffic.values())
        own = traffic.get(part.set_id, RequestCounts())
        few = (own.failed + 1) * 20 <= own.attempts or (
            own.failed * (whole - own.attempts) <= 2 * (failed - own.failed) * own.attempts
        )
        late = until_s is not None and self.driver.now_s >= until_s
        return late or whole < 20 or (own.attempts >= 20 and few)

    def settle(self) -> None:
        """Let time pass until nothing changes any more, looking only when something did or a deadline has come."""
        for _ in range(500):
            before = self.driver.state, repr(self.world)
            for name in list(self.world.bodies):
                self.world.notch(name)
            self.step()
            due_s = m.next_deadline_s(self.driver.state)
            if before != (self.driver.state, repr(self.world)):
                self.driver.now_s += 1.0
            elif due_s is None:
                return
            else:
                self.driver.now_s = due_s
        raise AssertionError(f"it never ends: {self.driver.state}")

    def teardown(self) -> None:
        """Left alone it ends, well or stuck; and when the world is well again, with what was asked for in place, or
        with what had been."""
        self.pause(False)
        self.settle()
        assert self.driver.state.phase in (m.RolloutPhase.STEADY, m.RolloutPhase.STUCK)
        self.world.fates.clear()
        self.world.traffic.clear()
        self.world.places.clear()
        for name in list(self.world.bodies):
            self.world.kill(name)
            self.world.bodies[name].crashes = 0
        self.settle()
        memory = self.driver.state
        assert memory.phase is m.RolloutPhase.STEADY, memory
        assert self.is_in_place(), memory
        assert memory.target.number == self.driver.desired.number or memory.undone == self.driver.desired.number
        assert self.driver.step() == ()

    def is_in_place(self) -> bool:
        there = Counter((body.service, body.set_id) for body in self.world.bodies.values() if body.counts)
        wanted = {(key, part.set_id): part.replicas for key, part in self.driver.state.target.parts.items()}
        return there == Counter(wanted) and len(self.world.bodies) == sum(wanted.values())


TestRollouts = RolloutModel.TestCase
TestRollouts.settings = settings(max_examples=40, stateful_step_count=15, suppress_health_check=list(HealthCheck))


@given(
    prefills=st.integers(1, 4),
    decodes=st.integers(1, 5),
    surges=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    only=st.sampled_from(["", "prefill", "decode"]),
    tight=st.sampled_from([(), (), ("prefill",), ("prefill", "decode")]),
)
@settings(max_examples=40)
def test_whole_pairs_never_fall_short(
    prefills: int, decodes: int, surges: tuple[int, int], only: str, tight: tuple[str, ...]
) -> None:
    """From one pair of sets to the next, whatever the numbers: pairs of one revision, counted whole, keep the floor."""

    def wish(number: int, prefill: str, decode: str) -> Revision:
        def part(set_id: str, replicas: int, surge: int, mate: str) -> Part:
            spare = 0 if surge else 1
            return Part(set_id=set_id, replicas=replicas, surge=surge, unavailable=spare, peers=(mate,), drain_s=5.0)

        parts = {
            "prefill": part(prefill, prefills, surges[0], "decode"),
            "decode": part(decode, decodes, surges[1], "prefill"),
        }
        return Revision(number=number, parts=parts, watch_s=1.0)

    sizes = {"prefill": prefills, "decode": decodes}
    world = World(places={service: sizes[service] for service in tight})
    driver = Driver(world)
    driver.desired = first = wish(1, "p", "d")
    list(driver.seconds(12))
    assert driver.state.phase is m.RolloutPhase.STEADY
    driver.desired = second = wish(2, "p" if only == "decode" else "q", "d" if only == "prefill" else "e")
    spares = [surges[0] == 0 or "prefill" in tight, surges[1] == 0 or "decode" in tight]
    floor = 1 - max(Fraction(spares[0], prefills), Fraction(spares[1], decodes))
    for _ in driver.seconds(150):
        share = Fraction(0)
        for revision in (first, second):
            counted = Counter((body.service, body.set_id) for body in world.bodies.values() if body.counts)
            shares = [Fraction(counted[key, one.set_id], one.replicas) for key, one in revision.parts.items()]
            share += min(shares)
        assert share >= floor, world.bodies
        if driver.state.phase is m.RolloutPhase.STEADY:
            break
    assert (driver.state.phase, driver.state.target.number) == (m.RolloutPhase.STEADY, 2)


@given(
    replicas=st.integers(1, 4),
    how=HOW,
    tight=st.sampled_from(["", "", "no room", "beside"]),
    rate=st.sampled_from([0, 2, 4]),
    good=st.integers(0, 10),
)
@settings(max_examples=60)
def test_a_new_set_is_judged_while_the_old_one_is_there(
    replicas: int, how: tuple[int, int], tight: str, rate: int, good: int
) -> None:
    """Customers ask all the time, and of the new set's requests every so manieth fails (0: none): before enough of them
    ended well, or a minute went by, as many of the old ones serve as would without it; and a bad set is undone then."""
    surge, unavailable = how
    world = World(places={"worker": replicas} if tight else {}, roomy={"worker"} if tight == "beside" else set())
    driver = Driver(world)
    wish = Part(set_id="a", replicas=replicas, surge=surge, unavailable=unavailable, drain_s=5.0, deadline_s=30.0)
    driver.desired = Revision(number=1, parts={"worker": wish}, watch_s=1.0)
    list(driver.seconds(12))
    world.traffic["a"] = RequestCounts(200, 0)
    driver.desired = Revision(number=2, parts={"worker": msgspec.structs.replace(wish, set_id="b")}, watch_s=1.0)
    cramped = bool(tight) or surge == unavailable == 0
    floor = replicas - max(unavailable, int(cramped))
    tried_floor = replicas - int(cramped) if surge else floor
    asked = failed = 0
    first_s: float | None = None
    for _ in driver.seconds(200):
        there = Counter(body.set_id for body in world.bodies.values() if body.counts)
        if there["b"] and first_s is None:
            first_s = driver.now_s
        well = asked >= 20 and (failed + 1) * 20 <= asked
        if not well and (first_s is None or driver.now_s < first_s + 60.0) and not driver.state.undone:
            assert there["a"] >= tried_floor, (driver.now_s, world.bodies)
        assert there.total() >= floor, (driver.now_s, world.bodies)
        asked += rate * any(body.weight > 0 for body in world.bodies.values() if body.set_id == "b")
        failed = asked // good if good else 0
        world.traffic["b"] = RequestCounts(asked, failed)
        if driver.state.phase is m.RolloutPhase.STEADY:
            break
    bad = rate > 0 and 0 < good < 20
    assert driver.state.phase is m.RolloutPhase.STEADY
    assert driver.state.undone == (2 if bad else 0), driver.told

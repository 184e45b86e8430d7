"""Two engines, two devices, in every order there is: explored from state to state, with the real machines.

An engine has one rank per device; ranks ask on their own, in any order. An engine commits only when every rank has
what it asked for (loading is collective), and is done when it reads everything. Each engine's next possible step is
a move; all moves of both engines are tried in all orders. A state is *lost* if from there no order of moves ends well:
that is a deadlock, or a circle nobody gets out of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.vault import weights_machine as weights
from holdfast.memory.writer_lock import LoadAction, LoadLook, LoadWatch, plan_load

DEVICES = ("d0", "d1")
FOR_EVER_S = 1e9


@dataclass(frozen=True)
class Engine:
    watch: LoadWatch
    life: int = 0  # how often it was killed


@dataclass(frozen=True)
class World:
    """Everything two engines share. Sessions are numbered by engine and life, so that nobody inherits a lock."""

    devices: tuple[weights.WeightsState, ...]
    engines: tuple[Engine, ...]
    lock: int | None = None
    now_s: float = 0.0
    kills_left: int = 0

    def session(self, who: int) -> int:
        return who + 10 * self.engines[who].life

    def step(self, device: int, event: weights.Event) -> World:
        devices = list(self.devices)
        devices[device], _ = weights.step(devices[device], event, self.now_s)
        return replace(self, devices=tuple(devices))

    def with_engine(self, who: int, engine: Engine) -> World:
        return replace(self, engines=tuple(engine if i == who else e for i, e in enumerate(self.engines)))

    def writes(self, who: int, device: int) -> bool:
        writer = self.devices[device].writer
        return writer is not None and writer.session == self.session(who)

    def reads(self, who: int, device: int) -> bool:
        return self.devices[device].generation_of(self.session(who)) is not None

    def idle(self, who: int, device: int) -> bool:
        return not self.devices[device].lock_role_of(self.session(who))

    def done(self, who: int) -> bool:
        return all(self.reads(who, device) for device in range(len(DEVICES)))


Moves = Callable[[World, int], Iterator[World]]


def commits(world: World, who: int) -> Iterator[World]:
    """All ranks have loaded: each commits, in any order."""
    everywhere = range(len(DEVICES))
    if all(world.writes(who, device) or world.reads(who, device) for device in everywhere):
        yield from (world.step(d, weights.Commit(world.session(who), "h")) for d in everywhere if world.writes(who, d))


def unguarded(world: World, who: int) -> Iterator[World]:
    """Without roles and writer lock: every rank asks rw_or_ro as soon as it is up."""
    for device in range(len(DEVICES)):
        if world.idle(who, device):
            yield world.step(device, weights.RequestLock(world.session(who), "rw_or_ro", FOR_EVER_S))
    yield from commits(world, who)


def guarded(world: World, who: int) -> Iterator[World]:
    """By the policy: look, do what it says, look again."""
    if world.done(who):
        if world.lock == who:
            yield replace(world, lock=None)
        return
    phases = {name: state.phase for name, state in zip(DEVICES, world.devices, strict=True)}
    owner = None if world.lock is None else f"engine {world.lock}"
    watch, plan = plan_load(world.engines[who].watch, LoadLook(phases, owner, world.lock == who), world.now_s)
    seen = world.with_engine(who, replace(world.engines[who], watch=watch))
    if seen != world:
        yield seen
    if plan.action is LoadAction.TAKE_LOCK:
        yield replace(seen, lock=who)
    for device in range(len(DEVICES)):
        yield from ask_by_plan(seen, who, device, plan.action)
    yield from commits(seen, who)


def ask_by_plan(world: World, who: int, device: int, action: LoadAction) -> Iterator[World]:
    session = world.session(who)
    if action is LoadAction.LOAD and any(
        w.session == session and w.mode == "ro" for w in world.devices[device].waiters
    ):
        yield world.step(device, weights.ReleaseLock(session))
    elif world.idle(who, device) and action is LoadAction.LOAD:
        yield world.step(device, weights.RequestLock(session, "rw_or_ro", FOR_EVER_S))
    elif world.idle(who, device) and action in (LoadAction.WAIT, LoadAction.READ):
        yield world.step(device, weights.RequestLock(session, "ro", FOR_EVER_S, wait_for_writer=True))


def killed(world: World, who: int) -> World:
    """SIGKILL, and a restart with nothing but its ENGINE_ID."""
    for device in range(len(DEVICES)):
        world = world.step(device, weights.ReleaseLock(world.session(who)))
    engine = world.engines[who]
    world = world.with_engine(who, Engine(LoadWatch(engine.watch.engine_id, engine.watch.grace_s), engine.life + 1))
    return replace(world, lock=None if world.lock == who else world.lock, kills_left=world.kills_left - 1)


def next_worlds(world: World, moves: Moves) -> list[World]:
    found = [after for who in range(len(world.engines)) for after in moves(world, who)]
    if not found and not ended(world):
        # Nobody can move: time passes, once, past every grace.
        later = replace(world, now_s=world.now_s + 100.0)
        found = [after for who in range(len(world.engines)) for after in moves(later, who)]
    if world.kills_left:
        found += [killed(world, who) for who in range(len(world.engines)) if not world.done(who)]
    return found


def check(world: World) -> None:
    writers = {state.writer.session for state in world.devices if state.writer is not None}
    assert len(writers) <= 1, f"two engines each write a part: {world}"


def ended(world: World) -> bool:
    return all(world.done(who) for who in range(len(world.engines)))


def explore(moves: Moves, grace_s: float, kills: int = 0, checked: bool = True) -> tuple[int, set[World]]:
    """How many states there are, and those of them from which there is no good end."""
    engines = tuple(Engine(LoadWatch(engine_id, grace_s)) for engine_id in range(2))
    start = World(tuple(weights.WeightsState() for _ in DEVICES), engines, kills_left=kills)
    before: dict[World, list[World]] = {start: []}
    todo = [start]
    while todo:
        world = todo.pop()
        if checked:
            check(world)
        for after in next_worlds(world, moves):
            if after not in before:
                before[after] = []
                todo.append(after)
            before[after].append(world)
    good = [world for world in before if ended(world)]
    saved = set(good)
    while good:
        fresh = set(before[good.pop()]) - saved
        saved |= fresh
        good += fresh
    return len(before), set(before) - saved


def test_without_roles_and_lock_two_engines_wait_for_each_other_for_ever() -> None:
    """The deadlock is real: some orders end with each engine writing one device and waiting for the other's."""
    states, lost = explore(unguarded, grace_s=0.0, checked=False)
    assert states > 20
    stuck = [world for world in lost if not next_worlds(world, unguarded)]
    held = {tuple(state.writer.session for state in world.devices if state.writer is not None) for world in stuck}
    assert held == {(0, 1), (1, 0)}


@pytest.mark.parametrize("grace_s", [0.0, 5.0], ids=["racing", "with grace"])
def test_with_roles_and_lock_every_order_ends_well(grace_s: float) -> None:
    """No order of two engines' steps on two devices deadlocks, and never does each write a part."""
    states, lost = explore(guarded, grace_s)
    assert states > 50
    assert not lost


@pytest.mark.parametrize(
    "grace_s", [pytest.param(0.0, id="racing", marks=pytest.mark.long), pytest.param(5.0, id="with grace")]
)
def test_kills_at_any_point_of_any_order_end_well(grace_s: float) -> None:
    """Either engine may be killed at any moment, twice in all, also between two commits: everybody finishes."""
    states, lost = explore(guarded, grace_s, kills=2)
    assert states > 1000
    assert not lost


PHASES = st.sampled_from(["EMPTY", "RW", "COMMITTED", "RO"])
LOOKS = st.builds(
    lambda devices, owner: LoadLook(devices, owner, owner == "me"),
    st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), PHASES, min_size=1),
    st.sampled_from([None, "me", "x", "y"]),
)


@given(st.integers(0, 3), st.lists(st.tuples(LOOKS, st.floats(0, 10)), max_size=12))
def test_the_lock_is_taken_and_used_only_where_it_must_be(engine_id: int, looks: list[tuple[LoadLook, float]]) -> None:
    """LOAD only with the lock; TAKE_LOCK only with a device EMPTY and the lock free; READ exactly when all is there."""
    watch, now_s = LoadWatch(engine_id), 0.0
    for look, seconds in looks:
        now_s += seconds
        watch, plan = plan_load(watch, look, now_s)
        complete = set(look.devices.values()) <= {"COMMITTED", "RO"}
        assert (plan.action is LoadAction.READ) == complete
        if plan.action is LoadAction.LOAD:
            assert look.lock_mine
        if plan.action is LoadAction.TAKE_LOCK:
            assert look.lock_owner is None
            assert "EMPTY" in look.devices.values()
        if plan.look_again_at_s is not None:
            assert plan.look_again_at_s > now_s


@given(st.integers(1, 3), st.integers(0, 50), st.lists(LOOKS, max_size=12))
def test_an_empty_device_is_always_loaded_in_the_end(engine_id: int, at_s: int, looks: list[LoadLook]) -> None:
    """Whatever was seen before: with a device EMPTY and the lock free for the grace time, every engine goes for it."""
    watch = LoadWatch(engine_id)
    for look in looks:
        watch, _ = plan_load(watch, look, float(at_s))
    empty = LoadLook({"d0": "EMPTY", "d1": "RO"}, None)
    watch, _ = plan_load(watch, empty, float(at_s))
    watch, plan = plan_load(watch, empty, at_s + watch.grace_s)
    assert plan.action is LoadAction.TAKE_LOCK


def test_a_loader_that_changes_between_two_looks_counts_as_lost() -> None:
    """A crash and a restart between two looks show as another owner; after the second nobody waits any more."""
    watch = LoadWatch(1)
    for owner in ("engine 0, pid 1", "engine 0, pid 2", "engine 0, pid 3"):
        watch, plan = plan_load(watch, LoadLook({"d0": "RW"}, owner), 0.0)
        assert plan.action is LoadAction.WAIT
    watch, plan = plan_load(watch, LoadLook({"d0": "EMPTY"}, None), 0.0)
    assert plan.action is LoadAction.TAKE_LOCK


def test_a_finished_load_forgets_what_was_lost() -> None:
    """Once everything was committed, an accident long ago does not cost the next loader its grace."""
    watch = LoadWatch(1, writers_lost=5)
    watch, _ = plan_load(watch, LoadLook({"d0": "COMMITTED"}, None), 0.0)
    _, plan = plan_load(watch, LoadLook({"d0": "EMPTY"}, None), 1.0)
    assert (plan.action, plan.look_again_at_s) == (LoadAction.WAIT, 1.0 + watch.grace_s)

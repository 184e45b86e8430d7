"""Who loads: the policy on its own. Its stories are in tests/transcripts, its interleavings beside this file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.writer_policy import Action, Look, Watch, who_loads

PHASES = st.sampled_from(["EMPTY", "RW", "COMMITTED", "RO"])
LOOKS = st.builds(
    lambda devices, owner: Look(devices, owner, owner == "me"),
    st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), PHASES, min_size=1),
    st.sampled_from([None, "me", "x", "y"]),
)


@given(st.integers(0, 3), st.lists(st.tuples(LOOKS, st.floats(0, 10)), max_size=12))
def test_the_lock_is_taken_and_used_only_where_it_must_be(engine_id: int, looks: list[tuple[Look, float]]) -> None:
    """LOAD only with the lock; TAKE_LOCK only with a device EMPTY and the lock free; READ exactly when all is there."""
    watch, now_s = Watch(engine_id), 0.0
    for look, seconds in looks:
        now_s += seconds
        watch, plan = who_loads(watch, look, now_s)
        complete = set(look.devices.values()) <= {"COMMITTED", "RO"}
        assert (plan.action is Action.READ) == complete
        if plan.action is Action.LOAD:
            assert look.lock_mine
        if plan.action is Action.TAKE_LOCK:
            assert look.lock_owner is None
            assert "EMPTY" in look.devices.values()
        if plan.look_again_at_s is not None:
            assert plan.look_again_at_s > now_s


@given(st.integers(1, 3), st.integers(0, 50), st.lists(LOOKS, max_size=12))
def test_an_empty_device_is_always_loaded_in_the_end(engine_id: int, at_s: int, looks: list[Look]) -> None:
    """Whatever was seen before: with a device EMPTY and the lock free for the grace time, every engine goes for it."""
    watch = Watch(engine_id)
    for look in looks:
        watch, _ = who_loads(watch, look, float(at_s))
    empty = Look({"d0": "EMPTY", "d1": "RO"}, None)
    watch, _ = who_loads(watch, empty, float(at_s))
    watch, plan = who_loads(watch, empty, at_s + watch.grace_s)
    assert plan.action is Action.TAKE_LOCK


def test_a_loader_that_changes_between_two_looks_counts_as_lost() -> None:
    """A crash and a restart between two looks show as another owner; after the second nobody waits any more."""
    watch = Watch(1)
    for owner in ("engine 0, pid 1", "engine 0, pid 2", "engine 0, pid 3"):
        watch, plan = who_loads(watch, Look({"d0": "RW"}, owner), 0.0)
        assert plan.action is Action.WAIT
    watch, plan = who_loads(watch, Look({"d0": "EMPTY"}, None), 0.0)
    assert plan.action is Action.TAKE_LOCK


def test_a_finished_load_forgets_what_was_lost() -> None:
    """Once everything was committed, an accident long ago does not cost the next loader its grace."""
    watch = Watch(1, writers_lost=5)
    watch, _ = who_loads(watch, Look({"d0": "COMMITTED"}, None), 0.0)
    _, plan = who_loads(watch, Look({"d0": "EMPTY"}, None), 1.0)
    assert (plan.action, plan.look_again_at_s) == (Action.WAIT, 1.0 + watch.grace_s)

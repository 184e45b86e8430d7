"""What stands in the store of rollouts: nobody's wish is lost, and one writes the memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from holdfast.core.errors import UserError
from holdfast.discovery.keys import DEPLOYMENTS, HISTORY, ROLLOUTS, TRAFFIC
from holdfast.rollout import machine
from holdfast.rollout.machine import DesiredState, ReplicaState, RolloutState
from holdfast.rollout.records import (
    AskedManifest,
    ChangeKind,
    DesiredDeployment,
    LastChange,
    OwnedElsewhere,
    RevisionResult,
    StateWriter,
    add_to_history,
    applied,
    change_desired,
    deleted,
    forget,
    history_key,
    of_kept,
    paused,
    read_desired,
    read_entry,
    resumed,
    scaled_to,
    write_entry,
)
from holdfast.rollout.revision import Part, Revision
from holdfast.rollout.traffic import RolloutRouting, encode_traffic, read_routing, routing_of
from holdfast.store.contract import VALUE_BYTES_MAX, Snapshot, Store, StoreUnavailable
from tests.rigs.store.served import served_store
from tests.rigs.worlds.rollout import part, revision


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with served_store(tmp_path) as (client,):
        yield client


async def keys(store: Store, prefix: str) -> dict[str, bytes]:
    async for event in store.watch(prefix):
        if isinstance(event, Snapshot):
            return event.items
    raise AssertionError("the watch ended")


# -- what is asked for


def manifest_of(text: str, sets: str, **counts: int) -> AskedManifest:
    """A manifest with these sets and numbers of replicas."""
    return AskedManifest(text=text, digest=f"{sets} {counts}", sets=sets, counts=counts)


def test_a_number_of_replicas_is_no_part_of_a_revision() -> None:
    """A manifest that differs only in numbers keeps the revision; `scale` holds until a manifest has another number,
    and an undo of a revision keeps what holds now."""
    first = applied(manifest_of("a", "A", worker=1, frontend=1), 1.0)(None)
    assert (first.revision, first.replicas, first.change) == (1, {"worker": 1, "frontend": 1}, None)
    more = applied(manifest_of("a2", "A", worker=2, frontend=1), 2.0)(first)
    assert (more.revision, more.replicas["worker"]) == (1, 2)
    assert more.change == LastChange(kind=ChangeKind.COUNTS, cause="apply", before={"worker": 1}, after={"worker": 2})
    scaled = scaled_to("d", {"worker": 4}, more.counts)(more)
    assert (scaled.revision, scaled.replicas, scaled.scaled) == (1, {"worker": 4, "frontend": 1}, {"worker": 4})
    assert scaled.change == LastChange(kind=ChangeKind.COUNTS, cause="scale", before={"worker": 2}, after={"worker": 4})
    # Another revision with the same number of replicas leaves what `scale` said; one with another number ends it.
    second = applied(manifest_of("b", "B", worker=2, frontend=1), 3.0)(scaled)
    assert (second.revision, second.replicas["worker"]) == (2, 4)
    assert second.change is not None
    assert (second.change.kind, second.change.before) == (ChangeKind.REVISION, {})
    assert applied(manifest_of("b", "B", worker=3, frontend=1), 3.0)(scaled).replicas["worker"] == 3
    # Back to the first revision's manifest, which had one worker: four stay.
    back = applied(manifest_of("a", "A", worker=1, frontend=1), 4.0, cause="undo to 1", keep_counts=True)(second)
    assert (back.revision, back.replicas) == (3, {"worker": 4, "frontend": 1})
    # A service that is gone and comes again has its manifest's number.
    alone = applied(manifest_of("c", "C", frontend=1), 5.0)(back)
    assert alone.replicas == {"frontend": 1}


def test_scaling_back_to_the_manifest_leaves_nothing_behind() -> None:
    """The manifest's own number is no override; to scale to what there is changes nothing."""
    first = applied(manifest_of("a", "A", worker=2), 1.0)(None)
    more = scaled_to("d", {"worker": 3}, first.counts)(first)
    assert scaled_to("d", {"worker": 3}, first.counts)(more) == more
    back = scaled_to("d", {"worker": 2}, first.counts)(more)
    assert (back.scaled, back.replicas) == ({}, {"worker": 2})
    assert back.change is not None
    assert (back.change.before, back.change.after) == ({"worker": 3}, {"worker": 2})
    with pytest.raises(UserError, match="d has no service 'wroker' any more; it has worker"):
        scaled_to("d", {"wroker": 3}, first.counts)(first)
    with pytest.raises(UserError, match="d is being deleted"):
        scaled_to("d", {"worker": 3}, first.counts)(deleted("d", 2.0)(first))


def test_a_record_of_an_older_version_is_scaled_and_applied_to() -> None:
    """It has no counts and no hash of its sets: those come with the change, and the same manifest keeps its number."""
    asked = manifest_of("a", "A", worker=2)
    old = DesiredDeployment(revision=7, manifest="a", digest=asked.digest)
    assert applied(asked, 1.0)(old).revision == 7
    assert scaled_to("d", {"worker": 3}, {"worker": 2})(old).replicas == {"worker": 3}


def test_other_rules_of_replacing_are_a_change_of_their_own() -> None:
    """They replace nothing and have no number of their own; an undo does not take them for a revision."""
    first = applied(manifest_of("a", "A", worker=2), 1.0)(None)
    rules = AskedManifest(text="a, surge 2", digest="other", sets="A", counts={"worker": 2})
    after = applied(rules, 2.0)(first)
    assert (after.revision, after.change) == (1, LastChange(kind=ChangeKind.RULES, cause="apply"))


def test_what_asks_for_something_else_has_another_number() -> None:
    """What asks for the same keeps its number, whatever remarks are new in it; what was undone and is asked for again
    is tried again."""
    first = applied(manifest_of("a", "A"), 1.0)(None)
    assert (first.revision, first.manifest, first.cause) == (1, "a", "apply")
    remarked = applied(manifest_of("a, remarked", "A"), 2.0)(first)
    assert (remarked.revision, remarked.manifest, remarked.at_unix_s) == (1, "a, remarked", 1.0)
    second = applied(manifest_of("b", "B"), 3.0, cause="undo to 7")(remarked)
    assert (second.revision, second.cause, second.at_unix_s) == (2, "undo to 7", 3.0)
    assert applied(manifest_of("b", "B"), 4.0, undone=1)(second) == second
    assert applied(manifest_of("b", "B"), 4.0, undone=2)(second).revision == 3


def test_a_pause_outlives_an_apply_and_ends_with_a_deletion() -> None:
    """A person's word holds until a person takes it back; what is to go does not wait."""
    first = applied(manifest_of("a", "A"), 1.0)(None)
    held = paused("d", on=True)(first)
    assert applied(manifest_of("b", "B"), 2.0)(held).paused
    assert paused("d", on=False)(held) == first
    gone = deleted("d", 3.0)(held)
    assert (gone.deleted, gone.paused, gone.revision, gone.manifest) == (True, False, 2, "a")
    assert deleted("d", 4.0)(gone) == gone
    back = resumed(applied(manifest_of("b", "B"), 5.0))(held)
    assert (back.paused, back.revision) == (False, 2), "who goes back does not wait"


def test_what_is_being_deleted_or_is_gone_cannot_be_changed() -> None:
    """It would be accepted and lost: it is refused, and says what to do instead."""
    gone = deleted("d", 3.0)(applied(manifest_of("a", "A"), 1.0)(None))
    with pytest.raises(UserError, match="it is being deleted, and that goes on; once it is gone, `holdfast up"):
        applied(manifest_of("a", "A"), 5.0)(gone)
    with pytest.raises(UserError, match="d was deleted meanwhile; `holdfast up -f FILE` starts it again"):
        of_kept("d", applied(manifest_of("a", "A"), 5.0))(None)


@pytest.mark.parametrize("change", [paused("d", on=True), deleted("d", 1.0)], ids=["pause", "delete"])
def test_nothing_there_cannot_be_paused_or_deleted(change: object) -> None:
    """It is told so by name."""
    with pytest.raises(UserError, match="there is no deployment 'd'"):
        change(None)  # type: ignore[operator]


# -- in the store


async def test_of_many_who_ask_at_once_nobody_is_lost(store: Store) -> None:
    """Every one of them has its own number and its place in the history."""
    asked = await asyncio.gather(
        *(change_desired(store, "d", applied(manifest_of(f"m{n}", f"d{n}"), 1.0)) for n in range(8))
    )
    assert sorted(one.revision for one in asked) == list(range(1, 9))
    last = max(asked, key=lambda one: one.revision)
    assert await read_desired(store, "d") == last
    found = {key: read_entry(key, value) for key, value in (await keys(store, HISTORY + "d/")).items()}
    assert {entry.manifest for entry in found.values() if entry is not None} == {f"m{n}" for n in range(8)}
    assert list(found) == sorted(found)


async def test_a_pause_beside_an_apply_keeps_both(store: Store) -> None:
    """Whichever comes second is said of what the first asked for."""
    await change_desired(store, "d", applied(manifest_of("a", "A"), 1.0))
    await asyncio.gather(
        change_desired(store, "d", applied(manifest_of("b", "B"), 2.0)),
        change_desired(store, "d", paused("d", on=True)),
    )
    both = await read_desired(store, "d")
    assert both is not None
    assert (both.revision, both.manifest, both.paused, both.serial) == (2, "b", True, 3)


async def test_who_asks_for_what_is_wanted_writes_nothing(store: Store) -> None:
    """It is no event for whoever watches."""
    first = await change_desired(store, "d", applied(manifest_of("a", "A"), 1.0))
    assert await change_desired(store, "d", applied(manifest_of("a", "A"), 2.0)) == first


async def test_a_manifest_that_does_not_fit_is_refused_by_name(store: Store) -> None:
    """Nothing is written then."""
    with pytest.raises(UserError, match="too long for the store"):
        await change_desired(store, "d", applied(manifest_of("x" * VALUE_BYTES_MAX, "A"), 1.0))
    assert await read_desired(store, "d") is None


async def test_what_nobody_could_have_written_is_told(store: Store) -> None:
    """And not gone on from."""
    bad = msgspec.json.encode(structs.replace(DesiredDeployment(revision=1, manifest="", digest=""), revision=-1))
    await store.put(DEPLOYMENTS + "d", bad, 5)
    with pytest.raises(UserError, match="v1/deployments/d cannot be read"):
        await change_desired(store, "d", applied(manifest_of("a", "A"), 1.0))
    assert await store.get(DEPLOYMENTS + "d", 5) == bad
    assert read_entry("", b"{}") is None


async def test_what_became_of_a_revision_is_not_asked_over(store: Store) -> None:
    """Whoever notes again that it was asked for changes nothing of its fate."""
    asked = await change_desired(store, "d", applied(manifest_of("a", "A"), 1.0))
    await write_entry(store, "d", structs.replace(asked.entry(), result=RevisionResult.UNDONE, why="so"))
    await add_to_history(store, "d", asked)
    value = await store.get(history_key("d", 1), 5)
    entry = read_entry("", value or b"")
    assert entry is not None
    assert (entry.result, entry.why) == (RevisionResult.UNDONE, "so")


async def test_a_deployment_is_forgotten_whole(store: Store) -> None:
    """And only that one: a longer name is another."""
    for name in ("d", "d-e"):
        for number in range(3):
            await change_desired(store, name, applied(manifest_of("a", f"A{number}"), 1.0))
        await StateWriter(store, name).write(machine.NOTHING)
        for key in (f"health/{name}-0123abcd/worker/generate/1", f"refused/{name}-0123abcd/worker/generate/1"):
            await store.put(f"v1/{key}", b"{}", 5.0)
        for key in (f"expected/{name}/k", f"faults/{name}/boot/0", f"level/{name}"):
            await store.put(f"v1/{key}", b"{}", 5.0)
    before = await keys(store, "")
    await forget(store, "d")
    assert (await keys(store, "")).keys() == {key for key in before if "d-e" in key}


# -- the memory


def memory(number: int) -> RolloutState:
    return RolloutState(target=revision(number, worker=part("a*2")), desired_number=number, began_s=50.0)


async def test_a_memory_is_gone_on_from(store: Store) -> None:
    """What one wrote the next one reads."""
    written = StateWriter(store, "d")
    assert await written.open(0.0) == machine.NOTHING
    await written.write(memory(1))
    await written.write(memory(2))
    assert await StateWriter(store, "d").open(60.0) == memory(2)


async def test_two_who_carry_it_out_are_one(store: Store) -> None:
    """The one that was overtaken writes nothing over the other's, now or later."""
    old, new = StateWriter(store, "d"), StateWriter(store, "d")
    for written in (old, new):
        await written.open(0.0)
    await new.write(memory(1))
    for number in (2, 3):
        with pytest.raises(OwnedElsewhere):
            await old.write(memory(number))
    assert await StateWriter(store, "d").open(60.0) == memory(1)


class Mute:
    """A store whose answers to some writes do not come, though they are done."""

    def __init__(self, store: Store, lost: int) -> None:
        self.store = store
        self.lost = lost

    async def get(self, key: str, timeout_s: float) -> bytes | None:
        return await self.store.get(key, timeout_s)

    async def swap(self, key: str, value: bytes, expected: bytes | None, timeout_s: float) -> bool:
        done = await self.store.swap(key, value, expected, timeout_s)
        self.lost -= 1
        if self.lost >= 0:
            raise StoreUnavailable("s", "no answer", "try again")
        return done


async def test_a_write_whose_answer_was_lost_is_ones_own(store: Store) -> None:
    """Whether it was done or not, the next one follows it; nobody is taken for another."""
    written = StateWriter(Mute(store, 2), "d")  # type: ignore[arg-type]
    for number in (1, 2):
        with pytest.raises(StoreUnavailable):
            await written.write(memory(number))
    await written.write(memory(3))
    await written.write(memory(4))
    assert await StateWriter(store, "d").open(60.0) == memory(4)


class Full(Mute):
    """A store that cannot write to its disk: what it takes is read back, and not said to be kept."""

    async def swap(self, key: str, value: bytes, expected: bytes | None, timeout_s: float) -> bool:
        if not await self.store.swap(key, value, expected, timeout_s):
            return False
        if self.lost:
            raise StoreUnavailable("s", "no room", "try again")
        return True


@pytest.mark.parametrize("kept", [None, 1])
async def test_a_store_that_falls_back_to_what_is_on_its_disk_is_no_other(store: Store, kept: int | None) -> None:
    """On a full disk what was written is read back, and is lost with the store's process: the one that wrote it goes on
    from what the store has then. It ends only for what another wrote."""
    full = Full(store, 0)
    written = StateWriter(full, "d")  # type: ignore[arg-type]
    await written.open(0.0)
    if kept is not None:
        await written.write(memory(kept))
    on_disk = await store.get(ROLLOUTS + "d", 5)
    full.lost = 1
    for number in range(10, 16):
        with pytest.raises(StoreUnavailable):
            await written.write(memory(number))
        if number % 3 == 2:
            await (store.delete(ROLLOUTS + "d", 5) if on_disk is None else store.put(ROLLOUTS + "d", on_disk, 5))
    full.lost = 0
    await written.write(memory(4))
    assert await StateWriter(store, "d").open(60.0) == memory(4)
    await store.put(ROLLOUTS + "d", machine.encode(memory(5)), 5)
    with pytest.raises(OwnedElsewhere):
        await written.write(memory(6))


async def test_a_memory_of_another_version_is_left_alone(store: Store) -> None:
    """Whoever cannot read it does not step."""
    await store.put(ROLLOUTS + "d", msgspec.json.encode(structs.replace(memory(1), version=9)), 5)
    with pytest.raises(UserError, match="version 9"):
        await StateWriter(store, "d").open(0.0)


def test_who_gets_no_work_is_read_off_the_memory() -> None:
    """Those that stand by, drain or end, by the names of their pods; none where there is no memory, and nothing at all
    where it cannot be read."""
    wants = dict(zip(("Worker-1", "Worker-2", "Worker-13", "Worker-4"), DesiredState, strict=True))
    replicas = {name: replica("0123abcd", want) for name, want in wants.items()}
    said = read_routing("chat", machine.encode(structs.replace(memory(1), replicas=replicas)))
    assert said is not None
    assert said.idle == ("chat-worker-0123abcd-1", "chat-worker-0123abcd-13", "chat-worker-0123abcd-4")
    assert read_routing("chat", b"") == RolloutRouting()
    assert read_routing("chat", b"{}") is None


async def stored_routing(store: Store) -> RolloutRouting | None:
    """What a frontend reads off the store."""
    state, traffic = [await store.get(key + "d", 5) or b"" for key in (ROLLOUTS, TRAFFIC)]
    return read_routing("d", state, traffic)


def draining(number: int) -> RolloutState:
    return structs.replace(memory(number), replicas={"Worker-1": replica("0123abcd", DesiredState.DRAIN)})


async def test_frontends_route_by_a_record_of_their_own(store: Store) -> None:
    """It is written with the state, and counts although the state has a field that only a newer supervisor knows."""
    await StateWriter(store, "d").write(draining(1))
    routing = routing_of("d", draining(1))
    assert routing.idle == ("d-worker-0123abcd-1",)
    assert await stored_routing(store) == routing
    newer = machine.encode(draining(2))[:-1] + b',"news":1}'
    assert read_routing("d", newer) is None
    written = await store.get(TRAFFIC + "d", 5)
    assert written is not None
    assert read_routing("d", newer, written) == routing, "between the two writes of a newer supervisor"
    assert read_routing("d", newer, encode_traffic("d", draining(2), newer)) == routing
    more = msgspec.json.encode({**msgspec.json.decode(written), "news": [1]})
    assert read_routing("d", machine.encode(draining(1)), more) == routing, "unknown fields are ignored"


async def test_an_older_supervisors_state_counts_beside_a_record_left_behind(store: Store) -> None:
    """It writes the state and no traffic record: what a newer one left there counts no more."""
    await StateWriter(store, "d").write(draining(1))
    await store.put(ROLLOUTS + "d", machine.encode(memory(2)), 5)
    assert await stored_routing(store) == routing_of("d", memory(2))
    await store.delete(ROLLOUTS + "d", 5)
    assert await stored_routing(store) == RolloutRouting()
    assert read_routing("d", b"{}", b"{}") is None
    assert read_routing("d", b"{}", b"[]") is None


class Dying(Mute):
    """A store whose client dies before its write number `lost`."""

    async def swap(self, key: str, value: bytes, expected: bytes | None, timeout_s: float) -> bool:
        self.lost -= 1
        if self.lost <= 0:
            raise StoreUnavailable("s", "dead", "")
        return await self.store.swap(key, value, expected, timeout_s)


@pytest.mark.parametrize("before", [1, 2])
async def test_a_supervisor_killed_between_the_two_writes_is_made_up_for(store: Store, before: int) -> None:
    """The next one writes what is missing, also if it has nothing new to say; frontends read one of the two states at
    each moment."""
    await StateWriter(store, "d").write(memory(1))
    dying = StateWriter(Dying(store, before), "d")  # type: ignore[arg-type]
    await dying.open(0.0)
    with pytest.raises(StoreUnavailable):
        await dying.write(draining(2))
    state = draining(2) if before == 2 else memory(1)
    assert await stored_routing(store) == routing_of("d", state)
    overtaken = StateWriter(store, "d")
    await overtaken.open(60.0)
    following = StateWriter(store, "d")
    assert await following.open(60.0) == state
    await following.write(state)
    assert await store.get(TRAFFIC + "d", 5) == encode_traffic("d", state, machine.encode(state))
    await following.write(memory(4))
    traffic = await store.get(TRAFFIC + "d", 5)
    with pytest.raises(OwnedElsewhere):
        await overtaken.write(draining(3))
    assert await store.get(TRAFFIC + "d", 5) == traffic


def replica(set_id: str, want: DesiredState = DesiredState.SERVE, *, counted: bool = True) -> ReplicaState:
    return ReplicaState(service="Worker", set_id=set_id, pair=(("Worker", set_id),), desired=want, counted=counted)


def test_which_sets_stay_and_which_are_gone_is_read_off_the_memory() -> None:
    """One stays with a replica that has counted, or that drains; one that was in place may come back, and is kept;
    the manifest's word is that of what is worked at."""
    old, new = (
        Revision(number=number, parts={"Worker": Part(set_id=set_id * 8, replicas=1, inexact=set_id == "b")})
        for number, set_id in ((1, "a"), (2, "b"))
    )
    rolling = structs.replace(memory(1), target=new, stable=old)
    drains, ends = (replica("a" * 8, want) for want in (DesiredState.DRAIN, DesiredState.STOP))
    comes, both = replica("b" * 8, counted=False), frozenset({"d-aaaaaaaa", "d-bbbbbbbb"})
    for replicas in ({"Worker-1": ends}, {"Worker-2": comes}):
        said = read_routing("d", machine.encode(structs.replace(rolling, replicas=replicas)))
        assert said is not None
        assert (said.staying, said.kept, said.inexact) == (frozenset(), both, {"d-bbbbbbbb"})
    counts = structs.replace(comes, counted=True)
    steady = structs.replace(rolling, stable=new, replicas={"Worker-2": counts})
    said = read_routing("d", machine.encode(steady))
    assert said is not None
    assert said.staying == said.kept == {"d-bbbbbbbb"}
    leaving = read_routing(
        "d", machine.encode(structs.replace(steady, replicas={"Worker-2": counts, "Worker-1": drains}))
    )
    assert leaving is not None
    assert leaving.kept == leaving.staying == both, "its streams end there"

"""Plays stories of engines, devices and locks against the real machines, on time it makes up itself.

`NAME COMMAND …` is what an engine (or one rank of it) does. A process that dies closes its connections and lets go of
the writer lock; that its pidfd is readable, and so its queued GPU work over, is said apart: `NAME over` (facts 1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from holdfast.memory.vault import pool_machine as pool
from holdfast.memory.vault import warm_machine as warm
from holdfast.memory.vault import weights_machine as weights
from holdfast.memory.vault.weights_machine import Mode
from holdfast.memory.writer_lock import LoadLook, LoadWatch, plan_load
from tests.rigs.transcripts import must_go_as_written, stories

TIMEOUT_S = 30.0


class Story:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self.weights: dict[str, weights.WeightsState] = {}
        self.pools: dict[str, pool.PoolState] = {}
        self.warm: dict[str, warm.WarmState] = {}
        self.names: list[str] = []
        self.lock: str | None = None
        self.watches: dict[str, LoadWatch] = {}

    def play(self, command: str) -> list[str]:
        self.lines = []
        words = [word for word in command.split() if "=" not in word]
        values = {key: value for key, _, value in (word.partition("=") for word in command.split() if "=" in word)}
        if hasattr(self, f"do_{words[0]}"):
            getattr(self, f"do_{words[0]}")(words[1:], values)
        else:
            getattr(self, f"engine_{words[1]}")(words[0], words[2:], values)
        return self.lines

    def say(self, text: str) -> None:
        self.lines.append(f"    {self.now_s:5.1f}  {text}")

    def session(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    # -- the world

    def do_devices(self, words: list[str], values: dict[str, str]) -> None:
        for device in words:
            self.weights[device], self.pools[device] = weights.WeightsState(), pool.PoolState()
            self.warm[device] = warm.WarmState()

    def do_hold(self, words: list[str], values: dict[str, str]) -> None:
        """Vault and keeper both died: the device is empty, and not refilled for so many seconds."""
        refill_from_s = self.now_s + float(words[1])
        self.weights[words[0]], _ = weights.restore((), refill_from_s=refill_from_s)
        self.pools[words[0]], _ = pool.restore(0, None, None, (), refill_from_s)

    def do_restart(self, words: list[str], values: dict[str, str]) -> None:
        """The vault of a device is killed and started again from the keeper's records."""
        for device in words:
            was, pooled = self.weights[device], self.pools[device]
            committed = [*was.superseded, *([] if was.current is None else [was.current])]
            moving, self.warm[device] = self.warm[device], warm.WarmState()
            if not on_device(moving):  # what was in host memory is gone
                committed = []
            self.weights[device], effects = weights.restore(committed, was.readers, was.last_generation)
            self.pools[device], dropped = pool.restore(pooled.last_epoch, pooled.pages, pooled.owner, pooled.mappers)
            self.tell(device, (*effects, *dropped))

    def engine_returns(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """It has reconnected to the restarted vault of a device, which tells it what it may have missed."""
        heard = [f"{news.kind} {news.epoch}" for news in pool.missed(self.pools[words[0]])]
        self.say(f"{words[0]}: {name} hears {', '.join(heard) or 'nothing'}")

    def do_wait(self, words: list[str], values: dict[str, str]) -> None:
        """Time passes; ticks come when the machines asked for them."""
        until_s = self.now_s + float(words[0])
        while True:
            due = [t for w in self.weights.values() if (t := weights.next_deadline_s(w)) is not None]
            due += [t for p in self.pools.values() if (t := pool.next_deadline_s(p)) is not None]
            self.now_s = min([until_s, *due])
            for device in self.weights:
                self.step_weights(device, weights.WeightsTick())
                self.step_pool(device, pool.PoolTick())
            if self.now_s >= until_s:
                return

    def do_status(self, words: list[str], values: dict[str, str]) -> None:
        for device, state in self.weights.items():
            self.say(f"{device} weights: {state!r}")
            if self.warm[device] != warm.WarmState():
                self.say(f"{device} is {self.warm[device]!r}")
            if self.pools[device] != pool.PoolState(refill_from_s=self.pools[device].refill_from_s):
                self.say(f"{device} pool: {self.pools[device]!r}")
        if self.lock is not None:
            self.say(f"writer lock: {self.lock}")

    # -- weights

    def engine_asks(self, name: str, words: list[str], values: dict[str, str]) -> None:
        device, mode = words[0], words[1]
        deadline_s = self.now_s + float(values.get("timeout", TIMEOUT_S))
        patient = "waiting" in words
        ask = weights.RequestLock(self.session(name), cast(Mode, mode), deadline_s, patient, values.get("replace"))
        self.step_weights(device, ask)
        if ask in self.weights[device].waiters:
            self.say(f"{device}: {name} waits")

    def engine_commits(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.step_weights(words[0], weights.Commit(self.session(name), words[1]))

    def engine_donates(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.step_weights(words[0], weights.DonateWeights(self.session(name), words[1]))

    def engine_releases(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """Give up what is held or waited for on a device; also how a wait is cancelled."""
        self.step_weights(words[0], weights.ReleaseLock(self.session(name)))

    def engine_cancels(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """Stop waiting, for weights and pool."""
        self.step_weights(words[0], weights.ReleaseLock(self.session(name)))
        self.step_pool(words[0], pool.CancelAcquire(self.session(name)))

    def engine_dies(self, name: str, words: list[str], values: dict[str, str]) -> None:
        if self.lock == name:
            self.lock = None
            self.say("the writer lock is free")
        for device in self.weights:
            self.step_weights(device, weights.ReleaseLock(self.session(name)))
            self.step_pool(device, pool.ClientGone(self.session(name)))

    # -- levels

    def engine_demotes(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """`size=` of what is committed and `room=` of host memory, in bytes."""
        state, asker = self.weights[words[0]], self.session(name)
        users = [state.writer] if state.writer is not None else []
        sessions = [user.session for user in (*users, *state.readers, *self.pools[words[0]].in_use())]
        named = tuple(dict.fromkeys(self.names[session] for session in sessions))
        number = state.current.number if state.current is not None else None
        size, room = int(values.get("size", "16")), int(values.get("room", "64"))
        self.step_warm(words[0], warm.DemoteWeights(asker, number, size, named, room))

    def engine_promotes(self, name: str, words: list[str], values: dict[str, str]) -> None:
        room = int(values["room"]) if "room" in values else None
        self.step_warm(words[0], warm.PromoteWeights(self.session(name), room))

    def do_copied(self, words: list[str], values: dict[str, str]) -> None:
        self.step_warm(words[0], warm.Copied())

    def do_fails(self, words: list[str], values: dict[str, str]) -> None:
        self.step_warm(words[0], warm.CopyFailed("no memory"))

    def do_settled(self, words: list[str], values: dict[str, str]) -> None:
        """The keeper has done what it was told."""
        self.step_warm(words[0], warm.KeeperUpdated())

    def step_warm(self, device: str, event: warm.Event) -> None:
        self.warm[device], effects = warm.step(self.warm[device], event)
        for effect in effects:
            name = self.names[effect.asker] if isinstance(effect, warm.MoveDone | warm.RefuseMove) else ""
            self.say(f"{device}: {words_of_level(effect, name)}")
            if isinstance(effect, warm.HideWeights | warm.ShowWeights):
                self.step_weights(device, weights.WeightsMoved(away=isinstance(effect, warm.HideWeights)))
            elif isinstance(effect, warm.FreeDevice):
                self.step_pool(device, pool.Discard())

    # -- the writer lock

    def engine_takes(self, name: str, words: list[str], values: dict[str, str]) -> None:
        if self.lock is None:
            self.lock = name
        self.say(f"{self.lock} has the writer lock" + ("" if self.lock == name else f", {name} has not"))

    def engine_lets(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """`lets go`"""
        assert self.lock == name, f"{name} does not have the writer lock"
        self.lock = None

    def engine_looks(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """What an engine decides from what it sees; `id=` its ENGINE_ID, the first time."""
        watch = self.watches.get(name) or LoadWatch(int(values.get("id", "0")))
        phases = {device: state.phase for device, state in self.weights.items()}
        self.watches[name], plan = plan_load(watch, LoadLook(phases, self.lock, self.lock == name), self.now_s)
        again = "" if plan.look_again_at_s is None else f", and looks again at {plan.look_again_at_s:.1f}"
        self.say(f"{name}: {plan.action} ({plan.reason}){again}")

    # -- the pool

    def engine_joins(self, name: str, words: list[str], values: dict[str, str]) -> None:
        epoch = int(values["epoch"]) if "epoch" in values else None
        self.step_pool(words[0], pool.MapperJoined(self.session(name), epoch, self.session(name)))

    def engine_acquires(self, name: str, words: list[str], values: dict[str, str]) -> None:
        deadline_s = self.now_s + float(values.get("timeout", TIMEOUT_S))
        event = pool.PoolRequested(self.session(name), int(values["epoch"]), values.get("geometry", "g1"), deadline_s)
        self.step_pool(words[0], event)
        if event in self.pools[words[0]].waiters:
            self.say(f"{words[0]}: {name} waits")

    def engine_made(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.step_pool(words[0], pool.PoolMade(self.session(name), int(values["epoch"])))

    def engine_quiesced(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.step_pool(words[0], pool.OwnerQuiesced(self.session(name), int(values["epoch"])))

    def engine_regives(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """The owner donates its pool after a total loss."""
        epoch = int(values["epoch"])
        made_epoch = int(values.get("made", epoch))
        event = pool.PoolDonated(self.session(name), epoch, values.get("geometry", "g1"), made_epoch)
        self.step_pool(words[0], event)

    def engine_over(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """Its pidfd is readable."""
        for device in self.pools:
            self.step_pool(device, pool.ProcessOver(self.session(name)))

    # -- telling

    def step_weights(self, device: str, event: weights.Event) -> None:
        self.weights[device], effects = weights.step(self.weights[device], event, self.now_s)
        self.tell(device, effects)

    def step_pool(self, device: str, event: pool.Event) -> None:
        self.pools[device], effects = pool.step(self.pools[device], event, self.now_s)
        self.tell(device, effects)

    def tell(self, device: str, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            name = self.names[effect.session] if hasattr(effect, "session") else ""
            news = pool.news_of(effect)
            told = "" if news is None else f"; news: {news.kind} {news.epoch}"
            self.say(f"{device}: {words_of(effect, name)}{told}")


def words_of(effect: weights.Effect | pool.Effect, name: str) -> str:
    """One effect as a person would say it."""
    match effect:
        case weights.GrantWrite(_, generation, replacing):
            return f"{name} writes generation {generation}" + (f" beside {replacing}" if replacing else "")
        case weights.GrantRead(_, generation, layout_hash):
            return f"{name} reads generation {generation}, {layout_hash}"
        case weights.Committed(_, generation, layout_hash):
            return f"{name} has committed generation {generation}, {layout_hash}, and reads it"
        case weights.Aborted(_, generation):
            return f"generation {generation} of {name} is dropped, uncommitted"
        case weights.TellSuperseded(_, by_hash):
            return f"{name} is told that {by_hash} is newer"
        case weights.AskToLetGo():
            return f"{name} is asked to let go"
        case weights.DropGeneration(generation):
            return f"generation {generation} is dropped, unread"
        case weights.AnswerEmpty():
            return f"{name} is told: empty"
        case weights.RefuseLock(_, code, reason) | pool.RefusePool(_, code, reason):
            return f"{name} is refused, {code}: {reason}"
        case weights.LockTimedOut() | pool.PoolTimedOut():
            return f"{name} has waited long enough"
        case _:
            return words_of_pool(effect, name)


def on_device(moving: warm.WarmState) -> bool:
    """Whether the keeper has a record of the weights."""
    return {
        warm.WeightsLevel.HOT: True,
        warm.WeightsLevel.DEMOTING: not moving.copied,
        warm.WeightsLevel.WARM: False,
        warm.WeightsLevel.PROMOTING: moving.copied,
    }[moving.level]


def words_of_level(effect: warm.Effect, name: str) -> str:
    match effect:
        case warm.HideWeights():
            return "nobody gets the weights"
        case warm.CopyOut(generation):
            return f"generation {generation} is copied to host memory"
        case warm.FreeDevice(generation):
            return f"the device's memory of generation {generation} is let go of"
        case warm.CopyIn(generation):
            return f"generation {generation} is copied to the device"
        case warm.RecordSlabs(generation):
            return f"the keeper gets generation {generation} again"
        case warm.FreeHost():
            return "host memory is let go of"
        case warm.ShowWeights():
            return "the weights can be had"
        case warm.MoveDone():
            return f"{name} is told that it is done"
        case warm.RefuseMove(_, code, reason):
            return f"{name} is refused, {code}: {reason}"


def words_of_pool(effect: pool.Effect, name: str) -> str:
    match effect:
        case pool.GrantPool(_, epoch, made_epoch):
            how = f"adopting the one of epoch {made_epoch}" if made_epoch else "and is to make it"
            return f"{name} owns the pool, epoch {epoch}, {how}"
        case pool.TellPoolMade(epoch):
            return f"the pool of epoch {epoch} is complete"
        case pool.CpuFence(_, epoch):
            return f"cpu fence before epoch {epoch} has passed"
        case pool.GpuFence(_, epoch):
            return f"{name} is told that the gpu fence before epoch {epoch} has passed"
        case pool.Orphaned(epoch):
            return f"the pool of epoch {epoch} is orphaned"
        case pool.DropPool(epoch):
            return f"the pool of epoch {epoch} is dropped"
        case _:
            raise AssertionError(effect)


@stories("memory", least=25)
def test_the_memory_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's lock machines."""
    must_go_as_written(path, Story)

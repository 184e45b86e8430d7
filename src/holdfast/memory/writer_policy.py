"""Who loads weights onto empty devices: one engine's decision from what it sees (pure).

Theory. An engine of several ranks needs all its devices; two engines that each wrote part of them would wait for each
other for ever. So whoever is to write on an EMPTY device first takes the machine-wide writer lock, and only then
asks `rw_or_ro` everywhere; everyone else asks `ro` and waits for a writer. Roles keep the usual start free of races:
ENGINE_ID 0 goes for the lock at once; the others leave it a grace time, counted while a device is EMPTY and nobody has
the lock. A writer that was lost (the lock changed hands or came free, and the set is not complete) is a sign of a
crash loop: after the second one nobody is waited for any more, however quickly it restarts.

Either may load, so a wrong guess costs nothing but time: the lock decides, the roles only suggest.

Always true: LOAD only with the lock; the lock is taken only while some device is EMPTY; with all devices committed the
answer is READ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

# Longer than a supervisor's restart of a loader that died once; short against loading the weights oneself.
GRACE_S = 5.0
# One death may be an accident; the second in the same wait is a loop.
WRITERS_LOST_MAX = 2


class Action(StrEnum):
    READ = "read"  # all is committed: ask `ro` for what is not held yet; give the lock back
    LOAD = "load"  # the lock is ours: ask `rw_or_ro` for what is not held yet
    TAKE_LOCK = "take the lock"  # try it, without waiting, and look again
    WAIT = "wait"  # ask `ro`, waiting for a writer, for what is not held yet; look again


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine sees. Look at the lock first, then at the devices: a writer commits before it lets go."""

    devices: Mapping[str, str]  # name -> phase of its weights (EMPTY, RW, COMMITTED, RO; else not on the device)
    lock_owner: str | None  # None: free
    lock_mine: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    action: Action
    look_again_at_s: float | None = None  # for WAIT; None: whenever the lock or a device changes, or by polling
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Watch:
    """What one engine remembers from look to look."""

    engine_id: int
    grace_s: float = GRACE_S
    idle_since_s: float | None = None  # since then: something is EMPTY, and nobody has the lock
    owner: str | None = None
    writers_lost: int = 0

    @property
    def patience_s(self) -> float:
        return 0.0 if self.engine_id == 0 or self.writers_lost >= WRITERS_LOST_MAX else self.grace_s


def who_loads(watch: Watch, look: Look, now_s: float) -> tuple[Watch, Plan]:
    """What this engine does now. Stop looking once everything is held."""
    if all(phase in ("COMMITTED", "RO") for phase in look.devices.values()):
        return replace(watch, idle_since_s=None, owner=None, writers_lost=0), Plan(Action.READ, reason="all committed")
    watch = _notice(watch, look, now_s)
    if look.lock_mine:
        return watch, Plan(Action.LOAD, reason="this engine has the writer lock")
    if look.lock_owner is not None:
        return watch, Plan(Action.WAIT, reason=f"{look.lock_owner} has the writer lock")
    if watch.idle_since_s is None:
        return watch, Plan(Action.WAIT, reason="a writer is at work on every device that is not committed")
    if now_s >= (due_s := watch.idle_since_s + watch.patience_s):
        return watch, Plan(Action.TAKE_LOCK, reason="nobody loads")
    return watch, Plan(Action.WAIT, due_s, "another engine may be about to load")


def _notice(watch: Watch, look: Look, now_s: float) -> Watch:
    lost = watch.owner is not None and watch.owner != look.lock_owner
    idle = look.lock_owner is None and not look.lock_mine and "EMPTY" in look.devices.values()
    since_s = (now_s if watch.idle_since_s is None else watch.idle_since_s) if idle else None
    owner = None if look.lock_mine else look.lock_owner
    return replace(watch, idle_since_s=since_s, owner=owner, writers_lost=watch.writers_lost + lost)

"""The deployment's degradation level as this frontend last heard it: what new requests are told, and what all obey.

Theory. Whoever decides writes a record down (`routing.degradation`); every frontend follows the same one. The rules are
looked up by the level, never edited, so that leaving a level undoes all of it. A frontend that serves several
deployments follows the level of each, which holds for that one's workers and requests alone.

Always true: without a record the level is 0; a store that is lost, a control that is dead and a record that cannot be
read change nothing, but for one thing: level 4, which ends by a control's word alone, is 3 for a frontend that has a
worker and has heard of no control for `STALE_S`. That there is no worker at all is not believed while one is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from holdfast.core.tiers import Tier
from holdfast.discovery.keys import LEVELS
from holdfast.frontend.api.errors import OVERLOADED, UNAVAILABLE, ApiError
from holdfast.routing.degradation import LEVEL_MAX, RULES, LevelRecord, refusal
from holdfast.store.contract import Deleted, Put, Snapshot, Store, WatchEvent
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.stats import DispatchStats

log = logging.getLogger("holdfast.frontend")

# Longer than it takes to start another control, or than a store is away that is started anew; what nobody has renewed
# since then is no reason to refuse everybody.
STALE_S = 60.0

_NONE = LevelRecord(0, "")
_decode = msgspec.json.Decoder(LevelRecord).decode


class Levels:
    """Follows the level of one deployment. `clock`: any that never goes back, in seconds."""

    def __init__(
        self,
        deployment: str,
        directory: ModelDirectory,
        stats: DispatchStats,
        retry_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._deployment = deployment
        self._key = LEVELS + deployment
        self._directory = directory
        self._stats = stats
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._silent_since_s: float | None = clock()  # None: a control leads, as far as is known
        self.record = _NONE

    @property
    def level(self) -> int:
        if self.record.level < LEVEL_MAX:
            return self.record.level
        sets = self._directory.of_deployment(self._deployment)
        if self.record.vacant and self._directory.wanted(self._deployment):
            return 0  # workers come when they are asked for: nothing is short
        has_worker = any(workers.table.routable_count for workers in sets)
        silent_s = self._clock() - self._silent_since_s if self._silent_since_s is not None else 0.0
        return self.record.level_for(has_worker=has_worker, stale=silent_s >= STALE_S)

    def led(self, leads: bool) -> None:
        """Whether some control leads, as the store says; False: none does, or the store is lost."""
        if leads:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = self._clock()

    async def follow(self, store: Store) -> None:
        """Runs for ever."""
        async for event in store.watch(self._key):
            self.hear(event)

    def hear(self, event: WatchEvent) -> None:
        """What the store says; keys of deployments whose names begin alike come too."""
        if isinstance(event, Snapshot):
            self._read(event.items.get(self._key))
        elif isinstance(event, Put) and event.key == self._key:
            self._read(event.value)
        elif isinstance(event, Deleted) and event.key == self._key:
            self._read(None)

    def _read(self, value: bytes | None) -> None:
        try:
            record = _decode(value) if value is not None else _NONE
            if not 0 <= record.level <= LEVEL_MAX:
                raise ValueError(f"there is no level {record.level}")
        except (ValueError, RecursionError) as error:
            log.warning("the degradation level in the store cannot be read, %d stays: %s", self.record.level, error)
            return
        before, self.record = self.record, record
        self._directory.degrade(self._deployment, RULES[record.level])
        if record.level != before.level:
            words = (self._deployment, before.level, record.level, record.reason or "no record")
            log.warning("%s: degradation level %d -> %d: %s", *words)

    def sheds(self, tier: Tier) -> bool:
        level = self.level
        return level > 0 and refusal(level, tier, self._retry_after_s) is not None

    def check(self, tier: Tier) -> None:
        """Whether a new request of this tier is taken; ApiError if it is shed."""
        level = self.level
        if level == 0 or (shed := refusal(level, tier, self._retry_after_s)) is None:
            return
        self._stats.shed[tier.word, shed.reason] += 1
        status, kind = (429, OVERLOADED) if RULES[level].accepts_new else (503, UNAVAILABLE)
        raise ApiError(status, shed.message, kind, None, shed.reason, shed.retry_after_s, shed.reason)


class AllLevels:
    """The levels of all deployments that a frontend serves, by name."""

    def __init__(self, levels: Mapping[str, Levels]) -> None:
        self._levels = levels

    def check(self, tier: Tier) -> None:
        """At the door, before anybody knows whom it asks for: ApiError, if every deployment sheds it."""
        if all(levels.sheds(tier) for levels in self._levels.values()):
            next(iter(self._levels.values())).check(tier)

    def check_for(self, deployment: str, tier: Tier) -> None:
        """Once it is known whose workers would serve it. Of one deployment alone it was known at the door."""
        if len(self._levels) > 1:
            self._levels[deployment].check(tier)

"""Follows each deployment's degradation level in the store, and refuses new requests by it.

Theory. Control writes its decision as a record (`routing.degradation`), which every frontend follows. The rules are
looked up by the level, never edited, so that leaving a level undoes all of it. A frontend that serves several
deployments applies each deployment's level to that deployment's workers and requests only.

Always true: without a record the level is 0. A lost store, a dead control and an unreadable record change nothing, with
one exception: only control can end level 4, so a frontend that has a worker and has seen no control for `STALE_S`
treats it as 3. A record that says there is no worker is not believed by a frontend that has one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.core.tiers import Tier
from holdfast.discovery.keys import LEVELS
from holdfast.frontend.api.errors import OVERLOADED, UNAVAILABLE, ApiError
from holdfast.routing.degradation import LEVEL_MAX, RULES, LevelRecord, refusal
from holdfast.store.contract import Store, watch_key
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.stats import DispatchStats

log = logging.getLogger("holdfast.frontend")

# Longer than it takes to start another control, or to restart a store. A level that no control has confirmed for so
# long is no reason to refuse all requests.
STALE_S = 60.0

_NONE = LevelRecord(0, "")
_decode = msgspec.json.Decoder(LevelRecord).decode


@dataclass(slots=True)
class DeploymentLevel:
    """Follows the level of one deployment. `clock` is monotonic, in seconds."""

    deployment: str
    directory: ModelDirectory
    stats: DispatchStats
    retry_after_s: float
    clock: Callable[[], float]
    record: LevelRecord = _NONE
    _silent_since_s: float | None = None  # since when no control leads; None: one does

    def __post_init__(self) -> None:
        self._silent_since_s = self.clock()

    @property
    def level(self) -> int:
        if self.record.level < LEVEL_MAX:
            return self.record.level
        sets = self.directory.of_deployment(self.deployment)
        if self.record.vacant and self.directory.wanted(self.deployment):
            return 0  # workers are started on request: no capacity is missing
        has_worker = any(workers.table.routable_count for workers in sets)
        silent_s = self.clock() - self._silent_since_s if self._silent_since_s is not None else 0.0
        return self.record.level_for(has_worker=has_worker, stale=silent_s >= STALE_S)

    def note_control(self, leads: bool) -> None:
        """Note whether a control leads; False also if the store is lost."""
        if leads:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = self.clock()

    async def follow(self, store: Store) -> None:
        """Follow the level in the store, until cancelled."""
        async for value in watch_key(store, LEVELS + self.deployment):
            self.on_record(value)

    def on_record(self, value: bytes | None) -> None:
        """Apply the level's record in the store; None if there is none."""
        try:
            record = _decode(value) if value is not None else _NONE
            if not 0 <= record.level <= LEVEL_MAX:
                raise ValueError(f"there is no level {record.level}")
        except (ValueError, RecursionError) as error:
            log.warning("the degradation level in the store cannot be read, %d stays: %s", self.record.level, error)
            return
        before, self.record = self.record, record
        self.directory.degrade(self.deployment, RULES[record.level])
        if record.level != before.level:
            why = record.reason or "no record"
            log.warning("%s: degradation level %d -> %d: %s", self.deployment, before.level, record.level, why)

    def sheds(self, tier: Tier) -> bool:
        level = self.level
        return level > 0 and refusal(level, tier, self.retry_after_s) is not None

    def check(self, tier: Tier) -> None:
        """Raise ApiError if a new request of this tier is shed."""
        level = self.level
        if level == 0 or (shed := refusal(level, tier, self.retry_after_s)) is None:
            return
        self.stats.shed[tier.label, shed.reason] += 1
        status, kind = (429, OVERLOADED) if RULES[level].accepts_new else (503, UNAVAILABLE)
        raise ApiError(status, shed.message, kind, None, shed.reason, shed.retry_after_s, shed.reason)


class DeploymentLevels:
    """The levels of all deployments that a frontend serves, by name."""

    def __init__(self, each: Mapping[str, DeploymentLevel]) -> None:
        self.each = each

    def check(self, tier: Tier) -> None:
        """Raise ApiError if every deployment sheds a new request, whose deployment is not known yet."""
        if all(levels.sheds(tier) for levels in self.each.values()):
            next(iter(self.each.values())).check(tier)

    def check_for(self, deployment: str, tier: Tier) -> None:
        """Raise ApiError if this deployment sheds the request; with only one deployment, `check` has done it."""
        if len(self.each) > 1:
            self.each[deployment].check(tier)

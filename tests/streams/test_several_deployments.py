"""One frontend that serves several deployments: each one's verdicts, leavers, level and report are its own."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from test_roster_reports import Told, reporting
from test_worker_verdicts import control, verdict

from holdfast.core.tiers import Tier
from holdfast.discovery.keys import CONTROLS, HEALTH, InstanceKey
from holdfast.discovery.registry import Registry
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.shedding import DeploymentLevel, DeploymentLevels
from holdfast.health.standing import HealthStatus
from holdfast.routing.degradation import LevelRecord
from holdfast.store.contract import Put, Snapshot
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.stats import DispatchStats
from holdfast.streams.verdicts import WorkerVerdicts
from tests.rigs.roster import roster_rig
from tests.rigs.worlds.streams import make_card

OWN = InstanceKey("d-00000000", "worker", "generate", 1)
OTHER = InstanceKey("d-more-00000000", "worker", "generate", 2)
STRANGER = InstanceKey("d-more-yet-00000000", "worker", "generate", 3)


def weight(verdicts: WorkerVerdicts, key: InstanceKey) -> float:
    return verdicts.share(key, trusted=False, since_s=100.0, now_s=100.0).weight


def test_only_those_that_are_named_are_known() -> None:
    """Also where one's name begins with another's; without a word, the own alone."""
    for served in (["d"], ["d", "d-more"]):
        registry = Registry(*served)
        for key in (OWN, OTHER, STRANGER):
            registry.put(f"v1/mdc/{key.path}", b"no card")
            registry.put(f"v1/instances/{key.path}", b"no record")
        assert [key.deployment for key in registry.refused] == served


def test_a_control_makes_only_its_own_workers_wait() -> None:
    """For their first check; and a look at one deployment's controls takes nothing from the other's."""
    verdicts = WorkerVerdicts("d", "d-more")
    verdicts.on_store_event(f"{CONTROLS}d-more/", Put(f"{CONTROLS}d-more/c", control(leads=True)))
    assert (weight(verdicts, OWN), weight(verdicts, OTHER)) == (1.0, 0.0)
    verdicts.on_store_event(f"{CONTROLS}d/", Snapshot({f"{CONTROLS}d/c": control(leads=True)}))
    assert (weight(verdicts, OWN), weight(verdicts, OTHER)) == (0.0, 0.0)
    verdicts.on_store_event(f"{CONTROLS}d/", Snapshot({}))
    assert (weight(verdicts, OWN), weight(verdicts, OTHER)) == (1.0, 0.0)


def test_verdicts_of_those_that_are_not_served_are_not_kept() -> None:
    """They say nothing of anybody here."""
    verdicts = WorkerVerdicts("d", "d-more")
    for key, known in ((OWN, True), (OTHER, True), (STRANGER, False)):
        assert bool(verdicts.on_store_event(HEALTH, Put(HEALTH + key.path, verdict(HealthStatus.UNHEALTHY)))) is known


async def test_each_deployment_is_told_of_its_own_workers(tmp_path: Path) -> None:
    """Its rollout waits for the frontends that serve it, and sees nothing of the others' workers."""
    async with roster_rig(tmp_path) as rig:
        for number, namespace in ((1, OWN.namespace), (2, OTHER.namespace)):
            worker = await rig.worker(number)
            worker.key = InstanceKey(namespace, "worker", "generate", number)
            worker.welcome = msgspec.structs.replace(worker.welcome, namespace=namespace)
            worker.record = msgspec.structs.replace(worker.record, name="w")
            rig.appear(worker)
            await rig.joined(worker)
        store, told = Told(), {}
        for deployment in ("d", "d-more", "d-more-yet"):
            reporting(rig, store, deployment).write_if_changed()
            told[deployment] = store.report.admitted
        assert told == {"d": ("1",), "d-more": ("2",), "d-more-yet": ()}
        rig.roster.weights.set_idle("d-more", ["w"])  # the other's rollout may call a replica as this one's does
        assert (rig.roster.admitted("d"), rig.roster.admitted("d-more")) == (("1",), ())
        rig.roster.weights.set_idle("d", ["w"])
        rig.roster.weights.set_idle("d-more", [])
        assert (rig.roster.admitted("d"), rig.roster.admitted("d-more")) == ((), ("2",))


def test_a_stream_never_goes_on_in_another_deployment() -> None:
    """Though the model and its tokenizer have the same names."""
    directory = ModelDirectory(random.Random(1), 8)
    own, next_one, other = (
        directory.set_for(namespace, make_card()) for namespace in ("d-00000000", "d-11111111", "d-more-00000000")
    )
    for workers in (own, next_one, other):
        workers.text = "text"
    assert next_one.can_stand_in_for(own)
    assert not other.can_stand_in_for(own)


class Shared:
    """Two deployments behind one frontend, and the level of each."""

    def __init__(self) -> None:
        self.directory = ModelDirectory(random.Random(1), 8)
        stats = DispatchStats()
        self.each = {one: DeploymentLevel(one, self.directory, stats, 30.0, lambda: 0.0) for one in ("d", "d-more")}
        self.levels = DeploymentLevels(self.each)

    def level(self, deployment: str, level: int) -> None:
        self.each[deployment].on_record(msgspec.json.encode(LevelRecord(level, "")))


def test_a_level_is_its_deployments_alone() -> None:
    """Its workers', also those that come later, and its requests'; at the door only what all shed is shed."""
    one = Shared()
    before = one.directory.set_for("d-00000000", make_card())
    one.level("d-more", 3)
    after = one.directory.set_for("d-more-00000000", make_card())
    assert before.table.rules.batch_multiplier == 1.0
    assert after.table.rules.batch_multiplier < 1.0
    one.levels.check(Tier.BEST_EFFORT)
    one.levels.check_for("d", Tier.BEST_EFFORT)
    with pytest.raises(ApiError):
        one.levels.check_for("d-more", Tier.BEST_EFFORT)
    one.level("d", 3)
    with pytest.raises(ApiError):
        one.levels.check(Tier.BEST_EFFORT)

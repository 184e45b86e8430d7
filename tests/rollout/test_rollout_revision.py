"""What a manifest asks of a rollout: sets, numbers, manners and mates."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from holdfast.rollout.machine import NOTHING
from holdfast.rollout.records import DesiredDeployment, active_revision, desired_revision, is_gone, new_sets
from holdfast.rollout.revision import Part, Revision, changes, revision_of
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.types import Manifest
from tests.rigs.worlds.rollout import Driver, World

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
WORKER = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Frontend: {componentType: frontend}
    Worker: {componentType: worker, resources: {limits: {gpu: 1}}, REST}
"""


def accepted(text: str) -> Manifest:
    found = check(text.encode())
    assert found.manifest is not None, "\n".join(map(str, found.problems))
    return found.manifest


def worker(rest: str) -> Part:
    return revision_of(accepted(WORKER.replace("REST", rest)), 1).parts["Worker"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_sets_are_those_of_the_pods(path: Path) -> None:
    """A rollout names a set as its pods' addresses do, and wants as many as there are pods."""
    manifest = accepted(path.read_text())
    revision = revision_of(manifest, 3)
    assert revision.number == 3
    planned = {pod.service: (pod.namespace.rpartition("-")[2], pod.replicas) for pod in pods(manifest)}
    assert {name: (part.set_id, part.replicas) for name, part in revision.parts.items()} == planned


@pytest.mark.parametrize(
    ("replicas", "rollout", "surge", "unavailable"),
    [
        (4, "{}", 1, 0),
        (4, "{maxSurge: 25%, maxUnavailable: 25%}", 1, 1),
        (5, "{maxSurge: 25%, maxUnavailable: 25%}", 2, 1),
        (1, "{maxSurge: 0%, maxUnavailable: 50%}", 1, 0),
        (0, "{maxSurge: 100%}", 1, 0),
        (3, "{maxSurge: 0, maxUnavailable: 2}", 0, 2),
    ],
)
def test_shares_are_rounded_so_that_something_moves(replicas: int, rollout: str, surge: int, unavailable: int) -> None:
    """Surge up and unavailable down, as a cluster does; where both come to none, one more is started."""
    wanted = worker(f"replicas: {replicas}, rollout: {rollout}")
    assert (wanted.replicas, wanted.surge, wanted.unavailable) == (replicas, surge, unavailable)


def test_how_it_is_replaced_is_the_manifests() -> None:
    """Deadline, error rate, pause and inexactness are the service's own, and no reason to replace it."""
    manner = "{progressDeadlineSeconds: 90, errorPercentMax: 1, inexact: true, paused: true}"
    plain, wanted = worker("replicas: 2"), worker(f"replicas: 2, rollout: {manner}")
    said = {"deadline_s": 90, "errors_percent_max": 1, "inexact": True, "paused": True}
    assert wanted == structs.replace(plain, **said)


def test_one_lock_of_its_own_lets_in_no_second_replica() -> None:
    """A new set would wait for the lock that the old one has: it takes its place instead."""
    assert worker("failover: {enabled: true}").surge == 1
    assert worker("failover: {enabled: true, lock: /run/one.lock}").surge == 0


def test_only_a_worker_has_a_last_of_its_set() -> None:
    """Streams of a set's last worker have long to end; a frontend's answers have what any of them has."""
    parts = revision_of(accepted(WORKER.replace("REST", "replicas: 1")), 1).parts
    assert parts["Worker"].last_drain_s > parts["Worker"].drain_s
    assert parts["Frontend"].last_drain_s == parts["Frontend"].drain_s


def test_mates_are_of_the_opposite_kind() -> None:
    """Two decode services are no mates of each other, though both are a prefill worker's."""
    text = WORKER.replace("Worker: {componentType: worker, resources: {limits: {gpu: 1}}, REST}", """
    P: {componentType: worker, subComponentType: prefill, modelName: m}
    D: {componentType: worker, subComponentType: decode, modelName: m}
    E: {componentType: worker, subComponentType: decode, modelName: m, envs: [{name: A, value: b}]}
    Lone: {componentType: worker, subComponentType: decode, modelName: other}
    """)
    parts = revision_of(accepted(text), 1).parts
    found = {name: part.peers for name, part in parts.items()}
    assert found == {"Frontend": (), "P": ("D", "E"), "D": ("P",), "E": ("P",), "Lone": ()}


def test_an_upgrade_changes_one_service() -> None:
    """The shipped upgrade replaces its workers and leaves its frontends alone."""
    first, second = (
        revision_of(accepted(path.read_text()), number)
        for number, path in enumerate((path for path in EXAMPLES if path.stem.startswith("upgrade")), 1)
    )
    assert [line.partition(":")[0] for line in changes(first, second)] == ["Worker"]
    assert first.digest != second.digest
    assert first.digest == structs.replace(first, number=9).digest


def test_a_pause_and_a_deletion_are_the_same_sets() -> None:
    """Paused, everything waits; deleted, nothing is wanted and no stream's end is waited for but a drain's."""
    text = WORKER.replace("REST", "replicas: 3, rollout: {paused: true}")
    manifest = accepted(text)
    wanted = DesiredDeployment(revision=4, manifest=text, digest=revision_of(manifest, 4).digest)
    plain = desired_revision(wanted, manifest)
    assert plain == revision_of(manifest, 4)
    held = desired_revision(structs.replace(wanted, paused=True), manifest)
    assert (held.sets, {part.paused for part in held.parts.values()}) == (plain.sets, {True})
    gone = desired_revision(structs.replace(wanted, deleted=True), manifest)
    assert gone.sets == plain.sets
    assert {(part.replicas, part.paused) for part in gone.parts.values()} == {(0, False)}
    assert all(part.last_drain_s == part.drain_s for part in gone.parts.values())


def test_a_deleted_deployment_leaves_by_the_rules() -> None:
    """A machine that is told so drains and stops everybody, and is steady with nobody there."""
    manifest = accepted(WORKER.replace("REST", "replicas: 2"))
    wanted = DesiredDeployment(revision=1, manifest="", digest="")
    driver = Driver(World())
    driver.desired = desired_revision(wanted, manifest)
    list(driver.seconds(60))
    assert len(driver.world.bodies) == 3
    deleted = structs.replace(wanted, revision=2, deleted=True)
    driver.desired = desired_revision(deleted, manifest)
    assert not is_gone(deleted, driver.state)
    list(driver.seconds(60))
    assert not driver.world.bodies
    assert is_gone(deleted, driver.state)
    assert not is_gone(structs.replace(deleted, revision=3), driver.state), "somebody asked once more: not heard yet"
    assert not is_gone(structs.replace(wanted, revision=2), driver.state), "scaled to nobody, not deleted"


def test_what_is_started_next_is_what_is_wanted_until_that_is_undone() -> None:
    """A later wish is worked at again, though the one before it was undone."""
    old, bad, mended = (Revision(number=number, parts={}) for number in (1, 2, 3))
    undone = structs.replace(NOTHING, target=old, desired_number=2, undone=2)
    assert active_revision(bad, structs.replace(NOTHING, target=bad, desired_number=2)) is bad
    assert active_revision(bad, undone) is old
    assert active_revision(mended, undone) is mended


def test_only_sets_that_a_revision_brings_are_on_trial_since_it_began() -> None:
    """What failed before it was heard of is not held against it; sets that stay are judged by all that happened."""
    stable = Revision(number=1, parts={"A": Part(set_id="old", replicas=1), "B": Part(set_id="same", replicas=1)})
    wish = structs.replace(stable, number=2, parts=stable.parts | {"A": Part(set_id="new", replicas=1)})
    memory = structs.replace(NOTHING, stable=stable, desired_number=1, began_s=50.0)
    assert new_sets(wish, memory, 99.0) == ({("A", "new")}, 99.0)
    assert new_sets(wish, structs.replace(memory, desired_number=2, began_s=90.0), 99.0) == ({("A", "new")}, 90.0)
    assert new_sets(stable, memory, 99.0) == (set(), 50.0)

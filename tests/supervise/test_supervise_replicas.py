"""A rollout's replicas as processes: names there and back, seats, and what is seen of them here and in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from holdfast.core.errors import Refused
from holdfast.discovery.keys import CONTROLS, HEALTH, INSTANCES, REFUSALS, REPORTS, InstanceKey, InstanceRecord
from holdfast.health.records import ControlRecord, HealthRecord, ReportRecord
from holdfast.health.records import WorkerSeen as Reported
from holdfast.health.standing import HealthCause, HealthStatus, WorkerStanding
from holdfast.rollout.machine import DesiredState, ObservedReplica, ReplicaStage, StartReplica
from holdfast.rollout.revision import Part, Revision, revision_of
from holdfast.spec.deployment import DeviceSlot
from holdfast.spec.jobs import Job
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.manifest.whole import whole
from holdfast.supervise.device_places import DeviceClaim, device_claims
from holdfast.supervise.machine import Life, Phase
from holdfast.supervise.observe import (
    NO_CONTROL,
    NO_WORKER,
    NOT_IN_STORE,
    UNCHECKED,
    StoreObservation,
    observe,
    observe_store,
    prefixes,
)
from holdfast.supervise.replicas import (
    LocalReplica,
    ReplicaId,
    StartContext,
    jobs_of,
    observe_processes,
    replica_id_of,
    room_of,
    sets_of,
)

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
CONTEXT = StartContext(
    Machine(Path("/tmp/hf"), {"HOME": "/"}), (), lambda _engine, source, model: (source, model or "m")
)


def read(path: Path) -> Manifest:
    manifest = check(path.read_bytes()).manifest
    assert manifest is not None
    return manifest


def starts(manifest: Manifest) -> Iterator[StartReplica]:
    """One replica of each service that has any."""
    for number, (service, part) in enumerate(revision_of(manifest, 1).parts.items(), 7):
        if manifest.spec.services[service].replicas:
            yield StartReplica(f"{service}-{number}", service, part.set_id)


def on(*sockets: str) -> list[DeviceClaim]:
    """Somebody on each, by the names of their sockets."""
    return [DeviceClaim("somebody", DeviceSlot(name.partition(".")[0], name)) for name in sockets]


def sockets_of(jobs: Iterable[Job]) -> list[str]:
    return [one.seat.socket_name for one in device_claims(jobs)]


# -- from a replica to its processes, and back


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_started_replica_is_found_by_its_processes_names(path: Path) -> None:
    """By each of them, by the names alone; and it is started as a whole manifest starts it, but for its number."""
    manifest = read(path)
    sets = sets_of([(manifest, {})])
    planned = {one.name: Job.of(one) for one in whole(manifest, CONTEXT.machine, (), CONTEXT.named)}
    for start in starts(manifest):
        jobs = jobs_of(start, sets, CONTEXT, ())
        expected = ReplicaId(start.name, start.service, start.set_id)
        assert {replica_id_of(job.name, manifest.name, manifest.spec.services) for job in jobs} == {expected}
        first = jobs_of(structs.replace(start, name=f"{start.service}-0"), sets, CONTEXT, ())
        assert first == [planned[job.name] for job in first]


def test_names_of_others_are_nobodys() -> None:
    """Of another deployment, a store, a control; a service that is not known is called as its processes are."""
    for name in ("store", "chat-control", "chats-worker-0123abcd-1", "chat-worker-0123abcd", "chat-w-0123abcd-1-shell"):
        assert replica_id_of(name, "chat", ["Worker"]) is None
    assert replica_id_of("chat-worker-0123abcd-12", "chat", ["Worker"]) == ReplicaId("Worker-12", "Worker", "0123abcd")
    assert replica_id_of("chat-old-one-0123abcd-3-vault-r2", "chat", []) == ReplicaId(
        "old-one-3", "old-one", "0123abcd"
    )


def test_no_two_replicas_share_a_seat() -> None:
    """Each has the first that is free; what is there is told from what it was started with."""
    manifest = read(next(path for path in EXAMPLES if path.stem == "failover"))
    sets, there = sets_of([(manifest, {})]), []
    (worker,) = [one for one in starts(manifest) if one.service != "Frontend"]
    for number in range(1, 4):
        start = structs.replace(worker, name=f"{worker.service}-{number}")
        there.append(jobs_of(start, sets, CONTEXT, device_claims(job for jobs in there for job in jobs)))
    assert [sockets_of(jobs) for jobs in there] == [["host-1"], ["host-2"], ["host-3"]]
    again = jobs_of(structs.replace(worker, name=f"{worker.service}-9"), sets, CONTEXT, on("host-1", "host-3"))
    assert sockets_of(again) == ["host-2"]
    vaults = [job for jobs in there for job in jobs if job.role == "vault"]
    assert len({job.name for job in vaults}) == 3


def test_a_set_that_is_not_kept_is_refused_by_name() -> None:
    """Whoever carries a rollout out says so, and starts something else never."""
    with pytest.raises(Refused, match="the set 0123abcd of Worker"):
        jobs_of(StartReplica("Worker-1", "Worker", "0123abcd"), {}, CONTEXT, ())


def test_gpus_are_given_out_once_unless_they_are_shared() -> None:
    """A replica that finds none is refused, before anything of it is started."""
    text = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Worker:
      componentType: worker
      failover: {enabled: true}
      resources: {limits: {gpu: 1}}
      extraPodSpec: {mainContainer: {args: [--engine, torch, --kv-gib, "1"]}}
"""
    manifest = check(text.encode()).manifest
    assert manifest is not None
    sets, (start,) = sets_of([(manifest, {})]), starts(manifest)
    context = StartContext(CONTEXT.machine, ("GPU-a", "GPU-b"), CONTEXT.named)
    assert sockets_of(jobs_of(start, sets, context, on("GPU-a"))) == ["GPU-b"]
    assert sockets_of(jobs_of(start, sets, context, on("GPU-a.2"))) == ["GPU-b"], "who stood by has the place"
    with pytest.raises(Refused, match="1 GPUs are needed, and 0 are free"):
        jobs_of(start, sets, context, on("GPU-a", "GPU-b"))
    shared = StartContext(CONTEXT.machine, ("GPU-a", "GPU-b"), CONTEXT.named, sharing=2)
    assert sockets_of(jobs_of(start, sets, shared, on("GPU-a", "GPU-b"))) == ["GPU-a.2"]


def test_a_free_gpu_is_told_to_one_service() -> None:
    """The first that may still use it; a service without GPUs, and a machine without any, has no bound."""
    service = """
      componentType: worker
      failover: {enabled: true}
      resources: {limits: {gpu: RANKS}}
      extraPodSpec: {mainContainer: {args: [--engine, torch]}}"""
    one, two = (service.replace("RANKS", str(ranks)) for ranks in (1, 2))
    head = "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nmetadata: {name: chat}\nspec:\n  services:\n"
    text = f"{head}    Frontend: {{componentType: frontend}}\n    One:{one}\n    Two:{two}\n"
    checked = check(text.encode())
    assert checked.manifest is not None, checked.problems
    sets, wish = sets_of([(checked.manifest, {})]), revision_of(checked.manifest, 1)
    four = StartContext(CONTEXT.machine, ("a", "b", "c", "d"), CONTEXT.named)
    assert room_of(wish, {"One": 1, "Two": 1}, sets, four, on("a")) == {"One": 3, "Two": 1}
    assert room_of(wish, {"One": 2, "Two": 1}, sets, four, on("a", "b", "c")) == {"One": 1, "Two": 0}
    assert room_of(wish, {}, sets, four, on("a", "b", "c", "d")) == {"One": 0, "Two": 0}
    assert room_of(wish, {}, sets, CONTEXT, ()) == {}
    odd = check(text.replace("torch", "steam").encode()).manifest
    assert odd is not None
    room = room_of(revision_of(odd, 1), {}, sets_of([(odd, {})]), four, ())
    assert room == {}, "what cannot be is told when it is started"


# -- what is seen of its processes


WHOM = ReplicaId("Worker-1", "Worker", "0123abcd")
READY = Life(phase=Phase.READY)


@pytest.mark.parametrize(
    ("processes", "stage", "crashes", "words"),
    [
        ({"w": ("worker", READY)}, ReplicaStage.SERVING, 0, ""),
        ({"w": ("worker", Life(phase=Phase.STARTING))}, ReplicaStage.STARTING, 0, ""),
        ({"v": ("vault", READY), "w": ("worker", Life(phase=Phase.STARTING))}, ReplicaStage.STARTING, 0, ""),
        ({"v": ("vault", READY), "w": ("worker", READY), "x": ("worker", Life())}, ReplicaStage.SERVING, 0, ""),
        (
            {"w": ("worker", Life(phase=Phase.CRASH_LOOP, failures=5, note="failed 5 times"))},
            ReplicaStage.STARTING,
            5,
            "failed 5 times",
        ),
        (
            {"w": ("worker", Life(phase=Phase.REFUSED, failures=1, note="no model"))},
            ReplicaStage.STARTING,
            1,
            "cannot be started: no model",
        ),
        ({"w": ("worker", Life(phase=Phase.STOPPING, wanted=False))}, ReplicaStage.LEAVING, 0, ""),
        (
            {"w": ("worker", Life(phase=Phase.OVER, wanted=False)), "v": ("vault", Life(phase=Phase.READY))},
            ReplicaStage.STARTING,
            0,
            "",
        ),
        ({"w": ("worker", Life(phase=Phase.STOPPING))}, ReplicaStage.STARTING, 0, ""),
    ],
)
def test_a_replica_is_what_its_processes_do(
    processes: dict[str, tuple[str, Life]], stage: ReplicaStage, crashes: int, words: str
) -> None:
    """Engines serve, memory alone does not; all told to leave, it leaves; one that is replaced comes back."""
    seen = observe_processes(WHOM, processes).observed
    assert (seen.stage, seen.crashes, seen.trouble or seen.how) == (stage, crashes, words)


# -- what the store says of it


KEY = InstanceKey("chat-0123abcd", "worker", "generate", 0x2A)
SERVING = ObservedReplica(service="Worker", set_id="0123abcd", stage=ReplicaStage.SERVING)
WISH = Revision(number=1, parts={})


def said(
    *reports: ReportRecord, verdict: WorkerStanding | None = None, led: bool = True, refused: str = ""
) -> StoreObservation:
    values: dict[str, Any] = {
        INSTANCES + KEY.path: InstanceRecord("unix:///a", "unix:///b", "c", name="w"),
        f"{CONTROLS}chat/c": ControlRecord(name="c", leads=led),
    }
    values |= {f"{REPORTS}chat/{number}": report for number, report in enumerate(reports)}
    values |= {HEALTH + KEY.path: HealthRecord(name="w", standing=verdict)} if verdict is not None else {}
    encoded = {key: msgspec.json.encode(value) for key, value in values.items()}
    encoded |= {REFUSALS + KEY.path: refused.encode()} if refused else {}
    odd = {HEALTH + "chats-0123abcd/worker/generate/2a": b"{}", f"{REPORTS}chat/odd": b"\xff", INSTANCES + "x": b""}
    assert all(key.startswith(prefixes("chat")) for key in encoded)
    return observe_store(encoded | odd, "chat")


def report(*admitted: str, streams: int = 0) -> ReportRecord:
    workers = {"2a": Reported(open=streams)} if streams else {}
    return ReportRecord(name="f", at_unix_s=1.0, admitted=admitted, workers=workers)


def seen_with(
    what: StoreObservation, want: DesiredState = DesiredState.SERVE, engines: tuple[str, ...] = ("w", "other")
) -> ObservedReplica:
    look = observe(WISH, {"Worker-1": LocalReplica(SERVING, engines)}, what, {"Worker-1": want})
    return look.replicas["Worker-1"]


GOOD = WorkerStanding(status=HealthStatus.HEALTHY, weight=1.0, causes={}, reason="")


def test_a_worker_counts_by_every_frontends_word_and_controls() -> None:
    """One frontend that does not know it yet is enough against it; so is none at all."""
    assert seen_with(said(report("2a"), report("2a", "3"), verdict=GOOD)).admitted
    assert not seen_with(said(report("2a"), report("3"), verdict=GOOD)).admitted
    assert not seen_with(said(verdict=GOOD)).admitted
    assert seen_with(said(report("2a"), verdict=GOOD)).weight == 1.0


def test_without_a_verdict_it_counts_only_where_no_control_leads_and_its_set_is_not_new() -> None:
    """Where a control leads it has not checked it yet. Where none does, a set that was in place before needs no
    verdict; one that the revision brings does."""
    unchecked = seen_with(said(report("2a")))
    assert (unchecked.weight, unchecked.how) == (0.0, UNCHECKED)
    unled = said(report("2a"), led=False)
    assert seen_with(unled).weight == 1.0
    here = {"Worker-1": LocalReplica(SERVING, ("w",))}
    wish = Revision(number=2, parts={SERVING.service: Part(set_id=SERVING.set_id, replicas=1)})
    look = observe(wish, here, unled, {}, unchecked=frozenset({SERVING.service}))
    assert (look.replicas["Worker-1"].weight, look.replicas["Worker-1"].how) == (0.0, NO_CONTROL)
    other = Revision(number=2, parts={SERVING.service: Part(set_id="another", replicas=1)})
    assert observe(other, here, unled, {}, unchecked=frozenset({SERVING.service})).replicas["Worker-1"].weight == 1.0


def test_who_stands_by_does_so_once_its_canary_passed() -> None:
    """Before that it only starts, so that nobody leaves for it; and frontends have nothing to do with it."""
    assert seen_with(said(report()), DesiredState.STAND_BY).stage is ReplicaStage.STARTING
    ready = seen_with(said(report("2a"), verdict=GOOD), DesiredState.STAND_BY)
    assert (ready.stage, ready.admitted) == (ReplicaStage.STANDBY, False)
    broken = WorkerStanding(
        status=HealthStatus.UNHEALTHY, weight=0.0, causes={HealthCause.CANARY_FAILING: "no"}, reason="no"
    )
    assert "fails its canaries" in seen_with(said(report(), verdict=broken), DesiredState.STAND_BY).trouble


def test_a_refused_card_is_trouble_with_or_without_control() -> None:
    """It can never serve, whoever leads."""
    for led in (True, False):
        seen = seen_with(said(report(), led=led, refused="no such tokenizer"))
        assert (seen.trouble, seen.weight) == ("has a card that is refused: no such tokenizer", 0.0)
        other = structs.replace(report(), refused={"2a": "another"})
        assert seen_with(said(report("2a"), other, led=led)).trouble == "has a card that is refused: another"


def test_who_is_not_in_the_store_does_not_count() -> None:
    """It stands by, or has not come so far."""
    seen = seen_with(said(report("2a"), verdict=GOOD), engines=("nobody",))
    assert (seen.admitted, seen.weight, seen.how) == (False, 0.0, NOT_IN_STORE)


def test_it_drains_when_no_frontend_would_send_it_anything() -> None:
    """Until then its count of streams may rise again; all frontends' streams are counted."""
    told = said(report("2a", streams=2), report(streams=3), verdict=GOOD)
    assert (seen_with(told, want=DesiredState.DRAIN).stage, seen_with(told, want=DesiredState.DRAIN).streams) == (
        ReplicaStage.SERVING,
        5,
    )
    heard = said(report(streams=2), report(streams=3), verdict=GOOD)
    assert (seen_with(heard, want=DesiredState.DRAIN).stage, seen_with(heard, want=DesiredState.DRAIN).streams) == (
        ReplicaStage.DRAINING,
        5,
    )
    assert seen_with(heard).stage is ReplicaStage.SERVING
    waiting = structs.replace(report(streams=1), held={KEY.namespace: 4, "chat-00000000": 8})
    assert seen_with(said(waiting, verdict=GOOD), DesiredState.DRAIN).streams == 5, (
        "those that wait for one of its set, too"
    )


def test_who_takes_over_in_a_drain_has_the_streams_of_the_dead() -> None:
    """A standby leads at once, and its frontends say so a second later: till then their streams are on an engine that
    nobody leads, or still registered beside it. Neither is a replica without streams."""
    dead, standby = Reported(open=8), InstanceKey("chat-0123abcd", "worker", "generate", 0x2B)
    late = structs.replace(report(), workers={"dead": dead})
    assert seen_with(said(late, verdict=GOOD), DesiredState.DRAIN).streams == 8
    told = structs.replace(report(), workers={"2a": Reported(), "2b": Reported(open=8)})
    both = said(told, verdict=GOOD)
    both.leading["other"] = standby
    assert seen_with(both, DesiredState.DRAIN).streams == 8
    assert seen_with(both, DesiredState.DRAIN, engines=("w",)).streams == 0, "another's, which leads"


def test_a_frontend_counts_when_it_knows_whom_to_send_requests_to() -> None:
    """Listening is not serving: an old one may only leave for one that has found a worker, where there is any."""

    def front(what: StoreObservation) -> tuple[bool, float, str]:
        seen = observe(WISH, {"Frontend-1": LocalReplica(SERVING, frontend="f-1")}, what, {}).replicas["Frontend-1"]
        return seen.admitted, seen.weight, seen.how

    own = structs.replace(report("2a"), process="f-1")
    assert front(said(own, verdict=GOOD)) == (True, 1.0, "")
    assert front(said(report("2a"), verdict=GOOD)) == (False, 0.0, NO_WORKER), "another's word"
    assert front(said(structs.replace(own, admitted=()), verdict=GOOD)) == (False, 0.0, NO_WORKER)
    assert front(StoreObservation()) == (True, 1.0, ""), "there is no worker"


def test_who_is_neither_counts_when_it_is_there() -> None:
    """No store and no control speaks of it."""
    seen = seen_with(StoreObservation(), engines=())
    assert (seen.admitted, seen.weight) == (True, 1.0)

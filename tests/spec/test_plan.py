"""The processes that a deployment is made of: who sits on which device, what each is told, who is watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import UserError
from holdfast.spec.deployment import DeploymentSpec, DeviceSlot, device_slots
from holdfast.spec.engines import FailoverSettings, TorchSettings
from holdfast.spec.jobs import STOP_ORDER, Job
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, StoreLaunch, VaultLaunch, WorkerLaunch
from holdfast.spec.plan import plan

STATE = Path("/tmp/hf-plan")
SIM = WorkerLaunch(engine="sim")
GPUS = tuple(f"GPU-{number}{'0' * 7}-0000-0000-0000-000000000000" for number in range(4))


def wishes(gpus: tuple[str, ...] = (), workers: int = 1, **torch: Any) -> DeploymentSpec:
    worker = WorkerLaunch(engine="torch", torch=TorchSettings(**torch))
    return DeploymentSpec("local", workers=workers, gpus=gpus, worker=worker)


def planned(options: DeploymentSpec) -> tuple[list[VaultLaunch], list[WorkerLaunch]]:
    launches = plan(STATE, options)
    vaults = [launch for launch in launches if isinstance(launch, VaultLaunch)]
    return vaults, [launch for launch in launches if isinstance(launch, WorkerLaunch)]


# -- who sits where


@pytest.mark.parametrize(
    ("gpus", "pairs", "ranks", "expected"),
    [
        ((), 2, 1, [["host-1"], ["host-2"]]),
        ((), 2, 3, [["host-1", "host-2", "host-3"], ["host-4", "host-5", "host-6"]]),
        (("a", "b"), 2, 1, [["a"], ["b"]]),
        (("a", "b", "c"), 2, 1, [["a"], ["b"]]),
        (("a", "b", "c", "d"), 2, 2, [["a", "b"], ["c", "d"]]),
        (("a",), 2, 1, [["a"], ["a"]]),
        (("a", "b", "c"), 2, 2, [["a", "b"], ["c", "a"]]),
        (("a",), 0, 1, []),
    ],
)
def test_devices_go_round(gpus: tuple[str, ...], pairs: int, ranks: int, expected: list[list[str]]) -> None:
    """Pairs take devices in turn, rank by rank; host memory never runs out; no two vaults have one socket."""
    taken = device_slots(gpus, pairs, ranks)
    assert [[seat.device for seat in pair] for pair in taken] == expected
    sockets = [seat.socket_name for pair in taken for seat in pair]
    assert len(set(sockets)) == len(sockets)


def test_a_second_vault_on_a_gpu_has_a_name_of_its_own() -> None:
    """The first goes by the device's own socket, where others look for it."""
    assert device_slots(("a",), 2, 1) == [[DeviceSlot("a", "a")], [DeviceSlot("a", "a.2")]]


def test_ranks_have_a_vault_each() -> None:
    """Two pairs of two ranks: four vaults on four devices; every engine knows its pair's, the first rank's apart."""
    vaults, engines = planned(wishes(GPUS, workers=2, ranks=2))
    assert [(vault.name, vault.device) for vault in vaults] == list(
        zip(("vault-1", "vault-1-r2", "vault-2", "vault-2-r2"), GPUS, strict=True)
    )
    assert [vault.socket_path for vault in vaults] == [f"{STATE}/gms/gms_{gpu}.sock" for gpu in GPUS]
    assert [engine.name for engine in engines] == ["worker-1a", "worker-1b", "worker-2a", "worker-2b"]
    for place, engine in enumerate(engines):
        first, second = vaults[place // 2 * 2 : place // 2 * 2 + 2]
        assert (engine.failover.vault_socket, engine.failover.device) == (first.socket_path, first.device)
        assert engine.failover.more_vaults == ((second.socket_path, second.device),)
        assert (engine.torch.ranks, engine.standbys, engine.device_pairs) == (2, 1, 1)


def test_ranks_on_a_cpu_have_numbers_of_their_own() -> None:
    """Host memory's numbers are unique over all pairs, and one rank keeps the names that were always there."""
    vaults, engines = planned(wishes(workers=2, ranks=2))
    assert [(vault.name, vault.device) for vault in vaults] == [
        ("vault-1", "host-1"),
        ("vault-1-r2", "host-2"),
        ("vault-2", "host-3"),
        ("vault-2-r2", "host-4"),
    ]
    assert engines[-1].failover.device == "host-3"
    assert engines[-1].failover.more_vaults == ((f"{STATE}/gms/gms_host-4.sock", "host-4"),)
    vaults, engines = planned(wishes(workers=2))
    assert [(vault.name, vault.device) for vault in vaults] == [("vault-1", "host-1"), ("vault-2", "host-2")]
    assert {engine.failover.more_vaults for engine in engines} == {()}


def test_pairs_share_a_gpu_only_with_a_said_pool() -> None:
    """Two pairs on one GPU are refused until --kv-gib says what each may have; then each knows of the other."""
    with pytest.raises(UserError, match="--workers 2 puts 2 workers on one GPU; name more with --device"):
        planned(wishes(GPUS[:1], workers=2))
    vaults, engines = planned(wishes(GPUS[:1], workers=2, kv_gib=10))
    assert [vault.socket_path for vault in vaults] == [f"{STATE}/gms/gms_{GPUS[0]}{end}.sock" for end in ("", ".2")]
    assert {engine.failover.device for engine in engines} == {GPUS[0]}
    assert {engine.device_pairs for engine in engines} == {2}
    assert len(planned(wishes(GPUS[:2], workers=2))[0]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (wishes(GPUS[:2], ranks=4), "--ranks 4 needs as many GPUs, and there are 2 "),
        (wishes(GPUS[:3], workers=2, ranks=2), "--workers 2 puts 2 workers on one GPU"),
        (
            DeploymentSpec("local", worker=WorkerLaunch(engine="sim", torch=TorchSettings(ranks=2))),
            "the sim engine's is --sim-ranks",
        ),
        (DeploymentSpec("local", gpus=GPUS, vault_dir="/tmp/" + "v" * 60), "set GMS_SOCKET_DIR to one of at most "),
    ],
)
def test_what_cannot_be_is_refused(options: DeploymentSpec, said: str) -> None:
    """Wishes that the devices named do not allow are refused before anything is started, with the mend."""
    with pytest.raises(UserError) as refused:
        plan(STATE, options)
    assert said in str(refused.value)


def test_workers_on_a_cpu_do_not_stand_in_for_a_gpus() -> None:
    """What rounds otherwise stands elsewhere in the store; the number of a device changes nothing."""
    on_cpu, on_gpu = planned(wishes(workers=2))[1], planned(wishes(GPUS, workers=2))[1]
    assert len({engine.namespace() for engine in on_cpu}) == 1
    assert len({engine.namespace() for engine in on_gpu}) == 1
    assert on_cpu[0].namespace() != on_gpu[0].namespace()


# -- what each is told


def test_a_long_vault_directory_is_refused() -> None:
    """So is a vaults' directory, but only where there are vaults."""
    far = "/tmp/" + "v" * 100
    with pytest.raises(UserError, match="set GMS_SOCKET_DIR to one of at most"):
        plan(STATE, DeploymentSpec("local", vault_dir=far))
    assert plan(STATE, DeploymentSpec("local", vault_dir=far, standbys=0, worker=SIM))


def test_the_longest_names_fit_the_longest_state_directory() -> None:
    """A state directory that is just not refused has room for every socket of the largest deployment."""
    options = DeploymentSpec("local", workers=256, standbys=8)
    folder = next(
        folder
        for size in range(100, 0, -1)
        if (folder := Path("/tmp/" + "y" * size)) and not _refused(folder, DeploymentSpec("local"))
    )
    for launch in plan(folder, options):
        paths = [getattr(launch, name, "") for name in ("address", "beat_address", "socket_path")]
        paths.append(getattr(launch, "failover", FailoverSettings()).vault_socket)
        paths.append(f"{folder}/run/{launch.name}.chaos")
        assert max(len(path.removeprefix("unix://").encode()) for path in paths) <= 107


def _refused(folder: Path, options: DeploymentSpec) -> bool:
    try:
        plan(folder, options)
    except UserError:
        return True
    return False


def test_the_plan_is_steady() -> None:
    """The same wishes give the same settings, byte for byte; another port changes the frontend alone."""
    first, again = (list(map(Job.of, plan(STATE, DeploymentSpec("local")))) for _ in range(2))
    other = list(map(Job.of, plan(STATE, DeploymentSpec("local", port=8001))))
    assert first == again
    assert [job.name for job in first] == ["store", "vault-1", "worker-1a", "worker-1b", "frontend", "control"]
    same = [one.settings == two.settings for one, two in zip(first, other, strict=True)]
    assert same == [True, True, True, True, False, True]


def test_a_pair_shares_memory_lock_and_group() -> None:
    """The engines of one worker differ in name, place and sockets alone; two workers share nothing."""
    options = DeploymentSpec(
        "local", workers=2, standbys=2, worker=WorkerLaunch(failover=FailoverSettings(standby="unmapped", kv="direct"))
    )
    launches = plan(STATE, options)
    vaults = [launch for launch in launches if isinstance(launch, VaultLaunch)]
    engines = [launch for launch in launches if isinstance(launch, WorkerLaunch)]
    assert [launch.name for launch in engines] == [f"worker-{place}{letter}" for place in (1, 2) for letter in "abc"]
    assert [engine.failover.engine_id for engine in engines] == [0, 1, 2, 0, 1, 2]
    assert [(vault.name, vault.device) for vault in vaults] == [("vault-1", "host-1"), ("vault-2", "host-2")]
    for place, vault in enumerate(vaults, 1):
        own = engines[3 * (place - 1) : 3 * place]
        shared = {(e.group, e.lock, p.device, p.vault_socket, p.standby, p.kv) for e in own for p in [e.failover]}
        lock = f"flock://{STATE}/run/worker-{place}.lock"
        assert shared == {(f"worker-{place}", lock, vault.device, vault.socket_path, "unmapped", "direct")}
        assert len({e.address for e in own} | {e.beat_address for e in own}) == 6
    assert vaults[0].socket_path == f"{STATE}/gms/gms_host-1.sock"


def test_without_standbys_there_are_plain_workers() -> None:
    """--standbys 0: no vault, no lock, no group; the names are the old ones."""
    launches = plan(STATE, DeploymentSpec("local", workers=2, standbys=0, worker=SIM))
    assert [launch.name for launch in launches] == ["store", "worker-1", "worker-2", "frontend", "control"]
    workers = [launch for launch in launches if isinstance(launch, WorkerLaunch)]
    assert {(w.lock, w.group, w.failover.vault_socket) for w in workers} == {("", "", "")}


def test_who_is_watched() -> None:
    """Every process has a startup bound, and every worker's beats are heard."""
    jobs = list(map(Job.of, plan(STATE, DeploymentSpec("local"))))
    assert all(job.probes is not None for job in jobs)
    assert {job.name: job.beat_address for job in jobs if job.beat_address} == {
        name: f"unix://{STATE}/run/{name}.beat" for name in ("worker-1a", "worker-1b")
    }


def test_an_outside_store_replaces_our_own() -> None:
    """With --store no store is started, and everyone is told the given one."""
    options = DeploymentSpec("local", standbys=0, frontends=2, store="etcd://127.0.0.1:2379", worker=SIM)
    launches = plan(STATE, options)
    assert [type(launch) for launch in launches] == [WorkerLaunch, FrontendLaunch, FrontendLaunch, ControlLaunch]
    stores = {launch.store for launch in launches if not isinstance(launch, StoreLaunch | VaultLaunch)}
    assert stores == {"etcd://127.0.0.1:2379"}


def test_stopping_everything_is_bounded() -> None:
    """The longest way down, stage after stage, stays within ten seconds with default settings."""
    bounds = {job.role: job.stop_bound_s for job in map(Job.of, plan(STATE, DeploymentSpec("local")))}
    assert sum(max(bounds.get(role, 0.0) for role in stage) for stage in STOP_ORDER) <= 10.0


@pytest.mark.parametrize("controls", [0, 1, 3])
def test_controls_are_as_many_as_asked_for(controls: int) -> None:
    """They share one lock, have pages of their own below the workers', and come last; none is a deployment too."""
    launches = plan(STATE, DeploymentSpec("local", controls=controls, standbys=0, worker=SIM))
    found = [launch for launch in launches if isinstance(launch, ControlLaunch)]
    assert launches[len(launches) - controls :] == found
    assert [launch.name for launch in found] == ["control", "control-2", "control-3"][:controls]
    pages = [launch.status_address for launch in found]
    assert pages == [f"tcp://127.0.0.1:{port}" for port in (9649, 9648, 9647)][:controls]
    assert {launch.elected_by() for launch in found} <= {f"flock://{STATE}/run/control-local.lock"}


def test_controls_of_one_etcd_share_one_lock() -> None:
    """On whatever machine: what decides about the same workers is elected where those stand."""
    options = DeploymentSpec("local", store="etcd://10.0.0.1:2379,10.0.0.2:2379", standbys=0, worker=SIM)
    locks = {launch.elected_by() for launch in plan(STATE, options) if isinstance(launch, ControlLaunch)}
    assert locks == {"etcd://10.0.0.1:2379,10.0.0.2:2379/v1/locks/local/control"}

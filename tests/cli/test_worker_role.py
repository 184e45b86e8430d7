"""`holdfast run worker` by itself: from the environment a pod gives its engines, and what its flags mean."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import start as starting
from holdfast.cli.app import run
from holdfast.core.address import TcpAddress, UnixAddress
from holdfast.settings import read_environment
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.engines import FailoverSettings
from holdfast.spec.jobs import Job
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.names import group_of
from holdfast.spec.plan import plan
from holdfast.supervise.records import read_records
from holdfast.testing.rig import free_port, get_json
from tests.rigs.cli.up_rig import UpRig, until

STATE = Path("/tmp/hf")  # of plans that nobody carries out
# What an operator gives each engine of a pod, and nothing else.
POD = ("ENGINE_ID", "GMS_SOCKET_DIR", "FAILOVER_LOCK_PATH", "DYN_SYSTEM_PORT")


def launched(*words: str, **environ: str) -> WorkerLaunch:
    """What a command line would start."""
    caught: list[WorkerLaunch] = []
    folder = tempfile.TemporaryDirectory(prefix="hfw-", dir=os.environ["HOLDFAST_STATE_DIR"])
    with folder as own, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_STATE_DIR", own)  # a name is its process's until it ends, and here nobody does
        patch.setattr(starting, "run_foreground", lambda launch: caught.append(launch) or 0)
        for name in (*POD, "DYN_SYSTEM_HOST"):
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        assert run(["worker", *words]) == 0
    return caught[0]


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short path: sockets would lie in it."""
    with tempfile.TemporaryDirectory(prefix="hfw-", dir="/tmp") as folder:
        monkeypatch.setenv("HOLDFAST_STATE_DIR", folder)
        yield


def facts(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    """A worker's /health, {} while it does not answer."""
    return get_json(f"{host}:{port}", "/health")


def test_an_option_that_is_empty_is_not_said() -> None:
    """`--store "$STORE"` without the variable is the default, and of a lock and a status page what the environment
    says."""
    empty = launched("--store", "", "--address", "", "--status-address", "", "--lock", "", FAILOVER_LOCK_PATH="/tmp/l")
    unsaid = launched(FAILOVER_LOCK_PATH="/tmp/l")
    assert (empty.store[-15:], empty.lock) == ("/run/store.sock", "/tmp/l")
    assert (empty.address, empty.status_address) == (unsaid.address, unsaid.status_address)


def test_the_environment_of_a_pod_alone_starts_an_engine_with_a_standby(rig: UpRig) -> None:
    """Two engines with the same command, told apart by ENGINE_ID and DYN_SYSTEM_PORT: one leads, the other stands by,
    and takes over when the first is killed."""
    shared = {"GMS_SOCKET_DIR": str(rig.state_dir / "shared"), "FAILOVER_LOCK_PATH": str(rig.state_dir / "f.lock")}
    ports = [free_port(), free_port()]
    rig.begin("store")
    rig.begin("memory", "serve", "--device", "host-0", **shared)
    engines = [
        rig.begin("worker", ENGINE_ID=str(number), DYN_SYSTEM_PORT=str(port), **shared)
        for number, port in enumerate(ports)
    ]

    def states() -> list[str]:
        return [facts(port).get("status", "") for port in ports]

    until(lambda: sorted(states()) == ["active", "standby"], "one engine that leads and one that stands by")
    seen = [facts(port) for port in ports]
    assert seen[0]["group"] == seen[1]["group"]
    assert [one["engine_id"] for one in seen] == [0, 1]
    leader = states().index("active")
    engines[leader].kill()
    until(lambda: states()[1 - leader] == "active", "the other to take over")


def test_a_torch_worker_loads_the_model_it_was_given() -> None:
    """`--engine torch --model X` is about X: what is loaded, what it is called, where what is fetched is kept."""
    tiny = launched("--engine", "torch", "--model", "tiny", "--exact", "--kv-gib", "0.25", HOLDFAST_CACHE_DIR="/c")
    assert (tiny.source, tiny.model, tiny.cache_dir) == ("tiny", "tiny", "/c")
    assert (tiny.torch.exact, tiny.torch.kv_gib) == (True, 0.25)
    path = launched("--engine", "torch", "--model", "./models/x.gguf", "--served-name", "mine")
    assert (path.source, path.model) == (os.path.abspath("./models/x.gguf"), "mine")
    sim = launched("--model", "words")
    assert (sim.engine, sim.model) == ("sim", "words")


def test_flags_win_over_the_pods_environment() -> None:
    """The environment fills what was not said."""
    pod = {"GMS_SOCKET_DIR": "/shared", "FAILOVER_LOCK_PATH": "/shared/failover.lock", "ENGINE_ID": "1"}
    told = launched(**pod)
    assert told.failover.vault_socket == "/shared/gms_host-0.sock"
    assert (told.lock, told.failover.engine_id, told.standbys) == ("/shared/failover.lock", 1, 1)
    assert told.name == f"{told.group}-1"
    flags = ("--vault-socket", "/v.sock", "--group", "g", "--name", "n", "--engine-id", "3", "--lock", "/l")
    said = launched(*flags, **pod)
    assert (said.failover.vault_socket, said.failover.engine_id) == ("/v.sock", 3)
    assert (said.group, said.name, said.lock) == ("g", "n", "/l")
    plain = launched()
    assert (plain.failover.vault_socket, plain.group, plain.lock) == ("", "", "")


def test_engines_with_one_lock_are_one_group() -> None:
    """A path is another file on another machine; an address is the same lock from everywhere."""
    assert group_of("/shared/failover.lock", "pod-1") == group_of("flock:///shared/failover.lock", "pod-1")
    assert group_of("/shared/failover.lock", "pod-1") != group_of("/shared/failover.lock", "pod-2")
    assert group_of("/a/failover.lock", "pod-1") != group_of("/b/failover.lock", "pod-1")
    assert group_of("etcd://e:2379/lock", "pod-1") == group_of("etcd://e:2379/lock", "pod-2")


def test_status_pages_listen_where_they_are_told() -> None:
    """On loopback unless DYN_SYSTEM_HOST says otherwise, for `worker` and `up`; a flag wins."""
    assert launched(DYN_SYSTEM_PORT="9090").status_address == "tcp://127.0.0.1:9090"
    assert launched(DYN_SYSTEM_PORT="9090", DYN_SYSTEM_HOST="0.0.0.0").status_address == "tcp://0.0.0.0:9090"
    assert launched("--status-address", "tcp://10.0.0.1:1", DYN_SYSTEM_HOST="::").status_address == "tcp://10.0.0.1:1"
    assert read_environment({"HOME": "/h", "DYN_SYSTEM_HOST": "::"}).status_host == "::"
    options = DeploymentSpec("local", status_host="0.0.0.0")
    pages = [one.status_address for one in plan(STATE, options) if isinstance(one, WorkerLaunch)]
    assert pages
    assert all(page.startswith("tcp://0.0.0.0:") for page in pages)


def test_others_are_told_an_address_they_can_reach() -> None:
    """Where a worker listens everywhere somebody must say how it is reached; its heartbeat is beside it."""
    unix = UnixAddress("/w.sock")
    everywhere = TcpAddress("0.0.0.0", 9000)
    for data, beat in ((everywhere, unix), (unix, TcpAddress("::", 0))):
        with pytest.raises(ValueError, match="--advertise HOST"):
            WorkerLaunch(deployment="d", address=str(data), beat_address=str(beat)).check()
    settings = WorkerLaunch(advertise="10.0.0.7")
    assert settings.reached_at(everywhere) == TcpAddress("10.0.0.7", 9000)
    assert settings.reached_at(unix) == unix
    assert launched("--address", "tcp://0.0.0.0:9000", "--advertise", "h").beat_address == "tcp://0.0.0.0:0"
    assert launched("--address", "unix:///w.sock").beat_address.startswith("unix://")


def test_loading_may_take_two_hours_unless_told_otherwise() -> None:
    """For the engine, and for the supervisor that waits for it."""
    hasty = WorkerLaunch(failover=FailoverSettings(load_s=60.0))
    for options, load_s in ((DeploymentSpec("local"), 7200.0), (DeploymentSpec("local", worker=hasty), 60.0)):
        engines = [one for one in plan(STATE, options) if isinstance(one, WorkerLaunch)]
        assert {one.failover.load_s for one in engines} == {load_s}
        probes = [Job.of(one).probes for one in engines]
        assert all(probe is not None and probe.startup_s > load_s for probe in probes)
    assert launched().failover.load_s == 7200.0


# -- a process's name is its own: claimed before anything is called by it


def names(rig: UpRig, role: str) -> dict[str, int]:
    return {record.name: record.pid for record in read_records(rig.state_dir) if record.role == role and record.alive}


def test_processes_started_at_once_without_a_name_have_one_each(rig: UpRig) -> None:
    """Three workers and two frontends in the same moment: five names, five processes that are ready; a name that was
    chosen and is taken is refused with the address where its process really is, and one whose process was killed is
    free again."""
    rig.begin("store")
    port = str(free_port())
    workers = [rig.begin("worker") for _ in range(3)]
    frontends = [rig.begin("frontend", "--port", port) for _ in range(2)]
    until(lambda: len(names(rig, "worker")) == 3, "three workers")
    until(lambda: len(names(rig, "frontend")) == 2, "two frontends")
    assert names(rig, "worker") == {f"worker-{n}": names(rig, "worker")[f"worker-{n}"] for n in (1, 2, 3)}
    assert set(names(rig, "worker").values()) == {process.pid for process in workers}
    assert set(names(rig, "frontend").values()) == {process.pid for process in frontends}

    record = rig.record("worker-1")
    refused = rig.run("worker", "--name", "worker-1")
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert f"pid {record['pid']} runs at {record['address']}" in said
    assert "choose another --name" in said
    assert "Traceback" not in refused.stderr

    os.kill(record["pid"], signal.SIGKILL)
    next(one for one in workers if one.pid == record["pid"]).wait(60)
    rig.begin("worker", "--name", "worker-1")
    until(lambda: rig.back("worker-1", record["pid"]), "another process of that name")


def test_what_cannot_listen_names_the_address_that_is_taken(rig: UpRig) -> None:
    """The status page's port is in use: that is the address in the error, not the one for frontends."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        done = rig.run("worker", "--status-address", where)
    assert done.returncode == 1
    assert re.search(rf"{where} is in use", done.stderr), done.stderr

"""What the command says: help, refusals, and the plan behind `up`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.cli.launch import FrontendLaunch, StoreLaunch, VaultLaunch, WorkerLaunch
from holdfast.cli.machine_checks import check_machine
from holdfast.cli.plan import UpOptions, job_of, plan
from holdfast.cli.screen import chat_command
from holdfast.core.errors import REFUSED, UserError

STATE = Path("/tmp/hf-words")


def holdfast(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *words]
    with tempfile.TemporaryDirectory(dir="/tmp") as state_dir:
        base = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "HOLDFAST_STATE_DIR": state_dir}
        return subprocess.run(command, env=base | env, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    """`holdfast --help` lists the commands in groups, and loads no room for it."""
    done = holdfast("--help")
    assert done.returncode == 0
    run, parts = ("up", "down", "ps", "incidents", "chat"), ("worker", "frontend", "store", "lock", "memory")
    for command in (*run, *parts, "chaos", "bench"):
        assert f"{command} " in done.stdout
    slow = {"uvloop", "tokenizers", "jinja2", "aiohttp", "prometheus_client"}
    code = "import sys, holdfast.cli.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not slow & set(loaded)


def test_version() -> None:
    """`--version` is one line."""
    assert holdfast("--version").stdout == "holdfast 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("up", "--workers", "many"), 2, "--workers"),
        (("up", "--workers", "-1"), REFUSED, "--workers must be 0 to 256"),
        (("up", "--standbys", "-1"), REFUSED, "--standbys must be 0 to 8"),
        (("up", "--standbys", "9"), REFUSED, "--standbys must be 0 to 8"),
        (("up", "--standby", "asleep"), 2, "--standby"),
        (("up", "--kv", "cloud"), 2, "--kv"),
        (("up", "--deployment", "Not A Name"), REFUSED, "--deployment: deployment name 'Not A Name' must be"),
        (("up", "--deployment", ""), REFUSED, "--deployment: deployment name '' must be"),
        (("worker", "--deployment", "a/b"), REFUSED, "--deployment: deployment name 'a/b' must be"),
        (("frontend", "--deployment", "x" * 64), REFUSED, "--deployment: deployment name 'xxx"),
        (("worker", "--name", "../w"), REFUSED, "--name '../w' must be 1-63 letters"),
        (("store", "--name", ""), REFUSED, "--name '' must be 1-63 letters"),
        (("up", "--store", "etcd"), REFUSED, "etcd://127.0.0.1:2379"),
        (("up", "--engine", "sim", "--host", "256.1.1.1"), 1, "is not an address"),
        (("up", "--engine", "sim", "--host", "192.0.2.1"), 1, "not an address of this machine"),
        (("up", "--api-key", ""), REFUSED, "--api-key is empty; is a variable unset?"),
        (("up", "--api-key", "good", "--api-key", " "), REFUSED, "--api-key is empty"),
        (("frontend", "--api-key", ""), REFUSED, "--api-key is empty"),
        (("up", "--api-key", "good "), REFUSED, "--api-key has spaces at its ends"),
        (("up", "--cors-origin", "https://a.example/chat"), REFUSED, "is no origin; e.g. https://chat.example.org"),
        (("frontend", "--cors-origin", "a.example"), REFUSED, "is no origin"),
        (("up", "--engine", "sim", "--hold-s", "inf"), REFUSED, "--hold-s must be a finite number"),
        (("up", "--standbys", "0"), REFUSED, "--engine torch keeps its memory in a vault"),
        (("fly",), 2, "fly"),
    ],
)
def test_mistakes_get_one_line(words: tuple[str, ...], status: int, said: str) -> None:
    """A wrong wish is refused with its name: status 2 for wrong usage, one line for the rest, and status 78 where
    no second try can help."""
    done = holdfast(*words)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    if status != 2:
        assert done.stderr.count("\n") == 1


def test_a_wrong_environment_is_named() -> None:
    """A variable with a wrong value is named in one line."""
    done = holdfast("ps", HOLDFAST_LOG="loud")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "HOLDFAST_LOG" in done.stderr


@pytest.mark.parametrize("keys", ["", ",", " ", " , "])
def test_keys_in_the_environment_that_are_none_open_nothing(keys: str) -> None:
    """A variable that is set was meant to guard: `HOLDFAST_API_KEYS=${KEYS}` with KEYS unset opens nothing."""
    done = holdfast("up", "--engine", "sim", HOLDFAST_API_KEYS=keys)
    assert (done.returncode, done.stderr.count("\n")) == (REFUSED, 1)
    assert "HOLDFAST_API_KEYS is set and holds no key" in done.stderr


def test_a_long_state_directory_is_refused() -> None:
    """A state directory too long for Unix sockets is refused with the mend."""
    done = holdfast("up", HOLDFAST_STATE_DIR="/tmp/" + "x" * 100)
    assert done.returncode == REFUSED
    assert "set HOLDFAST_STATE_DIR to one of at most" in done.stderr
    assert not Path("/tmp/" + "x" * 100).exists()


def test_a_long_vault_directory_is_refused() -> None:
    """So is a vaults' directory, but only where there are vaults."""
    far = Path("/tmp/" + "v" * 100)
    with pytest.raises(UserError, match="set GMS_SOCKET_DIR to one of at most"):
        plan(STATE, UpOptions("local", vault_dir=far))
    assert plan(STATE, UpOptions("local", vault_dir=far, standbys=0))


def test_the_longest_names_fit_the_longest_state_directory() -> None:
    """A state directory that is just not refused has room for every socket of the largest deployment."""
    options = UpOptions("local", workers=256, standbys=8)
    folder = next(
        folder
        for size in range(100, 0, -1)
        if (folder := Path("/tmp/" + "y" * size)) and not _refused(folder, UpOptions("local"))
    )
    for launch in plan(folder, options):
        paths = [getattr(launch, name, "") for name in ("address", "beat_address", "socket_path", "vault_socket")]
        paths.append(f"{folder}/run/{launch.name}.chaos")
        assert max(len(path.removeprefix("unix://").encode()) for path in paths) <= 107


def _refused(folder: Path, options: UpOptions) -> bool:
    try:
        plan(folder, options)
    except UserError:
        return True
    return False


def test_other_machines_are_refused() -> None:
    """Not Linux, or a Python that is too old: one line each, with the mend."""
    with pytest.raises(UserError, match="needs Linux, this is darwin; use a container"):
        check_machine(platform="darwin")
    with pytest.raises(UserError, match=r"needs Python 3\.11 or newer, this is 3\.10; make a venv"):
        check_machine(version=(3, 10))


def test_the_plan_is_steady() -> None:
    """The same wishes give the same settings, byte for byte; another port changes the frontend alone."""
    first, again = (list(map(job_of, plan(STATE, UpOptions("local")))) for _ in range(2))
    other = list(map(job_of, plan(STATE, UpOptions("local", port=8001))))
    assert first == again
    assert [job.name for job in first] == ["store", "vault-1", "worker-1a", "worker-1b", "frontend"]
    same = [one.settings == two.settings for one, two in zip(first, other, strict=True)]
    assert same == [True, True, True, True, False]


def test_a_pair_shares_memory_lock_and_group() -> None:
    """The engines of one worker differ in name, place and sockets alone; two workers share nothing."""
    options = UpOptions("local", workers=2, standbys=2, standby="unmapped", kv="direct")
    launches = plan(STATE, options)
    vaults = [launch for launch in launches if isinstance(launch, VaultLaunch)]
    engines = [launch for launch in launches if isinstance(launch, WorkerLaunch)]
    assert [launch.name for launch in engines] == [f"worker-{place}{letter}" for place in (1, 2) for letter in "abc"]
    assert [engine.engine_id for engine in engines] == [0, 1, 2, 0, 1, 2]
    assert [(vault.name, vault.device) for vault in vaults] == [("vault-1", "host-1"), ("vault-2", "host-2")]
    for place, vault in enumerate(vaults, 1):
        own = engines[3 * (place - 1) : 3 * place]
        shared = {(e.group, e.lock, e.device, e.vault_socket, e.standby, e.kv) for e in own}
        lock = f"flock://{STATE}/run/worker-{place}.lock"
        assert shared == {(f"worker-{place}", lock, vault.device, vault.socket_path, "unmapped", "direct")}
        assert len({e.address for e in own} | {e.beat_address for e in own}) == 6
    assert vaults[0].socket_path == f"{STATE}/gms/gms_host-1.sock"


def test_without_standbys_there_are_plain_workers() -> None:
    """--standbys 0: no vault, no lock, no group; the names are the old ones."""
    launches = plan(STATE, UpOptions("local", workers=2, standbys=0))
    assert [launch.name for launch in launches] == ["store", "worker-1", "worker-2", "frontend"]
    workers = [launch for launch in launches if isinstance(launch, WorkerLaunch)]
    assert {(w.lock, w.group, w.vault_socket) for w in workers} == {("", "", "")}


def test_who_is_watched() -> None:
    """Every process has a startup bound, and every worker's beats are heard."""
    jobs = list(map(job_of, plan(STATE, UpOptions("local"))))
    assert all(job.probes is not None for job in jobs)
    assert {job.name: job.beat_address for job in jobs if job.beat_address} == {
        name: f"unix://{STATE}/run/{name}.beat" for name in ("worker-1a", "worker-1b")
    }


def test_an_outside_store_replaces_our_own() -> None:
    """With --store no store is started, and everyone is told the given one."""
    options = UpOptions("local", workers=1, standbys=0, frontends=2, store="etcd://127.0.0.1:2379")
    launches = plan(STATE, options)
    assert [type(launch) for launch in launches] == [WorkerLaunch, FrontendLaunch, FrontendLaunch]
    stores = {launch.store for launch in launches if not isinstance(launch, StoreLaunch | VaultLaunch)}
    assert stores == {"etcd://127.0.0.1:2379"}


def test_stopping_everything_is_bounded() -> None:
    """The longest way down, stage after stage, stays within ten seconds with default settings."""
    bounds = {job.role: job.stop_bound_s for job in map(job_of, plan(STATE, UpOptions("local")))}
    assert sum(bounds.values()) <= 10.0


def test_the_shown_curl_survives_a_shell() -> None:
    """Names and keys with quotes and spaces are quoted, so that the shown command does what it says."""
    command = chat_command("http://127.0.0.1:1", "it's a \"model\"", "key with 'quotes'")
    shown = command.replace("curl ", "printf '%s\\n' ")
    words = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert 'Authorization: Bearer key with \'quotes\'\n' in words
    assert '"model":"it\'s a \\"model\\"","stream":true' in words

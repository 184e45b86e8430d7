"""What the command says: help and refusals."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.cli.app import run
from holdfast.cli.machine_checks import check_machine
from holdfast.cli.screen import chat_command
from holdfast.core.errors import REFUSED, UserError


def holdfast(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *words]
    with tempfile.TemporaryDirectory(dir="/tmp") as state_dir:
        base = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "HOLDFAST_STATE_DIR": state_dir}
        return subprocess.run(command, env=base | env, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    """`holdfast --help` lists the commands in groups."""
    done = holdfast("--help")
    assert done.returncode == 0
    run, parts = ("up", "down", "ps", "incidents", "chat"), ("worker", "frontend", "store", "lock", "memory")
    for command in (*run, *parts, "chaos", "bench"):
        assert f"{command} " in done.stdout


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
        (("worker", "--address", "here"), REFUSED, "--address: address 'here' must start with tcp://"),
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
        (("up", "--engine", "sim", "--hold-s", "1e300"), REFUSED, "--hold-s must be 1,000,000,000 or less"),
        (("up", "--engine", "sim", "--served-name", "\udcff"), 2, "--served-name must be UTF-8, got b'\\xff'"),
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


@pytest.mark.parametrize("words", ["ps", "--help", "--version", "ps --json", "down"])
def test_a_closed_standard_output_is_as_good_as_none(words: str) -> None:
    """`>&-`, as some cron jobs and init scripts have it: the command does its work, and says nothing."""
    shell = f'exec "{sys.executable}" -m holdfast {words} <&- >&-'
    with tempfile.TemporaryDirectory(dir="/tmp") as state_dir:
        env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "HOLDFAST_STATE_DIR": state_dir}
        done = subprocess.run(["sh", "-c", shell], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_its_bench_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not installed by default: one line says how, where `import torch` would be a traceback."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package torch; install it: pip install"):
        run(["bench", "engine"])


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


def test_other_machines_are_refused() -> None:
    """Not Linux, or a Python that is too old: one line each, with the mend."""
    with pytest.raises(UserError, match="needs Linux, this is darwin; use a container"):
        check_machine(platform="darwin")
    with pytest.raises(UserError, match=r"needs Python 3\.11 or newer, this is 3\.10; make a venv"):
        check_machine(version=(3, 10))


def test_the_shown_curl_survives_a_shell() -> None:
    """Names and keys with quotes and spaces are quoted, so that the shown command does what it says."""
    command = chat_command("http://127.0.0.1:1", "it's a \"model\"", "key with 'quotes'")
    shown = command.replace("curl ", "printf '%s\\n' ")
    words = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert 'Authorization: Bearer key with \'quotes\'\n' in words
    assert '"model":"it\'s a \\"model\\"","stream":true' in words

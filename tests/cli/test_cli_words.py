"""What the command says: help, and one line for whatever cannot be."""

from __future__ import annotations

import io
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.cli.api_keys import read_keys
from holdfast.cli.checks import check_machine
from holdfast.cli.screen import Screen, chat_command, open_warning
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import REFUSED, UserError
from holdfast.roles import small_files
from holdfast.supervise.records import Record, write_record
from holdfast.supervise.status import Status
from tests.rigs.cli.up_rig import UpRig

TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
GPUS = tuple(f"GPU-{number}{'0' * 7}-0000-0000-0000-000000000000" for number in range(2))
NO_DIRECTORY = "is not a directory; set HOLDFAST_STATE_DIR"
NO_KEYS = "HOLDFAST_API_KEYS is set and holds no key"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("up --workers many", 2, "--workers"),
        ("up --workers -1", REFUSED, "--workers must be 0 to 256"),
        ("up --standbys -1", REFUSED, "--standbys must be 0 to 8"),
        ("up --standbys 9", REFUSED, "--standbys must be 0 to 8"),
        ("up --standby asleep", 2, "--standby"),
        ("up --kv cloud", 2, "--kv"),
        (("up", "--deployment", "Not A Name"), REFUSED, "--deployment: deployment name 'Not A Name' must be"),
        ("up --deployment=", REFUSED, "--deployment: deployment name '' must be"),
        ("worker --deployment a/b", REFUSED, "--deployment: deployment name 'a/b' must be"),
        (f"frontend --deployment {'x' * 64}", REFUSED, "--deployment: deployment name 'xxx"),
        ("worker --address here", REFUSED, "--address: address 'here' must start with tcp://"),
        ("worker --name ../w", REFUSED, "--name '../w' must be 1-63 letters"),
        ("worker --engine torch --sim-queue 3", REFUSED, "--sim-queue is for --engine sim and does nothing for torch"),
        ("store --name=", REFUSED, "--name '' must be 1-63 letters"),
        ("up --store etcd", REFUSED, "etcd://127.0.0.1:2379"),
        ("up --engine sim --host 256.1.1.1", 1, "is not an address"),
        ("up --engine sim --host 192.0.2.1", 1, "not an address of this machine"),
        ("up --api-key=", REFUSED, "--api-key is empty; is a variable unset?"),
        (("up", "--api-key", "good", "--api-key", " "), REFUSED, "--api-key is empty"),
        ("frontend --api-key=", REFUSED, "--api-key is empty"),
        (("up", "--api-key", "good "), REFUSED, "--api-key has spaces at its ends"),
        ("up --cors-origin https://a.example/chat", REFUSED, "is no origin; e.g. https://chat.example.org"),
        ("frontend --cors-origin a.example", REFUSED, "is no origin"),
        ("up --backend ray --node n1", REFUSED, "--node does nothing with --backend ray: Ray knows its nodes"),
        ("up --backend local --address 127.0.0.1:6379", REFUSED, "--address does nothing without --backend ray"),
        ("up --engine sim --hold-s inf", REFUSED, "--hold-s must be a finite number"),
        ("up --engine sim --hold-s 1e300", REFUSED, "--hold-s must be 1,000,000,000 or less"),
        ("up --engine sim --served-name \udcff", 2, "--served-name must be UTF-8, got b'\\xff'"),
        ("up --standbys 0", REFUSED, "--engine torch keeps its memory in a vault"),
        ("up --device gpu", REFUSED, "use auto, cpu, cuda-0, or a GPU's UUID"),
        (f"up --device {','.join(GPUS)} --ranks 4", REFUSED, "--ranks 4 needs as many GPUs, and there are 2"),
        (f"up --device {GPUS[0]} --workers 2", REFUSED, "--workers 2 puts 2 workers on one GPU"),
        ("up --device cpu --ranks 99", REFUSED, "--ranks must be 1 to 16"),
        pytest.param("up --model /nowhere/m.gguf", REFUSED, "--model /nowhere/m.gguf is not there", marks=TORCH),
        ("up --chat-template /nowhere.jinja", REFUSED, "--chat-template /nowhere.jinja cannot be read"),
        ("fly", 2, "fly"),
        ("pss", 2, "`holdfast` has no command pss; did you mean ps?"),
        ("create -f a", 2, "`holdfast` has no command create; `holdfast up -f FILE` starts a manifest's deployment"),
        ("rollout restart", 2, "`holdfast rollout` has no command restart; change something of what should run"),
        ("memory statu", 2, "`holdfast memory` has no command statu; did you mean status?"),
        ("--jsn", 2, "`holdfast` has no option --jsn; `holdfast --help` lists them"),
        ("chaos worker-1a", 2, "`holdfast chaos` needs fault"),
    ],
)
def test_mistakes_get_one_line(rig: UpRig, words: str | tuple[str, ...], status: int, said: str) -> None:
    """A wrong wish is refused with its name and nothing is started: status 2 for wrong usage, and 78 where no second
    try can help."""
    must_say(rig, words.split() if isinstance(words, str) else words, status, said)


def must_say(rig: UpRig, words: list[str] | tuple[str, ...], status: int, said: str, **environ: str) -> None:
    if words[0] == "up" and "--port" not in words:  # somebody may serve on the usual one while this is tested
        words = ["up", "--port", str(rig.port), *words[1:]]
    done = rig.say(*words, **environ)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert said in done.stderr or re.search(said, done.stderr)
    assert words[0] != "up" or not (rig.state_dir / "run").exists(), "something was started"


@pytest.mark.parametrize(
    ("words", "status", "said", "environ"),
    [
        ("ps", 1, "HOLDFAST_LOG", {"HOLDFAST_LOG": "loud"}),
        *(("up --engine sim", REFUSED, NO_KEYS, {"HOLDFAST_API_KEYS": keys}) for keys in ("", ",", " ", " , ")),
        ("up", REFUSED, "set HOLDFAST_STATE_DIR to one of at most", {"HOLDFAST_STATE_DIR": "/tmp/" + "x" * 100}),
        *((words, REFUSED, NO_DIRECTORY, {"HOLDFAST_STATE_DIR": __file__}) for words in ("up --engine sim", "store")),
        *((words, 1, NO_DIRECTORY, {"HOLDFAST_STATE_DIR": __file__}) for words in ("ps", "down", "lock serve")),
        pytest.param("up", 1, "could not be fetched.*--model PATH.*--model tiny.*--engine sim", OFFLINE, marks=TORCH),
    ],
)
def test_a_wrong_environment_is_named(rig: UpRig, words: str, status: int, said: str, environ: dict[str, str]) -> None:
    """A variable with a wrong value is named in one line: a guard that was meant and is empty opens nothing; a state
    directory is refused with the mend, whichever command meets it; without the network the ways out are named."""
    rig.env["HOLDFAST_CACHE_DIR"] = str(rig.state_dir / "cache")
    must_say(rig, words.split(), status, said, **environ)
    assert not Path("/tmp/" + "x" * 100).exists()


@pytest.mark.parametrize("option", ["-c", "--chat-template"])
def test_up_refuses_a_pipe_that_nobody_writes_to(option: str, rig: UpRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that names the option."""
    monkeypatch.setattr(small_files, "READ_S", 0.2)
    os.mkfifo(pipe := rig.state_dir / "pipe")
    said = f"{option} {pipe} cannot be read: its writer has not finished"
    must_say(rig, ("up", "--engine", "sim", option, str(pipe)), REFUSED, said)


FULL = "holdfast: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("output", "status", "said"), [("<&- >&-", 0, ""), (">/dev/full", 1, FULL), ("", 1, "")])
@pytest.mark.parametrize("words", ["--version", "down"])
def test_an_output_that_cannot_be_written(rig: UpRig, words: str, output: str, status: int, said: str) -> None:
    """For programs and for people, also of a command that takes the lock. Closed, as some cron jobs and init scripts
    have it, it is as good as none; a full disk is one line and status 1; a reader that has left is status 1, without a
    word."""
    reads, writes = os.pipe()
    os.close(reads)
    shell = ["sh", "-c", f'exec "$@" {output}', "sh", *rig.command(*words.split())]
    done = subprocess.run(shell, env=rig.env, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr) == (status, said)


def test_other_machines_are_refused() -> None:
    """Not Linux, or a Python that is too old: one line each, with the mend."""
    with pytest.raises(UserError, match="needs Linux, this is darwin; use a container"):
        check_machine(platform="darwin")
    with pytest.raises(UserError, match=r"needs Python 3\.11 or newer, this is 3\.10; make a venv"):
        check_machine(version=(3, 10))


def test_the_shown_curl_survives_a_shell() -> None:
    """Names and keys with quotes and spaces are quoted, so that the shown command does what it says."""
    command = chat_command("http://127.0.0.1:1", 'it\'s a "model"', "key with 'quotes'", private=True)
    shown = command.replace("curl ", "printf '%s\\n' ")
    words = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert "Authorization: Bearer key with 'quotes'\n" in words
    assert '"model":"it\'s a \\"model\\"","stream":true' in words


def test_who_may_reach_a_server_without_a_key_is_told() -> None:
    """Only where another machine can: not on loopback, not with keys; and where it listens is shown as it is."""
    assert open_warning(["tcp://127.0.0.1:1", "tcp://[::1]:1", "unix:///x"], ()) == ""
    assert open_warning(["tcp://0.0.0.0:1"], ("key",)) == ""
    for host in ("0.0.0.0", "[::]", "192.0.2.1"):
        told = open_warning([f"tcp://{host}:8000"], ())
        assert f"No API key is needed at http://{host}:8000" in told
        assert "--api-key-file" in told
    frontend = Status("frontend", "frontend", 1, "ready", "tcp://0.0.0.0:8000", 0)
    file = io.StringIO()
    Screen(Terminal(file, 100)).table([frontend])
    assert "http://0.0.0.0:8000" in file.getvalue()


@pytest.mark.parametrize(
    ("text", "told"),
    [("\n \n", "holds no key, so that"), ("a\nb\x07\n", "control characters"), (None, "cannot be read")],
)
def test_a_wrong_file_of_keys_opens_nothing(tmp_path: Path, text: str | None, told: str) -> None:
    """Each is refused, with the file and what is wrong with it."""
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError, match=told):
        read_keys(tmp_path / "keys")


def test_ps_shows_no_rows_of_what_a_closed_terminal_ended(rig: UpRig) -> None:
    """Records that ended processes left, and no supervisor: nothing runs, and it is told how to begin again."""
    ended = subprocess.Popen(["true"])
    ended.wait(60.0)
    for name in ("store", "frontend"):
        write_record(rig.folder, Record(name, name, ended.pid, 1))
    said = rig.say("ps").stdout
    assert said.startswith(f"nothing runs in {rig.folder}: all its processes ended")
    assert "`holdfast up` starts it again" in said
    assert "dead" not in said

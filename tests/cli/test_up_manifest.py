"""`holdfast up -f` and what changes it, as a person types them: real processes, and streams that go on meanwhile."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cli.up_rig import UpRig, until

EXAMPLES = Path(__file__).parents[2] / "examples"
FIRST, SECOND = (str(EXAMPLES / f"upgrade-v{number}.yaml") for number in (1, 2))
STREAMS = 8
ROLLOUT_S = 300.0  # on a machine with much else to do


def one(rig: UpRig) -> dict[str, Any]:
    """The deployment as `holdfast get` has it; {} where nothing answers."""
    done = rig.run("get", "upgrade", "-o", "json")
    return json.loads(done.stdout) if done.returncode == 0 else {}  # type: ignore[no-any-return]


def workers(rig: UpRig) -> set[str]:
    return {name for name, record in rig.records().items() if record["role"] == "worker"}


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_a_deployment_from_its_start_to_its_end(rig: UpRig) -> None:
    """Up, looked at, upgraded and undone under streams, none of which is lost, and deleted: then nothing is left."""
    up = rig.run("up", "-f", FIRST, "--detach", "--port", str(rig.port))
    assert up.returncode == 0, up.stderr
    assert "is up: upgrade" in up.stdout
    assert f"curl -N http://127.0.0.1:{rig.port}/v1/chat/completions" in up.stdout
    second = rig.run("up", "-f", FIRST, "--port", str(rig.port))
    assert second.returncode == 1
    assert "upgrade runs already" in second.stderr
    assert "`holdfast apply -f FILE`" in second.stderr
    assert {process["state"] for process in rig.ps().values()} == {"ready"}
    old = workers(rig)
    streams = [rig.stream(f"story {n}", 300, model=rig.model).wait_tokens() for n in range(STREAMS)]
    assert rig.run("diff", "-f", SECOND).returncode == 1
    applied = rig.command("apply", "-f", SECOND, "--wait")
    assert rig.start("apply", applied).wait(ROLLOUT_S) == 0, rig.log("apply")
    assert "revision 2 is in place" in rig.log("apply")
    answers = [stream.answer() for stream in streams]
    assert [(answer.wrong, answer.exact) for answer in answers] == [("", True)] * STREAMS
    assert not old & workers(rig)
    assert rig.run("diff", "-f", SECOND).returncode == 0
    assert rig.start("undo", rig.command("rollout", "undo", "--wait")).wait(ROLLOUT_S) == 0, rig.log("undo")
    assert rig.chat().wrong == ""
    assert one(rig)["status"]["revision"] == 3
    assert rig.start("delete", rig.command("delete", "upgrade")).wait(ROLLOUT_S) == 0, rig.log("delete")
    rig.must_be_gone()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_a_supervisor_that_is_killed_is_followed_by_one_that_goes_on(rig: UpRig) -> None:
    """In mid-rollout: streams go on without it, the next one ends the rollout that the store holds, whatever its file
    says, and Ctrl-C ends everything."""
    up = rig.run("up", "-f", FIRST, "--detach", "--port", str(rig.port))
    assert up.returncode == 0, up.stderr
    old = workers(rig)
    streams = [rig.stream(f"story {n}", 400, model=rig.model).wait_tokens() for n in range(STREAMS)]
    assert rig.run("apply", "-f", SECOND).returncode == 0
    until(lambda: workers(rig) - old, "a new worker")
    rig.lose_supervisor()
    assert "no supervisor runs upgrade" in rig.run("rollout", "status").stderr
    screen = rig.start("screen", rig.command("up", "-f", FIRST, "--port", str(rig.port)))
    until(lambda: "goes on with revision 2, which the store holds; the file differs" in rig.screen(), "its word")
    status = rig.start("status", rig.command("rollout", "status"))
    assert status.wait(ROLLOUT_S) == 0, rig.log("status")
    answers = [stream.answer() for stream in streams]
    assert [(answer.wrong, answer.exact) for answer in answers] == [("", True)] * STREAMS
    assert not old & workers(rig)
    assert len(workers(rig)) == 2
    screen.send_signal(signal.SIGINT)
    assert screen.wait(60.0) == 0, rig.screen()
    rig.must_be_gone()


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.processes
def test_a_manifest_that_options_were_written_as_serves_the_same(rig: UpRig, tmp_path: Path) -> None:
    """`up --dry-run` starts nothing and prints it; `up -f` serves with it, as the options say: model, key, workers."""
    options = ("--engine", "sim", "--served-name", "words", "--workers", "2", "--standbys", "0", "--api-key", "hush")
    dry = rig.run("up", "--dry-run", *options, "--sim-tpot-ms", "1")
    assert dry.returncode == 0, dry.stderr
    assert "hush" not in dry.stdout
    assert not rig.pids()
    file = tmp_path / "printed.yaml"
    file.write_text(dry.stdout)
    refused = rig.run("up", "-f", str(file), "--port", str(rig.port))
    assert refused.returncode == 78
    assert "HOLDFAST_API_KEYS" in refused.stderr
    secret = rig.state_dir / "secrets" / "local"
    secret.mkdir(parents=True, mode=0o700)
    (secret / "HOLDFAST_API_KEYS").write_text("hush")
    up = rig.run("up", "-f", str(file), "--detach", "--port", str(rig.port))
    assert up.returncode == 0, up.stderr
    assert len(workers(rig)) == 2
    url = f"http://127.0.0.1:{rig.port}/v1/models"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=60)
    keyed = urllib.request.Request(url, headers={"Authorization": "Bearer hush"})
    with urllib.request.urlopen(keyed, timeout=60) as page:
        assert [model["id"] for model in json.load(page)["data"]] == ["words"]
    assert rig.run("down").returncode == 0
    rig.must_be_gone()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("-f", FIRST, "--workers", "2"), 78, "--workers is for the manifest to say"),
        (("-f", "/nowhere.yaml"), 1, "-f /nowhere.yaml cannot be read: No such file or directory"),
        (("-f", "/"), 1, "-f / cannot be read: Is a directory"),
        (("-f", FIRST, "--store", "etcd:/x"), 78, "etcd:/x"),
        (("-f", FIRST, "--host", "192.0.2.1"), 1, "192.0.2.1 is not an address of this machine"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    rig: UpRig, words: tuple[str, ...], status: int, told: str
) -> None:
    """In one line that names it, after what the manifest is warned about."""
    done = rig.say("up", *words)
    lines = [line for line in done.stderr.splitlines() if ": warning: " not in line]
    assert (done.returncode, len(lines)) == (status, 1), done.stderr
    assert told in lines[0]
    assert not rig.pids()

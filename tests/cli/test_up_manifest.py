"""`holdfast up -f` and what changes it, as a person types them: real processes, and streams that go on meanwhile."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cli.up_place import Place, until

EXAMPLES = Path(__file__).parents[2] / "examples"
FIRST, SECOND = (str(EXAMPLES / f"upgrade-v{number}.yaml") for number in (1, 2))
STREAMS = 8
ROLLOUT_S = 300.0  # on a machine with much else to do


def one(place: Place) -> dict[str, Any]:
    """The deployment as `holdfast get` has it; {} where nothing answers."""
    done = place.run("get", "upgrade", "-o", "json")
    return json.loads(done.stdout) if done.returncode == 0 else {}  # type: ignore[no-any-return]


def workers(place: Place) -> set[str]:
    return {name for name, record in place.records().items() if record["role"] == "worker"}


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_a_deployment_from_its_start_to_its_end(place: Place) -> None:
    """Up, looked at, upgraded and undone under streams, none of which is lost, and deleted: then nothing is left."""
    up = place.run("up", "-f", FIRST, "--detach", "--port", str(place.port))
    assert up.returncode == 0, up.stderr
    assert "is up: upgrade" in up.stdout
    assert f"curl -N http://127.0.0.1:{place.port}/v1/chat/completions" in up.stdout
    second = place.run("up", "-f", FIRST, "--port", str(place.port))
    assert second.returncode == 1
    assert "upgrade runs already" in second.stderr
    assert "`holdfast apply -f FILE`" in second.stderr
    assert {process["state"] for process in place.ps().values()} == {"ready"}
    old = workers(place)
    streams = [place.stream(f"story {n}", 300, model=place.model).wait_tokens() for n in range(STREAMS)]
    assert place.run("diff", "-f", SECOND).returncode == 1
    applied = place.command("apply", "-f", SECOND, "--wait")
    assert place.start("apply", applied).wait(ROLLOUT_S) == 0, place.log("apply")
    assert "revision 2 is in place" in place.log("apply")
    answers = [stream.answer() for stream in streams]
    assert [(answer.wrong, answer.exact) for answer in answers] == [("", True)] * STREAMS
    assert not old & workers(place)
    assert place.run("diff", "-f", SECOND).returncode == 0
    assert place.start("undo", place.command("rollout", "undo", "--wait")).wait(ROLLOUT_S) == 0, place.log("undo")
    assert place.chat().wrong == ""
    assert one(place)["status"]["revision"] == 3
    assert place.start("delete", place.command("delete", "upgrade")).wait(ROLLOUT_S) == 0, place.log("delete")
    place.must_be_gone()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_a_supervisor_that_is_killed_is_followed_by_one_that_goes_on(place: Place) -> None:
    """In mid-rollout: streams go on without it, the next one ends the rollout that the store holds, whatever its file
    says, and Ctrl-C ends everything."""
    up = place.run("up", "-f", FIRST, "--detach", "--port", str(place.port))
    assert up.returncode == 0, up.stderr
    old = workers(place)
    streams = [place.stream(f"story {n}", 400, model=place.model).wait_tokens() for n in range(STREAMS)]
    assert place.run("apply", "-f", SECOND).returncode == 0
    until(lambda: workers(place) - old, "a new worker")
    place.lose_supervisor()
    assert "no supervisor runs upgrade" in place.run("rollout", "status").stderr
    screen = place.start("screen", place.command("up", "-f", FIRST, "--port", str(place.port)))
    until(lambda: "goes on with revision 2, which the store holds; the file differs" in place.screen(), "its word")
    status = place.start("status", place.command("rollout", "status"))
    assert status.wait(ROLLOUT_S) == 0, place.log("status")
    answers = [stream.answer() for stream in streams]
    assert [(answer.wrong, answer.exact) for answer in answers] == [("", True)] * STREAMS
    assert not old & workers(place)
    assert len(workers(place)) == 2
    screen.send_signal(signal.SIGINT)
    assert screen.wait(60.0) == 0, place.screen()
    place.must_be_gone()


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
    place: Place, words: tuple[str, ...], status: int, told: str
) -> None:
    """In one line that names it, after what the manifest is warned about."""
    done = place.say("up", *words)
    lines = [line for line in done.stderr.splitlines() if ": warning: " not in line]
    assert (done.returncode, len(lines)) == (status, 1), done.stderr
    assert told in lines[0]
    assert not place.pids()

"""`holdfast up` says that it is up once it serves, and until then what it waits for."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from holdfast.roles.starting import lacks
from holdfast.testing.rig import free_port
from tests.rigs.cli.up_rig import UpRig, until

STORE = "tcp://127.0.0.1:{port}"
SHAPE = ("--engine", "sim", "--standbys", "0")


@pytest.mark.long
@pytest.mark.processes
def test_it_is_not_up_before_it_serves(rig: UpRig) -> None:
    """Every process is ready but the store is not there: it says so, and is up when the store has come."""
    store = STORE.format(port=free_port())
    words = rig.command("up", "--port", str(rig.port), "--status-port", "0", "--store", store, *rig.shape)
    rig.start("screen", words)
    up = rig.processes["screen"]
    until(lambda: f"waiting for the store {store}: it does not answer" in rig.screen(), "what it waits for")
    assert rig.record("worker-1").get("state") == "ready"
    assert "is up" not in rig.screen()
    assert not rig.lock().get("up")
    serve = rig.command("store", "--address", store, "--name", "late")
    rig.started.append(subprocess.Popen(serve, env=rig.env, stderr=subprocess.DEVNULL))
    until(lambda: "is up: model holdfast-sim" in rig.screen(), "it to be up")
    assert rig.health()["status"] == "ready"
    assert rig.lock()["up"]
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0


@pytest.mark.processes
@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
def test_waiting_is_bounded(rig: UpRig, detach: tuple[str, ...]) -> None:
    """Past --wait-s it says what it waited for, with status 1, and leaves nothing running."""
    store = STORE.format(port=free_port())
    asked = ("--store", store, "--wait-s", "1.5", "--status-port", "0", *rig.shape, *detach)
    done = rig.run("up", "--port", str(rig.port), *asked)
    assert done.returncode == 1, done.stdout
    assert "not serving after 1.5 s: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert "is up" not in done.stdout
    rig.must_be_gone()


READY: dict[str, Any] = {"status": "ready", "store": "connected", "models": ["m"], "workers": []}


@pytest.mark.parametrize(
    ("facts", "models", "lack"),
    [
        (READY, ["m"], ""),
        (READY, ["n"], "waiting for a worker of n"),
        (None, ["m"], "waiting for its answer"),
        (READY | {"status": "no_worker", "models": []}, [], ""),
        (READY | {"status": "no_worker", "reason": "no worker is known", "models": []}, ["m"], "no worker is known"),
        (READY | {"status": "no_worker", "store": "lost", "models": []}, ["m"], "the store s: it does not answer"),
        (
            READY | {"status": "no_worker", "workers": [{"reason": "it is standby"}, {"reason": ""}]},
            ["m"],
            "waiting for a worker: it is standby",
        ),
    ],
)
def test_what_a_frontend_waits_for(facts: dict[str, Any] | None, models: list[str], lack: str) -> None:
    """The nearest cause that it knows: the store before the workers, a worker's own reason before none."""
    said = lacks(facts, models, "s")
    assert lack in said
    assert bool(said) == bool(lack)

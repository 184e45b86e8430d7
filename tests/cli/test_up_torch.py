"""`holdfast up` as it is by default: a real model in a pair of torch engines. Real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.resolve import SMOLLM2, fetch
from holdfast.roles.model_names import named
from holdfast.roles.running import log_dir
from holdfast.roles.starting import IMPORTING, LOADING, WAITING, WARMING, Start, phase_of
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import FrontendLaunch, WorkerLaunch
from holdfast.spec.plan import plan
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import launch_path
from tests.rigs.cli.pseudo_terminal import OnTerminal
from tests.rigs.cli.up_rig import UpRig

pytestmark = pytest.mark.alone
TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def rig() -> Iterator[UpRig]:
    # Little memory and one thread: tests share the machine.
    made = UpRig("--kv-gib", "0.05", "--torch-threads", "1")
    made.model = "tiny"
    yield made
    made.close()


@TORCH
@pytest.mark.processes
@pytest.mark.long
def test_the_default_is_a_pair_whose_streams_outlive_a_kill(rig: UpRig) -> None:
    """Without --engine it is a torch pair; the screen told on which device, and what it did; the active dies and the
    stream goes on."""
    done = rig.up("--model", "tiny", "--context", "256", "--streams-max", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--device auto: ")
    launch = json.loads(launch_path(rig.state_dir, "worker-1a").read_bytes())
    assert (launch["torch"]["context_tokens_max"], launch["torch"]["concurrency"]) == (256, 3)
    for word in (f"worker-1a: {IMPORTING}", f"worker-1b: {IMPORTING}", "model tiny", "Kill the active engine"):
        assert word in done.stdout
    processes = rig.ps()
    vault = ["vault-1", "vault-1-keeper", "vault-1-server"]
    assert list(processes) == ["store", *vault, "worker-1a", "worker-1b", "frontend", "control"]
    active = rig.until_whole()["active"]["pid"]
    stream = rig.stream(max_tokens=200, model="tiny", return_token_ids=True).wait_tokens(10)
    os.kill(active, signal.SIGKILL)
    answer = stream.answer()
    assert (answer.wrong, len(answer.tokens), answer.resumed) == ("", 200, 1)
    assert rig.run("down").returncode == 0
    rig.must_be_gone()


@TORCH
@pytest.mark.processes
@pytest.mark.long
def test_ctrl_c_while_the_weights_load(rig: UpRig) -> None:
    """On a terminal the phases are shown as they come; Ctrl-C amid the load ends everything."""
    cache = Path(os.environ.get("HOLDFAST_CACHE_DIR") or Path.home() / ".cache" / "holdfast")
    try:
        model = fetch(SMOLLM2, cache, lambda *_: None)
    except UserError as error:
        pytest.skip(str(error))
    words = ("up", "--port", str(rig.port), "--model", str(model), *rig.shape)
    with OnTerminal(rig.state_dir, *words, columns=200) as up:
        up.until(f"worker-1b: {IMPORTING}")
        up.until(f"{LOADING}, ")
        up.type("\x03")
        assert up.end() == 0
        assert "everything has stopped" in up.output
        assert "is up:" not in up.output
    rig.must_be_gone()


@TORCH
@pytest.mark.processes
def test_calling_off_a_detached_start_ends_it(rig: UpRig) -> None:
    """Ctrl-C before `up --detach` has said that it runs leaves nothing running."""
    words = ("up", "--detach", "--port", str(rig.port), "--model", "tiny", *rig.shape)
    with OnTerminal(rig.state_dir, *words, columns=200) as up:
        up.until(IMPORTING)
        up.type("\x03")
        assert up.end() == 130
    rig.must_be_gone()


def test_a_random_shape_is_no_path() -> None:
    """`random:8b` is handed on as it is, and is the model's name too."""
    assert named("torch", "random:8b", "") == ("random:8b", "random:8b")
    assert named("torch", "random:8b", "big") == ("random:8b", "big")


# -- phases


AT = "2026-01-02 03:04:05,678 worker-1a INFO "


@pytest.mark.parametrize(
    ("said", "phase"),
    [
        ([], IMPORTING),
        (["hash: 3 of 9 MiB"], "reading the model, 3 of 9 MiB"),
        (["fetch: …"], "fetching the model"),
        (["weights sha256:0: 9 bytes written in 2.44 s", "compile: …"], "compiling kernels"),
        (["writing the weights sha256:0, float32"], LOADING),
        (["writing the weights sha256:0, float32", "load: 1 of 513 MiB", "else"], f"{LOADING}, 1 of 513 MiB"),
        (["load: 513 of 513 MiB", "weights sha256:0, float32: 538968064 bytes written in 2.44 s"], WARMING),
        (["weights sha256:0, float32: 538968064 bytes mapped and verified in 3.60 s"], WARMING),
    ],
)
def test_the_last_word_decides_the_phase(said: list[str], phase: str) -> None:
    """An engine is at what it logged last, if that tells a phase."""
    assert phase_of([AT + line for line in said], IMPORTING) == phase


def test_old_lines_count_for_nothing(tmp_path: Path) -> None:
    """Only what was logged since this start counts; who has not spoken waits for the one that writes the weights."""
    launches = plan(tmp_path, DeploymentSpec("local"))
    logs = LocalProcesses(log_dir(tmp_path))
    log_dir(tmp_path).mkdir()
    first, second = (launch.name for launch in launches if isinstance(launch, WorkerLaunch))
    logs.path(first).write_text(f"{AT}load: 1 of 9 MiB\n")
    start = Start.of(tmp_path, logs, launches)
    frontend = next(launch.name for launch in launches if isinstance(launch, FrontendLaunch))
    assert start.doing(logs) == {"store": "starting", "vault-1": "starting", frontend: "starting"} | dict.fromkeys(
        (first, second), IMPORTING
    )
    with logs.path(first).open("a") as log:
        log.write(f"{AT}load: 2 of 9 MiB\n")
    assert start.doing(logs)[first] == f"{LOADING}, 2 of 9 MiB"
    assert start.doing(logs)[second] == WAITING

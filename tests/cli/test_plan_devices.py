"""Which devices `holdfast up` takes, who sits on which, and what of it engines and vaults are told."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from up_rig import START_S, Place

from holdfast.cli import devices
from holdfast.cli.devices import Chosen, Found, choose, exact_note
from holdfast.cli.launch import TorchLaunch, VaultLaunch, WorkerLaunch
from holdfast.cli.models import named
from holdfast.cli.plan import UpOptions, plan
from holdfast.cli.seats import Seat, seats
from holdfast.core.errors import REFUSED, UserError
from holdfast.supervise.records import launch_path

STATE = Path("/tmp/hf-devices")
GPUS = tuple(f"GPU-{number}{'0' * 7}-0000-0000-0000-000000000000" for number in range(4))


def wishes(gpus: tuple[str, ...] = (), workers: int = 1, **torch: Any) -> UpOptions:
    return UpOptions("local", "torch", workers=workers, gpus=gpus, torch=TorchLaunch(**torch))


def planned(options: UpOptions) -> tuple[list[VaultLaunch], list[WorkerLaunch]]:
    launches = plan(STATE, options)
    vaults = [launch for launch in launches if isinstance(launch, VaultLaunch)]
    return vaults, [launch for launch in launches if isinstance(launch, WorkerLaunch)]


def test_exact_on_a_gpu_says_what_it_costs() -> None:
    """Who asks for it there is told at the start; on a CPU, and for others, there is nothing to say."""
    assert "many times slower than --fast" in exact_note(True, Chosen(GPUS[:1]))
    assert exact_note(True, Chosen()) == exact_note(False, Chosen(GPUS[:1])) == ""


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
    taken = seats(gpus, pairs, ranks)
    assert [[seat.device for seat in pair] for pair in taken] == expected
    sockets = [seat.socket_name for pair in taken for seat in pair]
    assert len(set(sockets)) == len(sockets)


def test_a_second_vault_on_a_gpu_has_a_name_of_its_own() -> None:
    """The first goes by the device's own socket, where others look for it."""
    assert seats(("a",), 2, 1) == [[Seat("a", "a")], [Seat("a", "a.2")]]


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
        assert (engine.vault_socket, engine.device) == (first.socket_path, first.device)
        assert engine.more_vaults == ((second.socket_path, second.device),)
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
    assert engines[-1].device == "host-3"
    assert engines[-1].more_vaults == ((f"{STATE}/gms/gms_host-4.sock", "host-4"),)
    vaults, engines = planned(wishes(workers=2))
    assert [(vault.name, vault.device) for vault in vaults] == [("vault-1", "host-1"), ("vault-2", "host-2")]
    assert {engine.more_vaults for engine in engines} == {()}


def test_pairs_share_a_gpu_only_with_a_said_pool() -> None:
    """Two pairs on one GPU are refused until --kv-gib says what each may have; then each knows of the other."""
    with pytest.raises(UserError, match="--workers 2 puts 2 workers on one GPU; name more with --device"):
        planned(wishes(GPUS[:1], workers=2))
    vaults, engines = planned(wishes(GPUS[:1], workers=2, kv_gib=10))
    assert [vault.socket_path for vault in vaults] == [f"{STATE}/gms/gms_{GPUS[0]}{end}.sock" for end in ("", ".2")]
    assert {engine.device for engine in engines} == {GPUS[0]}
    assert {engine.device_pairs for engine in engines} == {2}
    assert len(planned(wishes(GPUS[:2], workers=2))[0]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (wishes(GPUS[:2], ranks=4), "--ranks 4 needs as many GPUs, and there are 2 "),
        (wishes(GPUS[:3], workers=2, ranks=2), "--workers 2 puts 2 workers on one GPU"),
        (wishes(ranks=0), "--ranks must be 1 to 16, got 0"),
        (wishes(ranks=17), "--ranks must be 1 to 16, got 17"),
        (UpOptions("local", torch=TorchLaunch(ranks=2)), "the sim engine's is --sim-ranks"),
        (
            UpOptions("local", "torch", gpus=GPUS, vault_dir=Path("/tmp/" + "v" * 60)),
            "set GMS_SOCKET_DIR to one of at most ",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: UpOptions, said: str) -> None:
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


# -- what --device means


MIG = "MIG-0f000000-0000-0000-0000-000000000000"
NONE = Found(why="there is no NVIDIA GPU")


def never() -> Found:
    raise AssertionError("nobody asked for a look")


@pytest.mark.parametrize(
    ("engine", "text", "found", "expected"),
    [
        ("torch", "auto", Found(GPUS), Chosen(GPUS[:2], f"--device auto: {GPUS[0]}, {GPUS[1]}")),
        ("torch", "auto", Found(GPUS[:1]), Chosen(GPUS[:1], f"--device auto: {GPUS[0]}")),
        ("torch", "auto", NONE, Chosen((), "--device auto: cpu, because there is no NVIDIA GPU")),
        ("torch", "cpu", None, Chosen()),
        ("torch", GPUS[3], None, Chosen((GPUS[3],))),
        ("torch", f"{GPUS[3]}, {GPUS[1]},{GPUS[3]}", None, Chosen((GPUS[3], GPUS[1]))),
        ("torch", MIG, None, Chosen((MIG,))),
        ("torch", "cuda-1", Found(GPUS), Chosen((GPUS[1],))),
        ("sim", "auto", None, Chosen()),
        ("sim", "cpu", None, Chosen()),
    ],
)
def test_what_a_device_means(
    engine: str, text: str, found: Found | None, expected: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes as many GPUs as are needed, or the CPU, and says so; names are taken as they are, each once; the
    machine is looked at only where it must be."""
    monkeypatch.setattr(devices, "gpu_uuids", list)
    assert choose(engine, text, 2, never if found is None else lambda: found) == expected


@pytest.mark.parametrize(
    ("engine", "text", "said"),
    [
        ("torch", "gpu", "use auto, cpu, cuda-0, or a GPU's UUID"),
        ("torch", "", "use auto, cpu, cuda-0"),
        ("torch", f"{GPUS[0]},,", "use auto, cpu, cuda-0"),
        ("torch", "host-1", "host memory is called cpu here"),
        ("torch", f"cpu,{GPUS[0]}", "cpu stands alone"),
        ("torch", f"{GPUS[0]},auto", "auto stands alone"),
        ("torch", "cuda-9", "there is no GPU cuda-9"),
        ("torch", "GPU-what", "no device is named 'GPU-what'"),
        ("sim", "cuda-0", "the sim engine runs on the CPU; a GPU needs --engine torch"),
    ],
)
def test_a_wrong_device_is_named(engine: str, text: str, said: str) -> None:
    """Every wrong name is refused with what is accepted."""
    with pytest.raises(UserError) as refused:
        choose(engine, text, 1, lambda: NONE)
    assert said in str(refused.value)


def test_looking_loads_neither_torch_nor_cuda() -> None:
    """Who starts others asks another process: its own has no torch, no CUDA and so no context afterwards."""
    code = (
        "import sys; from holdfast.cli.devices import look, _ask_driver; look(); "
        "_ask_driver([sys.executable, '-m', 'holdfast.cli.devices']); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'cuda', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("""print('{"gpus": ["GPU-a"], "why": ""}')""", Found(("GPU-a",))),
        ("""print('{"gpus": [], "why": "no luck"}')""", Found(why="no luck")),
        ("import sys; sys.exit('the driver broke')", Found(why="asking the driver failed: the driver broke")),
        ("import os; os.abort()", Found(why="asking the driver failed: status -6")),
        ("import time; time.sleep(60)", Found(why="the driver did not answer within 1 s")),
    ],
)
def test_a_driver_that_breaks_or_hangs_is_none(code: str, expected: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the process that asks the driver, `up` goes on and can say why."""
    monkeypatch.setattr(devices, "LOOK_S", 1.0)
    assert devices._ask_driver([sys.executable, "-S", "-c", code]) == expected


def test_a_build_of_torch_for_cpus_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU and a torch that cannot use it the answer is the CPU; with one that can, the driver's."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_ask_driver", lambda command: Found(("GPU-a",)))
    for line, expected in (
        ("cuda: Optional[str] = None\n", Found(why="torch here is a build for CPUs")),
        ("cuda: Optional[str] = '13.0'\n", Found(("GPU-a",))),
        ("cuda = '12.6'\n", Found(("GPU-a",))),
    ):
        (tmp_path / "version.py").write_text(f"__version__ = '2'\n{line}hip = None\n")
        spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert devices.look(tmp_path) == expected
    assert devices.look(tmp_path / "nothing").why == "there is no NVIDIA GPU"


def test_a_random_shape_is_no_path() -> None:
    """`random:8b` is handed on as it is, and is the model's name too."""
    assert named("torch", "random:8b", "") == ("random:8b", "random:8b")
    assert named("torch", "random:8b", "big") == ("random:8b", "big")


# -- the command


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place("--engine", "torch", "--model", "tiny", "--torch-threads", "1")
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.long
def test_a_tiny_model_on_the_cpu(place: Place) -> None:
    """`up --engine torch --device cpu --model tiny` answers, and its engines have what was asked for."""
    wanted = ("--device", "cpu", "--context", "256", "--streams-max", "3")
    done = place.run("up", "--detach", "--port", str(place.port), *place.shape, *wanted)
    assert done.returncode == 0, done.stderr
    assert "--device auto" not in done.stdout
    assert list(place.ps()) == [
        "store",
        "vault-1",
        "vault-1-keeper",
        "vault-1-server",
        "worker-1a",
        "worker-1b",
        "frontend",
    ]
    launch = json.loads(launch_path(place.state_dir, "worker-1a").read_bytes())
    assert (launch["device"], launch["standbys"], launch["more_vaults"]) == ("host-1", 1, [])
    assert (launch["torch"]["context_tokens_max"], launch["torch"]["concurrency"]) == (256, 3)
    body = {"model": "tiny", "prompt": "as ever", "max_tokens": 5, "ignore_eos": True}
    url = f"http://127.0.0.1:{place.port}/v1/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    answer = urllib.request.urlopen(asked, timeout=START_S)
    assert json.load(answer)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "gpu"), "use auto, cpu, cuda-0, or a GPU's UUID"),
        (("--device", f"{GPUS[0]},{GPUS[1]}", "--ranks", "4"), "--ranks 4 needs as many GPUs, and there are 2"),
        (("--device", GPUS[0], "--workers", "2"), "--workers 2 puts 2 workers on one GPU"),
        (("--device", "cpu", "--ranks", "99"), "--ranks must be 1 to 16"),
    ],
)
def test_the_command_refuses_in_one_line(place: Place, words: tuple[str, ...], said: str) -> None:
    """A device or a number of ranks that cannot be is one line and status 78, with nothing started."""
    done = place.run("up", "--detach", "--port", str(place.port), *place.shape, *words)
    assert (done.returncode, done.stderr.count("\n")) == (REFUSED, 1)
    assert said in done.stderr
    assert not (place.state_dir / "run").exists()


@pytest.mark.processes
def test_auto_says_what_it_took(place: Place) -> None:
    """Where a person leaves the device to us, the first line says which it is."""
    done = place.run("up", "--detach", "--port", str(place.port), *place.shape, "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--device auto: ")

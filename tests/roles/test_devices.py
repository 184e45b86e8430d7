"""Which devices `holdfast up` takes: what a person named, or what this machine has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.roles import devices
from holdfast.roles.devices import Chosen, Found, choose, exact_note, sizes_of

GPUS = tuple(f"GPU-{number}{'0' * 7}-0000-0000-0000-000000000000" for number in range(4))
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
        "import sys; from holdfast.roles.devices import look, _ask_driver; look(); "
        "_ask_driver([sys.executable, '-m', 'holdfast.roles.devices']); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'cuda', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("""print('{"gpus": ["GPU-a"], "why": "", "has_bytes": [7]}')""", Found(("GPU-a",), has_bytes=(7,))),
        ("""print('{"gpus": [], "why": "no luck", "has_bytes": []}')""", Found(why="no luck")),
        ("import sys; sys.exit('the driver broke')", Found(why="asking the driver failed: the driver broke")),
        ("import os; os.abort()", Found(why="asking the driver failed: status -6")),
        ("import time; time.sleep(60)", Found(why="the driver did not answer within 1 s")),
    ],
)
def test_a_driver_that_breaks_or_hangs_is_none(code: str, expected: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the process that asks the driver, `up` goes on and can say why."""
    monkeypatch.setattr(devices, "LOOK_S", 1.0 if "sleep" in code else 60.0)
    assert devices._ask_driver([sys.executable, "-S", "-c", code]) == expected


def test_sizes_are_those_of_the_gpus_that_are_asked_for() -> None:
    """In their order; of one that the driver does not show nobody knows it, and for none nobody is asked."""
    found = Found(("GPU-a", "GPU-b"), has_bytes=(1, 2))
    assert sizes_of(("GPU-b", "MIG-c"), lambda: found) == (2, 0)
    assert sizes_of((), lambda: pytest.fail("nobody is to be asked")) == ()


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


def test_exact_on_a_gpu_says_what_it_costs() -> None:
    """Who asks for it there is told at the start; on a CPU, and for others, there is nothing to say."""
    assert "many times slower than --fast" in exact_note(True, Chosen(GPUS[:1]))
    assert exact_note(True, Chosen()) == exact_note(False, Chosen(GPUS[:1])) == ""

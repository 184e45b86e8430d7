"""Which torch `make` installs, decided for machines that are not here, and looked up on a real index on loopback."""

from __future__ import annotations

import contextlib
import functools
import http.server
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import install
from torch_choice import CPU_INDEX, Choice, Seen, WrongWishError, check_wish, choose, cpu_wheel, needs_index

VERSION = "2.13.0"
CPU = Seen(cpu_wheel=f"{CPU_INDEX}/torch.whl", wheel_bytes=203_000_000)
BLOCKED = Seen()
GPU = Seen(gpu=True, cpu_wheel=CPU.cpu_wheel)
PLAIN = (f"torch=={VERSION}", "")
BUILD_FOR_CPUS = (f"torch=={VERSION}+cpu", CPU_INDEX)
NOTHING = ("", "")
MIRROR = "https://mirror.example/simple"


@pytest.mark.parametrize(
    ("wish", "seen", "chosen", "said"),
    [
        ("auto", CPU, BUILD_FOR_CPUS, "CPU build, for there is no GPU here: 203 MB"),
        ("cpu", CPU, BUILD_FOR_CPUS, "CPU build: 203 MB"),
        ("auto", Seen(cpu_wheel="x"), BUILD_FOR_CPUS, "about 200 MB"),
        ("auto", BLOCKED, PLAIN, "make up TORCH=https://"),
        ("auto", GPU, PLAIN, "with CUDA, for the GPU here: about 0.5 GB, and 2 GB of libraries"),
        ("cpu", GPU, BUILD_FOR_CPUS, "CPU build"),
        ("cuda", CPU, PLAIN, "with CUDA, as asked"),
        ("none", CPU, NOTHING, "only `--engine sim`"),
        (MIRROR, GPU, (f"torch=={VERSION}", MIRROR), "mirror.example"),
        ("auto", Seen(installed="2.13.0+cpu", gpu=True), NOTHING, "torch 2.13.0+cpu is here already"),
        ("auto", Seen(installed="2.14.1"), NOTHING, "here already"),
        ("auto", Seen(installed="2.9.0", cpu_wheel="x"), BUILD_FOR_CPUS, "CPU build"),
        ("cuda", Seen(installed="2.13.0+cpu"), PLAIN, "with CUDA"),
    ],
)
def test_the_choice(wish: str, seen: Seen, chosen: tuple[str, str], said: str) -> None:
    """No GPU: the CPU build where it can be had; a GPU: plain torch; what fits is left alone; a wish decides."""
    choice = choose(wish, VERSION, seen)
    assert (choice.requirement, choice.index) == chosen
    assert said in choice.words


def test_the_index_is_asked_only_if_it_matters() -> None:
    """A machine with a GPU, a torch that fits or a person's word need no look at PyTorch's index."""
    assert needs_index("auto", "", gpu=False)
    assert needs_index("cpu", "", gpu=True)
    assert not needs_index("auto", "", gpu=True)
    assert not needs_index("auto", "2.13.0", gpu=False)
    assert not needs_index("cuda", "", gpu=False)
    assert not needs_index("none", "", gpu=False)


def test_a_wrong_wish_is_named() -> None:
    """TORCH=gpu is refused with the words that there are."""
    for wish in ("auto", "cpu", "cuda", "none", MIRROR):
        check_wish(wish)
    with pytest.raises(WrongWishError, match="auto, cpu, cuda, none or the address of a package index; got 'gpu'"):
        check_wish("gpu")


# -- an index


def put_wheel(folder: Path, version: str, machine: str) -> Path:
    """A real wheel that is called torch, and has nothing in it."""
    path = folder / f"torch-{version}-cp311-cp311-manylinux_2_28_{machine}.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        tag = f"Tag: cp311-cp311-manylinux_2_28_{machine}\n"
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tag}")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, and a page of links for a folder without one, as package indexes have."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/whl/cpu"
        server.shutdown()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """PyTorch's CPU index in small: two machines, and a build with CUDA that must not be taken."""
    folder = tmp_path / "whl" / "cpu" / "torch"
    folder.mkdir(parents=True)
    for machine in ("x86_64", "aarch64"):
        put_wheel(folder, f"{VERSION}+cpu", machine)
    put_wheel(folder, VERSION, "x86_64")
    with served(tmp_path) as address:
        yield address


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_cpu_build_is_found_with_its_size(index: str, tmp_path: Path, machine: str) -> None:
    """The wheel for this machine and Python, and how large it is, before it is fetched."""
    address, size = cpu_wheel(index, VERSION, machine, "cp311")
    name = f"torch-{VERSION}+cpu-cp311-cp311-manylinux_2_28_{machine}.whl"
    assert address.replace("%2B", "+") == f"{index}/torch/{name}"
    assert size == (tmp_path / "whl" / "cpu" / "torch" / name).stat().st_size


def test_what_the_index_does_not_have_is_not_found(index: str) -> None:
    """Another Python, machine or version, a server without such an index, and no server: all the same, nothing."""
    nothing = ("", 0)
    assert cpu_wheel(index, VERSION, "x86_64", "cp399") == nothing
    assert cpu_wheel(index, VERSION, "riscv64", "cp311") == nothing
    assert cpu_wheel(index, "2.13.1", "x86_64", "cp311") == nothing
    assert cpu_wheel(f"{index}/nowhere", VERSION, "x86_64", "cp311") == nothing
    assert cpu_wheel("http://127.0.0.1:1/whl/cpu", VERSION, "x86_64", "cp311") == nothing


def test_pip_takes_what_was_chosen(index: str, tmp_path: Path) -> None:
    """On an x86_64 machine without a GPU a real pip, given the choice, fetches the CPU build and not its neighbour."""
    wheel, size = cpu_wheel(index, VERSION, "x86_64", "cp311")
    choice = choose("auto", VERSION, Seen(cpu_wheel=wheel, wheel_bytes=size), index)
    there = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--only-binary", ":all:"]
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--no-cache-dir", *there]
    pip += ["-q", "--index-url", choice.index, "-d", str(tmp_path / "got"), choice.requirement]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == [Path(wheel).name.replace("%2B", "+")]


# -- the installer


def test_torch_comes_from_its_index_alone(tmp_path: Path) -> None:
    """PyTorch's index is asked for torch and for nothing else; then pip's resolver sees everything; and only when all
    that torch loads is there is it imported."""
    choice = Choice(*BUILD_FOR_CPUS, "")
    (needs, torch), (whole,), (check,) = install.steps(choice, "dev", True, tmp_path / "pins")
    assert CPU_INDEX not in needs[1]
    assert torch[1][-3:] == ["--index-url", CPU_INDEX, BUILD_FOR_CPUS[0]]
    assert "--no-deps" in torch[1]
    assert "--no-deps" not in whole[1]
    assert whole[1][-1] == ".[torch,dev]"
    assert check[1][-1] == "import torch"
    (needs,), (whole,) = install.steps(Choice("", "", ""), "", False, tmp_path / "pins")
    assert whole[1][-1] == "."
    assert not {"sympy", "networkx"} & set(needs[1]), "torch's own needs"


def test_sizes_are_told_before_the_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pip's word for a large file is passed on while pip still runs, small ones are not; a failure has pip's words."""
    lines = [
        "Collecting torch==2.13.0",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (28 kB)",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)",
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)",
        "ERROR: no space left",
    ]
    code = f"print({chr(10).join(lines)!r}); import sys; sys.exit(1)"
    with pytest.raises(install.FailedError) as caught:
        install.watch([install.Job("torch", [sys.executable, "-c", code], tmp_path / "job")])
    assert caught.value.said == ["ERROR: no space left"]
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "torch-2.13.0: 526.6 MB" in told
    assert not any("six" in line for line in told)


def test_half_a_package_is_swept(tmp_path: Path) -> None:
    """What an interrupted pip left is not taken for whole; what is whole stays."""
    for name in ("half-1.0.dist-info", "whole-1.0.dist-info"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "METADATA").write_text("Name: it\n")
    (tmp_path / "whole-1.0.dist-info" / "RECORD").write_text("")
    install.sweep_halves(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.0.dist-info"]

"""Which torch a machine gets, and how large it is: plain Python, for a venv that has nothing yet.

The packages on PyPI bring gigabytes of CUDA, on x86_64 and aarch64 alike; PyTorch keeps builds for CPUs on an index of
its own. Always true: the choice is a pure function of what was wished and what was seen; a torch that is there and fits
is left alone; what is larger than a few megabytes is told with its size before it is fetched.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
WISHES = ("auto", "cpu", "cuda", "none")
VERSION_MIN = (2, 11)  # as pyproject.toml's extra says
LOOK_S = 5.0  # for an index to answer: where it is blocked in silence a person should not wait long
PAGE_BYTES_MAX = 16 * 2**20  # of an index's page; PyTorch's is below one


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found on this machine."""

    installed: str = ""  # torch's version in the venv
    gpu: bool = False
    cpu_wheel: str = ""  # the CPU build's address on its index, "" where it cannot be had
    wheel_bytes: int = 0  # its size; 0: not known


@dataclass(frozen=True, slots=True)
class Choice:
    """What to install, from where, and what to tell. `requirement`: "" for nothing."""

    requirement: str
    index: str  # "": wherever pip looks by itself
    words: str


class WrongWishError(ValueError):
    """TORCH is none of the words, and no address."""


def choose(wish: str, version: str, seen: Seen, index: str = CPU_INDEX) -> Choice:
    """Pure. `version`: the one we are tested with."""
    if wish == "none":
        return Choice("", "", "no torch, as asked: only `--engine sim` will work")
    if _fits(seen.installed) and not (wish == "cuda" and seen.installed.endswith("+cpu")):
        return Choice("", "", f"torch {seen.installed} is here already")
    if is_address(wish):
        return Choice(f"torch=={version}", wish, f"torch {version} from {wish}")
    if wish == "cuda" or (wish == "auto" and seen.gpu):
        why = "as asked" if wish == "cuda" else "for the GPU here"
        return Choice(f"torch=={version}", "", f"torch {version} with CUDA, {why}: about 0.5 GB, and 2 GB of libraries")
    why = "" if wish == "cpu" else ", for there is no GPU here"
    if seen.cpu_wheel:
        size = f"{seen.wheel_bytes / 1e6:.0f} MB" if seen.wheel_bytes else "about 200 MB"
        return Choice(f"torch=={version}+cpu", index, f"torch {version}, CPU build{why}: {size}")
    mend = "an index with the CPU build can be named: make up TORCH=https://…"
    return Choice(f"torch=={version}", "", f"torch {version} from where pip looks, for {index} has none now; {mend}")


def check_wish(wish: str) -> None:
    """WrongWishError, with the mend."""
    if wish not in WISHES and not is_address(wish):
        raise WrongWishError(f"TORCH is {', '.join(WISHES)} or the address of a package index; got {wish!r}")


def is_address(wish: str) -> bool:
    return wish.startswith(("https://", "http://"))


def _fits(installed: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", installed)
    return found is not None and (int(found[1]), int(found[2])) >= VERSION_MIN


# -- looking


def needs_index(wish: str, installed: str, gpu: bool) -> bool:
    """Whether the choice hangs on what PyTorch's CPU index has."""
    return not _fits(installed) and (wish == "cpu" or (wish == "auto" and not gpu))


def has_gpu() -> bool:
    """The driver's own signs; asking the driver takes seconds on a large machine."""
    signs = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
    return any(map(os.path.exists, signs)) or shutil.which("nvidia-smi") is not None


def cpu_wheel(index: str, version: str, machine: str = "", python: str = "") -> tuple[str, int]:
    """The address and size of the CPU build for this machine and Python on an index; ("", 0) if it has none now."""
    machine = machine or platform.machine()
    python = python or f"cp{sys.version_info.major}{sys.version_info.minor}"
    page = f"{index.rstrip('/')}/torch/"
    try:
        with urllib.request.urlopen(page, timeout=LOOK_S) as answer:
            links = re.findall(r'href="([^"#]+)', answer.read(PAGE_BYTES_MAX).decode(errors="replace"))
    except (OSError, ValueError):
        return "", 0
    name = re.compile(rf"torch-{re.escape(version)}\+cpu-{python}-{python}-\w*linux\w*_{re.escape(machine)}\.whl$")
    found = [link for link in links if name.search(urllib.parse.unquote(link))]
    return (address := urllib.parse.urljoin(page, found[0]), _size(address)) if found else ("", 0)


def _size(address: str) -> int:
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=LOOK_S) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0

"""Install Holdfast into the venv this runs in, with torch and everything else it needs: what `make` calls.

    .venv/bin/python scripts/install.py [--torch auto|cpu|cuda|none|INDEX] [--extra dev,…]

Always true: no second passes without a sign of life; a large file is told with its size before it is fetched; the last
step lets pip's resolver look at all of it, so what the quick steps before it did is checked and mended. Quick, because
torch is unpacked beside the rest, nothing is compiled that is never imported, and setuptools builds in the venv itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from torch_choice import CPU_INDEX, Choice, Seen, WrongWishError, check_wish, choose, cpu_wheel, has_gpu, needs_index

ROOT = Path(__file__).resolve().parent.parent
TICK_S = 0.2  # between two looks at what runs; a person sees it move
PLAIN_S = 5.0  # between two signs of life where nobody watches a terminal
LARGE_BYTES = 5_000_000  # files from here on are named one by one
# Torch's own needs, so that they come with the rest; a wrong list costs the last step a second, nothing else.
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
# Like `holdfast`'s extra "torch", without its gigabytes: setuptools is torch's need and builds the editable package.
ALWAYS = ("setuptools>=77.0.3",)
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
SPINNER = itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")


class FailedError(Exception):
    """What could not be done, and pip's words for it."""

    def __init__(self, title: str, said: list[str]) -> None:
        super().__init__(title)
        self.title, self.said = title, said

    def tell(self) -> None:
        for line in self.said:
            _line(line)
        hint = "; without it: make up TORCH=none ARGS='--engine sim'" if "torch" in self.title else ""
        print(f"make: {self.title} could not be installed{hint}", file=sys.stderr)


class Job:
    """One child process, what it does now, and what it said."""

    def __init__(self, title: str, command: Sequence[str], folder: Path) -> None:
        self.title, self.phase = title, "looking" if "pip" in command else "first import"
        self.said: list[str] = []
        self.news: list[str] = []  # lines for the person, not shown yet
        self._folder = folder
        self._fetching = 0  # bytes of the file under way
        folder.mkdir()
        # pip's own temporary files lie in a folder of ours: there they can be watched growing.
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None or self._reader.is_alive()

    def check(self) -> None:
        """FailedError with its own words if it has ended badly."""
        if not self.running and self._process.returncode:
            raise FailedError(self.title, [line for line in self.said if line.startswith("ERROR")] or self.said[-8:])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self, lines: IO[bytes]) -> None:
        for raw in lines:
            line = raw.decode(errors="replace").strip()
            self.said.append(line)
            self._hear(line)

    def _hear(self, line: str) -> None:
        if found := re.match(r"Collecting ([\w.-]+)", line):
            self._fetching, self.phase = 0, found[1]
        elif found := re.match(r"(Downloading|Using cached) ([^-\s]+-[^-\s]+)\S*\.whl \(([\d.]+) (\w+)\)", line):
            self._file(found[2], round(float(found[3]) * UNITS.get(found[4], 0)), found[1] == "Downloading")
        elif found := re.match(r"Processing (\S+/([^-/]+-[^-]+)\S*\.whl)", line):
            self._file(found[2], _size(Path(found[1])), fetching=False)
        elif found := re.match(r"Installing collected packages: (.+)", line):
            many = found[1].count(",") + 1
            self._fetching, self.phase = 0, f"unpacking {many} packages" if many > 1 else "unpacking"
        elif line.startswith(("Building", "Preparing")):
            self.phase = "building"

    def _file(self, name: str, size: int, fetching: bool) -> None:
        self._fetching, self.phase = size if fetching else 0, f"fetching {name}" if fetching else f"reading {name}"
        if size >= LARGE_BYTES:
            self.news.append(f"{name}: {size / 1e6:.1f} MB{'' if fetching else ', here already'}")

    def __str__(self) -> str:
        if self._fetching < LARGE_BYTES:
            return f"{self.title}: {self.phase}"
        sizes = [_size(file) for file in self._folder.rglob("*.whl")]
        done = min(max(sizes, default=0), self._fetching)
        return f"{self.title}: {self.phase}, {done / 1e6:.0f} of {self._fetching / 1e6:.0f} MB"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # moved meanwhile


def watch(jobs: Sequence[Job]) -> None:
    """Until all have ended, or one has failed: then the others are ended too."""
    began_s = told_s = time.monotonic()
    try:
        while any(job.running for job in jobs):
            for job in jobs:
                while job.news:
                    _line(job.news.pop(0))
                job.check()
            now_s = time.monotonic()
            words = " · ".join(str(job) for job in jobs if job.running)
            if sys.stdout.isatty():
                room = shutil.get_terminal_size().columns - 2
                print(f"\r\x1b[K{f'    {next(SPINNER)} {words} ({now_s - began_s:.0f} s)'[:room]}", end="", flush=True)
            elif words and now_s - told_s >= PLAIN_S:
                told_s = now_s
                _line(f"{words} ({now_s - began_s:.0f} s)")
            time.sleep(TICK_S)
        for job in jobs:
            while job.news:
                _line(job.news.pop(0))
            job.check()
    finally:
        for job in jobs:
            job.end()
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)


def _line(text: str) -> None:
    print(f"{chr(13) + chr(27) + '[K' if sys.stdout.isatty() else ''}      {text}", flush=True)


# -- what is there


def sweep_halves(site: Path) -> None:
    """What an interrupted pip left has no RECORD, and would be taken for whole, or could not be replaced."""
    for info in site.glob("*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)


def torch_here() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def needs_of(extras: str) -> list[str]:
    """Of one extra, or of several with commas between."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [need for extra in extras.split(",") if extra for need in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *more]


def pins(folder: Path) -> tuple[Path, str]:
    """The constraints without torch, which is chosen here, and the torch we are tested with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    version = next(line.partition("==")[2] for line in lines if line.startswith("torch=="))
    path = folder / "constraints.txt"
    path.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
    return path, version


# -- the steps


def pick(wish: str, version: str) -> Choice:
    """Look at the machine, and at PyTorch's index if it matters."""
    installed, gpu = torch_here(), has_gpu()
    wheel, size = "", 0
    if needs_index(wish, installed, gpu):
        _line(f"looking for torch {version}, CPU build, on {CPU_INDEX}")
        wheel, size = cpu_wheel(CPU_INDEX, version)
    return choose(wish, version, Seen(installed, gpu, wheel, size))


def get_pip(folder: Path) -> None:
    """The newest, by the pip of the Python that made this venv: twice as quick as its bundled one. Else that one."""
    if importlib.util.find_spec("pip") is not None:
        return
    base = sys._base_executable  # type: ignore[attr-defined]
    quick = [base, "-m", "pip", "--python", sys.executable, "install", "--disable-pip-version-check", "--no-compile"]
    try:
        watch([Job("pip", [*quick, "--retries", "1", "pip"], folder / "pip")])
    except FailedError:
        watch([Job("pip", [sys.executable, "-m", "ensurepip"], folder / "ensurepip")])


def steps(choice: Choice, extra: str, torch_wanted: bool, pinned: Path) -> Iterator[list[tuple[str, list[str]]]]:
    """Commands that may run at once, by what they are for; then the next."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile"]
    pip += ["--progress-bar", "off"]
    needs = [*ALWAYS, *needs_of(extra), *(TORCH_NEEDS if torch_wanted else ())]
    first = [("holdfast's needs", [*pip, "-c", str(pinned), *needs])]
    if choice.requirement:
        index = ["--index-url", choice.index] if choice.index else []
        first.append(("torch", [*pip, "--no-deps", "--force-reinstall", *index, choice.requirement]))
    yield first
    extras = ",".join(name for name in ("torch" if torch_wanted else "", extra) if name)
    whole = f".[{extras}]" if extras else "."
    yield [("holdfast", [*pip, "--no-build-isolation", "-c", str(pinned), "-e", whole])]
    # So that engines find it compiled, and a torch that cannot be loaded is found out now. Only now: the step before
    # has brought the libraries that PyPI's torch loads at once, with or without a GPU.
    if choice.requirement:
        yield [("torch", [sys.executable, "-c", "import torch"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="auto", help="auto, cpu, cuda, none, or the address of a package index")
    parser.add_argument("--extra", default="", help="extras of pyproject.toml besides torch, e.g. dev,ray")
    wishes = parser.parse_args()
    try:
        check_wish(wishes.torch)
    except WrongWishError as error:
        raise SystemExit(f"make: {error}") from error
    sweep_halves(Path(sysconfig.get_paths()["purelib"]))
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        pinned, version = pins(Path(name))
        choice = pick(wishes.torch, version)
        _line(choice.words)
        get_pip(Path(name))
        folders = (Path(name) / str(number) for number in itertools.count())
        for commands in steps(choice, wishes.extra, wishes.torch != "none", pinned):
            watch([Job(title, command, next(folders)) for title, command in commands])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except FailedError as error:
        error.tell()
        sys.exit(1)

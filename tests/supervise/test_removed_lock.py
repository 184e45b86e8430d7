"""A supervisor's lock file that somebody removed, moved or made anew under it: still one supervisor, found by all."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.supervise.lock import Holder, holder, keep, lock_path, sign, take_lock


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def lock(place: Path) -> Iterator[int]:
    """Held and signed."""
    taken = take_lock(place)
    assert taken is not None
    sign(taken, Holder(4711, detached=True))
    yield taken
    os.close(taken)


def remove_file(place: Path) -> None:
    lock_path(place).unlink()


def make_anew(place: Path) -> None:
    lock_path(place).unlink()
    lock_path(place).touch()


REMOVALS = [remove_file, make_anew, shutil.rmtree]


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_removed_lock_is_still_held(place: Path, lock: int, remove: Callable[[Path], None]) -> None:
    """Before its holder has even noticed: nobody else gets it, and anyone can see who has it."""
    remove(place)
    assert holder(place) == Holder(4711, detached=True)
    assert take_lock(place) is None


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_removed_lock_is_put_back(place: Path, lock: int, remove: Callable[[Path], None]) -> None:
    """Its holder makes another with the same signature, under the same descriptor, and leaves nothing beside it."""
    assert keep(lock, place) == ""
    remove(place)
    assert keep(lock, place).endswith("put back")
    assert os.path.samestat(os.fstat(lock), lock_path(place).stat())
    assert (holder(place), take_lock(place)) == (Holder(4711, detached=True), None)
    assert [path.name for path in place.iterdir()] == ["up.lock"]
    assert keep(lock, place) == ""
    sign(lock, Holder(4711, up=True))
    assert holder(place) == Holder(4711, up=True)


def test_a_lock_that_another_has_is_left_to_it(place: Path, lock: int) -> None:
    """Moved away, it is nobody's for who looks at the path; who took the new one keeps it, until it lets go."""
    lock_path(place).rename(place / "moved")
    other = take_lock(place)
    assert other is not None
    assert "another process holds" in keep(lock, place)
    os.close(other)
    assert keep(lock, place).endswith("put back")


def test_what_cannot_be_put_back_is_told(place: Path, lock: int) -> None:
    """And is no reason to end."""
    shutil.rmtree(place)
    place.touch()
    assert "cannot be put back" in keep(lock, place)
    place.unlink()
    assert keep(lock, place).endswith("put back")


def test_a_look_at_the_holder_is_no_holder(place: Path) -> None:
    """While others look at who has the lock, again and again, it can be taken all the same."""
    place.mkdir()
    lock_path(place).touch()
    code = "from pathlib import Path; from holdfast.supervise.lock import holder; import sys\n"
    code += "print(flush=True)\nwhile True: holder(Path(sys.argv[1]))"
    looking = subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE)
    try:
        assert looking.stdout is not None
        looking.stdout.readline()
        for _ in range(100):
            taken = take_lock(place)
            assert taken is not None
            os.close(taken)
            time.sleep(0.001)
    finally:
        looking.kill()
        looking.communicate()


def test_an_old_signature_is_not_the_new_holders(place: Path, lock: int) -> None:
    """Who has taken it and not signed is not taken for who had it before."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    taken = take_lock(place)
    assert taken is not None
    assert holder(place) == Holder(0)
    os.close(taken)


def test_a_lock_that_cannot_be_opened_is_named(place: Path) -> None:
    """In one line with the mend."""
    lock_path(place).mkdir(parents=True)
    with pytest.raises(UserError, match=r"up\.lock cannot be opened: Is a directory; remove it"):
        take_lock(place)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/nowhere", path)])
def test_what_is_no_file_is_neither_taken_nor_read(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """In the lock's place it is refused in one line, at once; its holder keeps what it has, and puts it back later."""
    held = take_lock(tmp_path)
    assert held is not None
    sign(held, Holder(os.getpid()))
    path = lock_path(tmp_path)
    path.unlink()
    put(path)
    assert "cannot be put back" in keep(held, tmp_path)
    for ask in (holder, take_lock):
        with pytest.raises(UserError, match=r"up\.lock cannot be .*; remove it"):
            ask(tmp_path)
    (path.rmdir if path.is_dir() else path.unlink)()
    assert keep(held, tmp_path).endswith("put back")
    assert holder(tmp_path) == Holder(os.getpid())
    os.close(held)

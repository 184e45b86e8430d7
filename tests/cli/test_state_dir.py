"""State directories that cannot be used are refused in one line; homes without HOME; terminals that take ASCII only."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.cli.checks import check_leftovers, made, own, readable
from holdfast.cli.keeping import _if_full
from holdfast.cli.status import adopts
from holdfast.core.errors import UserError
from holdfast.settings import read_environment
from holdfast.supervise.lock import Holder, sign, take_lock
from holdfast.supervise.records import Record, forget, write_launch, write_record
from tests.rigs.cli.up_rig import UpRig
from tests.rigs.small_disks import small_disk

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that another user can reach."""
    path = Path(tempfile.mkdtemp(prefix="hfsd-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def as_another_user(folder: Path) -> Iterator[None]:
    """Not as root, who may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_of_ones_own_is_made_for_oneself(folder: Path) -> None:
    """Parents too; nobody else can look into it; a second time it is there."""
    own(folder / "a" / "b")
    own(folder / "a" / "b")
    assert (folder / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert readable(folder / "a" / "b") == folder / "a" / "b"
    assert readable(folder / "not there") == folder / "not there"


def test_a_file_is_no_directory(folder: Path) -> None:
    """Neither itself nor as a parent."""
    (folder / "f").touch()
    for look in (own, readable):
        with pytest.raises(UserError, match="f is not a directory; set HOLDFAST_STATE_DIR"):
            look(folder / "f")
    with pytest.raises(UserError, match="cannot be made: Not a directory; set HOLDFAST_STATE_DIR"):
        own(folder / "f" / "inside")


def test_what_cannot_be_written_is_refused(folder: Path) -> None:
    """With the kernel's reason; the variable to set is named."""
    (folder / "closed").mkdir()
    with as_another_user(folder / "closed"):
        (folder / "closed").chmod(0o500)
        with pytest.raises(UserError, match=r"nothing can be written in .*: permission denied; set GMS_SOCKET_DIR"):
            made(folder / "closed", "GMS_SOCKET_DIR")
        with pytest.raises(UserError, match="cannot be made: Permission denied; set HOLDFAST_STATE_DIR"):
            own(folder / "closed" / "new")
        (folder / "closed").chmod(0o700)


def test_where_everyone_may_write_is_refused(folder: Path) -> None:
    """Whoever can write there can put a socket in our place."""
    folder.chmod(0o1777)
    with pytest.raises(UserError, match=r"every user may write in the state directory .*, e\.g\. .*/holdfast"):
        own(folder)
    folder.chmod(0o775)
    own(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_owners_is_refused(folder: Path) -> None:
    """Even root does not keep keys where another can read them."""
    os.chown(folder, NOBODY, -1)
    with pytest.raises(UserError, match=rf"belongs to .*uid {NOBODY}.*set HOLDFAST_STATE_DIR"):
        own(folder)
    (folder / "private").mkdir(mode=0o700)
    with as_another_user(folder), pytest.raises(UserError, match=r"private belongs to root \(uid 0\), you cannot"):
        readable(folder / "private")


def test_without_home_the_passwd_home_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not /tmp, where everyone may write; a user without either must say where."""
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    for environ in ({}, {"HOME": ""}):
        read = read_environment(environ)
        assert (read.state_dir, read.cache_dir) == (home / ".holdfast", home / ".cache" / "holdfast")
    assert read_environment({"HOME": "/h"}).state_dir == Path("/h/.holdfast")

    def not_listed(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", not_listed)
    with pytest.raises(ValueError, match="HOLDFAST_STATE_DIR must be set: this user has no HOME"):
        read_environment({})
    assert read_environment({"HOLDFAST_STATE_DIR": "/s"}).cache_dir == Path("/s/cache")


def test_ascii_only_output_loses_looks_alone(rig: UpRig) -> None:
    """A terminal or a file that takes ASCII only: everything is shown, nothing fails for an ellipsis."""
    rig.env["PYTHONIOENCODING"] = "ascii"
    shown = rig.run("--help")
    assert (shown.returncode, "holdfast COMMAND ..." in shown.stdout) == (0, True), shown.stderr
    assert "no worker 'Gr??e' runs" in rig.run("chaos", "Größe", "stop").stderr


def test_what_a_dead_supervisor_left_is_not_replaced(tmp_path: Path) -> None:
    """Its processes run: only whoever would go on with the same deployment may adopt them, and is named."""
    write_record(tmp_path, Record.of_process(os.getpid(), "chat-frontend-01234567-1", "frontend"))
    write_launch(tmp_path, "chat-frontend-01234567-1", b"{}")
    lock = take_lock(tmp_path)
    assert lock is not None
    sign(lock, Holder(1, deployment="chat", store="unix:///s"))
    os.close(lock)
    for other in ("", "talk"):
        with pytest.raises(UserError, match=r"chat runs in .* `holdfast up -f FILE` goes on with it"):
            check_leftovers(tmp_path, other)
    check_leftovers(tmp_path, "chat")
    assert adopts(tmp_path) == "until `holdfast up -f FILE` adopts these processes"
    forget(tmp_path, "chat-frontend-01234567-1")
    check_leftovers(tmp_path, "talk")


def test_a_full_disk_is_named_where_nothing_else_can_be_told(tmp_path: Path) -> None:
    """A supervisor that ends for it can write neither its log nor its word in the lock."""
    assert _if_full(tmp_path) == ""
    with small_disk(16_384) as folder:
        with suppress(OSError), (folder / "all").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert _if_full(folder) == f"; the disk of {folder} is full"

"""Whether the state directory can be used, before anything is written there; each refusal is one line with its mend.

Sockets, logs and records with API keys lie in it. Always true: it is a directory of this user, in which nobody else can
write: whoever can write there can put a socket or a lock of his own in our place.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from holdfast.core.errors import UserError

VARIABLE = "HOLDFAST_STATE_DIR"


def own(state_dir: Path) -> None:
    """Make it, or see that it is ours and may be written; UserError says what is wrong with it."""
    made(state_dir, VARIABLE)
    found = state_dir.stat()
    mend = f"set {VARIABLE} to a directory of your own"
    if found.st_uid != os.geteuid():
        raise UserError(f"the state directory {state_dir} belongs to {_name(found.st_uid)}; {mend}")
    if found.st_mode & stat.S_IWOTH:
        raise UserError(f"everyone may write in the state directory {state_dir}; {mend}, e.g. {state_dir / 'holdfast'}")


def made(folder: Path, variable: str) -> None:
    """Make a directory that only this user can look into, or see that one is there and may be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise UserError(f"{folder} is not a directory; set {variable} to one") from None
    except OSError as error:
        why = error.strerror
        raise UserError(f"{folder} cannot be made: {why}; set {variable} to a directory that can") from None
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        why = "it is read-only" if _read_only(folder) else "permission denied"
        raise UserError(f"nothing can be written in {folder}: {why}; set {variable} to another directory")


def readable(state_dir: Path) -> Path:
    """The directory as it is, for who only looks; UserError if that cannot be."""
    try:
        found = state_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        return state_dir  # nothing runs there
    except OSError as error:
        raise UserError(f"{state_dir} cannot be looked at: {error.strerror}; set {VARIABLE} to your own") from None
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{state_dir} is not a directory; set {VARIABLE} to one")
    if not os.access(state_dir, os.R_OK | os.X_OK, effective_ids=True):
        who = _name(found.st_uid)
        raise UserError(f"{state_dir} belongs to {who}, who lets nobody in; set {VARIABLE} to a directory of your own")
    return state_dir


def _read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"

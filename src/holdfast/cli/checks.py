"""Checks the machine and the state directory before anything starts; each error is one line that says what to do.

Sockets, logs and records with API keys are in the state directory.

Always true: the state directory belongs to this user, and no other user can write in it. Another user could otherwise
replace a socket or a lock.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import pwd
import socket
import stat
import sys
from pathlib import Path

from holdfast.core.address import TcpAddress
from holdfast.core.errors import UserError
from holdfast.core.limits import check_descriptor_limit
from holdfast.roles.examining import has_vllm
from holdfast.spec.engines import NO_VLLM
from holdfast.spec.names import check_url
from holdfast.supervise.lock import last_holder
from holdfast.supervise.records import read_launch, read_records

PYTHON_MIN = (3, 11)


def check_machine(platform: str = sys.platform, version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise UserError unless this is Linux, Python is new enough, and a process may open enough files."""
    if not platform.startswith("linux"):
        raise UserError(f"Holdfast needs Linux, this is {platform}; use a container or a Linux machine")
    if version < PYTHON_MIN:
        found, needed = (".".join(map(str, pair)) for pair in (version, PYTHON_MIN))
        raise UserError(f"Holdfast needs Python {needed} or newer, this is {found}; make a venv with a newer one")
    check_descriptor_limit()


def check_store(store: str) -> None:
    """Raise UserError if the store's URL is invalid ("": the embedded store) or its library is not installed."""
    if store:
        check_url(store)
    if store.startswith("etcd://") and importlib.util.find_spec("aiohttp") is None:
        raise UserError("etcd needs the package aiohttp; install it: pip install 'holdfast-llm[etcd]'")


def check_engine(engine: str) -> None:
    """Raise UserError if the engine's packages are missing: they are large and not installed by default."""
    if engine == "torch" and importlib.util.find_spec("torch") is None:
        raise UserError(
            "the torch engine needs the package torch; install it: pip install 'holdfast-llm[torch]' "
            "(in a checkout: make up), or serve the simulator: holdfast up --engine sim"
        )
    if engine == "vllm" and not has_vllm():
        raise UserError(NO_VLLM)


def settle_port(host: str, port: int, state_dir: Path) -> int:
    """Return the port to serve on: `port` if it is free or one of our frontends uses it; for 0 any free port."""
    wanted = str(TcpAddress(host, port))
    ours = [r for r in read_records(state_dir) if r.role == "frontend" and r.address == wanted and r.alive]
    return port if ours else _try_port(host, port)


def _try_port(host: str, port: int) -> int:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Not SO_REUSEPORT: two unrelated servers on one port would each get half of the other's requests.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise UserError(f"--host {host!r} is not an address: {error.strerror}; try 127.0.0.1 or 0.0.0.0") from error
    except OSError as error:
        raise UserError(_explain(host, port, error)) from error


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use (`ss -ltnp 'sport = :{port}'` shows the process); "
            f"stop that, or choose another: holdfast up --port {port + 1 if port < 65535 else 8000}"
        )
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {port}; choose one over 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; try --host 127.0.0.1 or --host 0.0.0.0"
    return f"cannot listen on {host}:{port}: {error.strerror}"


# -- the state directory


def check_leftovers(state_dir: Path, deployment: str) -> None:
    """Raise UserError if a dead supervisor of another deployment left processes running: `up` would adopt them.
    `deployment`: the manifest's name; "": the deployment has no manifest."""
    last = last_holder(state_dir)
    if last is None or last.deployment == deployment:
        return
    if any(record.alive and read_launch(state_dir, record.name) is not None for record in read_records(state_dir)):
        whose = f"{last.deployment} runs" if last.deployment else "a deployment without a manifest runs"
        command = "holdfast up -f FILE" if last.deployment else "holdfast up"
        raise UserError(
            f"{whose} in {state_dir}, and its supervisor is dead: `{command}` goes on with it, `holdfast down` stops it"
        )


VARIABLE = "HOLDFAST_STATE_DIR"


def own(state_dir: Path) -> None:
    """Create the state directory, or check that it belongs to this user and is writable; raise UserError if not."""
    made(state_dir, VARIABLE)
    found = state_dir.stat()
    mend = f"set {VARIABLE} to a directory of your own"
    if found.st_uid != os.geteuid():
        raise UserError(f"the state directory {state_dir} belongs to {_name(found.st_uid)}; {mend}")
    if found.st_mode & stat.S_IWOTH:
        mend = f"{mend}, e.g. {state_dir / 'holdfast'}"
        raise UserError(f"every user may write in the state directory {state_dir}; {mend}")


def made(folder: Path, variable: str) -> None:
    """Create a directory that only this user can read, or check that the existing one is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise UserError(f"{folder} is not a directory; set {variable} to one") from None
    except OSError as error:
        why = error.strerror
        raise UserError(f"{folder} cannot be made: {why}; set {variable} to a directory that can") from None
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        why = "it is read-only" if read_only else "permission denied"
        raise UserError(f"nothing can be written in {folder}: {why}; set {variable} to another directory")


def readable(state_dir: Path) -> Path:
    """Return the directory unchanged, for commands that only read it. Raise UserError if it cannot be read."""
    try:
        found = state_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        return state_dir  # not created yet, so no process runs there
    except OSError as error:
        raise UserError(f"{state_dir} cannot be looked at: {error.strerror}; set {VARIABLE} to your own") from None
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{state_dir} is not a directory; set {VARIABLE} to one")
    if not os.access(state_dir, os.R_OK | os.X_OK, effective_ids=True):
        owner = _name(found.st_uid)
        raise UserError(f"{state_dir} belongs to {owner}, you cannot read it; set {VARIABLE} to one of your own")
    return state_dir


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"

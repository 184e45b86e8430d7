"""What must be so on this machine, and of the state directory, before anything is started; each refusal is one line
with its mend.

Sockets, logs and records with API keys lie in the state directory. Always true: it is a directory of this user, in
which nobody else can write: whoever can write there can put a socket or a lock of his own in our place.
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
    """Linux, a Python that is new enough, and descriptors to work with."""
    if not platform.startswith("linux"):
        raise UserError(f"Holdfast needs Linux, this is {platform}; use a container or a Linux machine")
    if version < PYTHON_MIN:
        found, needed = (".".join(map(str, pair)) for pair in (version, PYTHON_MIN))
        raise UserError(f"Holdfast needs Python {needed} or newer, this is {found}; make a venv with a newer one")
    check_descriptor_limit()


def check_store(store: str) -> None:
    """One that there can be, "" for our own; etcd needs a library that is not installed by default."""
    if store:
        check_url(store)
    if store.startswith("etcd://") and importlib.util.find_spec("aiohttp") is None:
        raise UserError("etcd needs the package aiohttp; install it: pip install 'holdfast-llm[etcd]'")


def check_engine(engine: str) -> None:
    """Torch and vLLM are large, so they are not installed by default."""
    if engine == "torch" and importlib.util.find_spec("torch") is None:
        raise UserError(
            "the torch engine needs the package torch; install it: pip install 'holdfast-llm[torch]' "
            "(in a checkout: make up), or serve the simulator: holdfast up --engine sim"
        )
    if engine == "vllm" and not has_vllm():
        raise UserError(NO_VLLM)


def settle_port(host: str, port: int, state_dir: Path) -> int:
    """The port to serve on: `port` if it is free or ours already; a free one for 0."""
    wanted = str(TcpAddress(host, port))
    ours = [r for r in read_records(state_dir) if r.role == "frontend" and r.address == wanted and r.alive]
    return port if ours else _try_port(host, port)


def _try_port(host: str, port: int) -> int:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Not SO_REUSEPORT: two strangers sharing a port would each get half of the other's requests.
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
            f"port {port} on {host} is in use (`ss -ltnp 'sport = :{port}'` shows by whom); "
            f"stop that, or choose another: holdfast up --port {port + 1 if port < 65535 else 8000}"
        )
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {port}; choose one over 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; try --host 127.0.0.1 or --host 0.0.0.0"
    return f"cannot listen on {host}:{port}: {error.strerror}"


# -- the state directory


def check_leftovers(state_dir: Path, deployment: str) -> None:
    """What an earlier supervisor left running is adopted, not replaced by something else; UserError, if it would be.
    `deployment`: a manifest's; "": what options ask for."""
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
        raise UserError(f"{state_dir} belongs to {who}, you cannot read it; set {VARIABLE} to a directory of your own")
    return state_dir


def _read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"

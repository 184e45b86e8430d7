"""The only reader of the environment. Everything else is handed its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says; command-line options win over it."""

    state_dir: Path  # HOLDFAST_STATE_DIR: sockets, logs and records of one deployment; default ~/.holdfast
    deployment: str  # DYN_NAMESPACE: the deployment's name; default "local"
    api_keys: tuple[str, ...]  # HOLDFAST_API_KEYS: comma-separated; none: everyone may ask
    status_port: int  # DYN_SYSTEM_PORT: a worker's status server; default 0, a free one
    log_level: str  # HOLDFAST_LOG: debug, info, warning or error; default info
    gms_socket_dir: Path  # GMS_SOCKET_DIR: where vaults listen, one socket per device; default "gms" in the state dir


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read it once; a ValueError names the variable that is wrong."""
    env = os.environ if environ is None else environ
    port = env.get("DYN_SYSTEM_PORT", "0")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"DYN_SYSTEM_PORT must be a port number, got {port!r}")
    level = env.get("HOLDFAST_LOG", "info").lower()
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"HOLDFAST_LOG must be debug, info, warning or error, got {level!r}")
    state_dir = env.get("HOLDFAST_STATE_DIR") or os.path.join(env.get("HOME", "/tmp"), ".holdfast")
    return Environment(
        state_dir=Path(state_dir).absolute(),
        deployment=env.get("DYN_NAMESPACE", "local"),
        api_keys=tuple(key.strip() for key in env.get("HOLDFAST_API_KEYS", "").split(",") if key.strip()),
        status_port=int(port),
        log_level=level,
        gms_socket_dir=Path(env.get("GMS_SOCKET_DIR") or os.path.join(state_dir, "gms")).absolute(),
    )

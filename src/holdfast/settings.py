"""The only reader of the environment. Everything else is handed its settings."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The words that Dynamo takes for them.
YES = dict.fromkeys(("true", "1", "yes", "on"), True)
NO = dict.fromkeys(("false", "0", "no", "off"), False)
STARTING = {"ready": True, "notready": False}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says; command-line options win over it."""

    state_dir: Path  # HOLDFAST_STATE_DIR: sockets, logs and records of one deployment; default ~/.holdfast
    deployment: str  # DYN_NAMESPACE: the deployment's name; default "local"
    api_keys: tuple[str, ...]  # HOLDFAST_API_KEYS: separated by commas or line breaks; none: everyone may ask
    status_port: int  # DYN_SYSTEM_PORT: a worker's status server; default 0, a free one; -1: none
    status_host: str  # DYN_SYSTEM_HOST: where it listens; default 127.0.0.1, 0.0.0.0 for probes from elsewhere
    status_enabled: bool  # DYN_SYSTEM_ENABLED: whether there is one; default true, unless the port is -1
    starting_ready: bool  # DYN_SYSTEM_STARTING_HEALTH_STATUS: "ready" or "notready" while loading; default notready
    ready_endpoints: tuple[str, ...]  # DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS: '["generate"]'; default [], all there are
    engine_token: str  # HOLDFAST_ENGINE_TOKEN: who has it may `POST /engine/…` from anywhere; default "", nobody
    engine_id: int  # ENGINE_ID: which of its group an engine is; 0, the default, may write weights first
    failover_lock: str  # FAILOVER_LOCK_PATH: a path, or a lock's address; default "", no election
    lock_token: str  # HOLDFAST_LOCK_TOKEN: what a lock server on TCP asks for; default "", none
    log_level: str  # HOLDFAST_LOG: debug, info, warning or error; default info
    cache_dir: Path  # HOLDFAST_CACHE_DIR: fetched models; default ~/.cache/holdfast
    set_hash: str  # DYN_NAMESPACE_WORKER_SUFFIX: which set of its service a worker is of; default "", by its settings
    component: str  # DYN_COMPONENT: what a worker is, in addresses; default "worker"
    served_name: str  # DYN_SERVED_MODEL_NAME: the name clients ask for; default "", the model's
    canary_prompts: str  # HOLDFAST_CANARY_PROMPTS: a worker's known questions, as JSON; default "", none
    http_host: str  # DYN_HTTP_HOST: where a frontend listens; default 127.0.0.1
    http_port: int  # DYN_HTTP_PORT: its port; default 8000
    shares: tuple[str, ...]  # HOLDFAST_SHARES: other deployments whose workers a frontend serves; default none
    gms_socket_dir: Path  # GMS_SOCKET_DIR: where vaults listen, one socket per device; default "gms" in the state dir
    secrets_dir: str  # HOLDFAST_SECRETS_DIR: a manifest's secrets, as SECRET/KEY; default "secrets" in the state dir


@dataclass(frozen=True, slots=True)
class Looks:
    """What the environment says of the terminal."""

    colour: bool | None  # NO_COLOR: False, FORCE_COLOR: True; neither: None, where the output can show it
    dumb: bool  # TERM is dumb or unknown: its cursor cannot be moved


def read_looks(environ: Mapping[str, str] | None = None) -> Looks:
    """Nothing in it can be wrong."""
    env = os.environ if environ is None else environ
    colour = False if env.get("NO_COLOR") else True if env.get("FORCE_COLOR") else None
    return Looks(colour, env.get("TERM", "").lower() in ("dumb", "unknown"))


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read it once; a ValueError names the variable that is wrong."""
    env = os.environ if environ is None else environ
    port = _whole_number(env, "DYN_SYSTEM_PORT", "a port number, or -1 for none", -1, 65535)
    level = env.get("HOLDFAST_LOG", "info").lower()
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"HOLDFAST_LOG must be debug, info, warning or error, got {level!r}")
    home = env.get("HOME") or _passwd_home()
    state_dir = env.get("HOLDFAST_STATE_DIR") or (os.path.join(home, ".holdfast") if home else "")
    if not state_dir:
        raise ValueError("HOLDFAST_STATE_DIR must be set: this user has no HOME, and no home directory in passwd")
    cache_dir = os.path.join(home, ".cache", "holdfast") if home else os.path.join(state_dir, "cache")
    return Environment(
        state_dir=Path(state_dir).absolute(),
        deployment=env.get("DYN_NAMESPACE", "local"),
        api_keys=_keys(env, "HOLDFAST_API_KEYS"),
        status_port=max(port, 0),
        status_host=env.get("DYN_SYSTEM_HOST") or "127.0.0.1",
        status_enabled=_one_of(env, "DYN_SYSTEM_ENABLED", {**YES, **NO}, "true") and port >= 0,
        starting_ready=_one_of(env, "DYN_SYSTEM_STARTING_HEALTH_STATUS", STARTING, "notready"),
        ready_endpoints=_names(env, "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"),
        engine_token=env.get("HOLDFAST_ENGINE_TOKEN", ""),
        engine_id=_whole_number(env, "ENGINE_ID", "a whole number from 0 up", 0, 65535),
        failover_lock=env.get("FAILOVER_LOCK_PATH", ""),
        lock_token=env.get("HOLDFAST_LOCK_TOKEN", ""),
        log_level=level,
        cache_dir=Path(env.get("HOLDFAST_CACHE_DIR") or cache_dir),
        set_hash=_like(env, "DYN_NAMESPACE_WORKER_SUFFIX", r"|[0-9a-f]{8}", "8 hex digits"),
        component=_like(env, "DYN_COMPONENT", r"|[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "letters, digits and -") or "worker",
        served_name=env.get("DYN_SERVED_MODEL_NAME", ""),
        canary_prompts=env.get("HOLDFAST_CANARY_PROMPTS", ""),
        http_host=env.get("DYN_HTTP_HOST") or "127.0.0.1",
        http_port=_whole_number(env, "DYN_HTTP_PORT", "a port number", 0, 65535, "8000"),
        shares=tuple(one.strip() for one in env.get("HOLDFAST_SHARES", "").split(",") if one.strip()),
        gms_socket_dir=Path(env.get("GMS_SOCKET_DIR") or os.path.join(state_dir, "gms")).absolute(),
        secrets_dir=os.path.abspath(env.get("HOLDFAST_SECRETS_DIR") or os.path.join(state_dir, "secrets")),
    )


def handed_on() -> dict[str, str]:
    """All of it, unread: for processes that a manifest starts here."""
    return dict(os.environ)


def _passwd_home() -> str:
    """Where a user lives whose HOME was left out (cron, systemd, `env -i`); "" for one who is not listed."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


# An empty variable is an unset one: that is how manifests leave one out.


def _like(env: Mapping[str, str], name: str, pattern: str, what: str) -> str:
    text = env.get(name, "")
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{name} must be {what}, got {text!r}")
    return text


def _whole_number(
    env: Mapping[str, str], name: str, what: str, least: int, most: int, default: str = "0"
) -> int:
    text = env.get(name) or default
    digits = text.removeprefix("-")
    # Six digits are more than any of them has; a thousand would be another error of int().
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 6 and least <= int(text) <= most):
        raise ValueError(f"{name} must be {what}, got {text!r}")
    return int(text)


def _keys(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in re.split(r"[,\n]", env.get(name, "")) if key.strip())
    if name in env and not keys:  # unlike other variables: who sets it means to guard, and a mistake must not open
        raise ValueError(f"{name} is set and holds no key: that would let everyone ask; leave it out for that")
    return keys


def _one_of(env: Mapping[str, str], name: str, words: Mapping[str, bool], default: str) -> bool:
    text = env.get(name) or default
    if text.lower() not in words:
        raise ValueError(f"{name} must be {' or '.join(words)}, got {text!r}")
    return words[text.lower()]


def _names(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = env.get(name) or "[]"
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
        raise ValueError(f"{name} must be a JSON list of names, e.g. [\"generate\"], got {text!r}")
    return tuple(names)

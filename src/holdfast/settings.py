"""Reads the environment. No other module does; they get their settings as arguments."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The words that Dynamo accepts.
YES = dict.fromkeys(("true", "1", "yes", "on"), True)
NO = dict.fromkeys(("false", "0", "no", "off"), False)
STARTING = {"ready": True, "notready": False}


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings from environment variables; command-line options override them."""

    state_dir: Path  # HOLDFAST_STATE_DIR: sockets, logs and records of one deployment; default ~/.holdfast
    deployment: str  # DYN_NAMESPACE: the deployment's name; default "local"
    api_keys: tuple[str, ...]  # HOLDFAST_API_KEYS: separated by commas or line breaks; none: no key is required
    status_port: int  # DYN_SYSTEM_PORT: port of a worker's status server; default 0: any free one; -1: no server
    status_host: str  # DYN_SYSTEM_HOST: its listen address; default 127.0.0.1; 0.0.0.0: reachable from other machines
    status_enabled: bool  # DYN_SYSTEM_ENABLED: run the status server; default true unless the port is -1
    starting_ready: bool  # DYN_SYSTEM_STARTING_HEALTH_STATUS: "ready" or "notready" while loading; default notready
    ready_endpoints: tuple[str, ...]  # DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS: '["generate"]'; default []: all
    engine_token: str  # HOLDFAST_ENGINE_TOKEN: permits `POST /engine/…` from any host; default "": none
    engine_id: int  # ENGINE_ID: the engine's number in its group; 0, the default, may write weights first
    failover_lock: str  # FAILOVER_LOCK_PATH: a path, or a lock's address; default "", no election
    lock_token: str  # HOLDFAST_LOCK_TOKEN: the token that a lock server on TCP requires; default "", none
    log_level: str  # HOLDFAST_LOG: debug, info, warning or error; default info
    cache_dir: Path  # HOLDFAST_CACHE_DIR: fetched models; default ~/.cache/holdfast
    set_hash: str  # DYN_NAMESPACE_WORKER_SUFFIX: the worker's set within its service; default "", from its settings
    component: str  # DYN_COMPONENT: the component name in a worker's addresses; default "worker"
    served_name: str  # DYN_SERVED_MODEL_NAME: model name for clients; default "": the model's own
    canary_prompts: str  # HOLDFAST_CANARY_PROMPTS: a worker's canary questions, as JSON; default "", none
    http_host: str  # DYN_HTTP_HOST: a frontend's listen address; default 127.0.0.1
    http_port: int  # DYN_HTTP_PORT: its port; default 8000
    shares: tuple[str, ...]  # HOLDFAST_SHARES: other deployments a frontend routes to; default none
    gms_socket_dir: Path  # GMS_SOCKET_DIR: sockets of the vaults, one per device; default "gms" in the state dir
    secrets_dir: str  # HOLDFAST_SECRETS_DIR: files SECRET/KEY of manifests; default "secrets" in the state dir


@dataclass(frozen=True, slots=True)
class Looks:
    """The terminal's capabilities according to the environment."""

    colour: bool | None  # NO_COLOR: False, FORCE_COLOR: True; neither: None, and the output's kind decides
    dumb: bool  # TERM is dumb or unknown: the cursor cannot be moved


def read_looks(environ: Mapping[str, str] | None = None) -> Looks:
    """Return the terminal's capabilities; every value is accepted."""
    env = os.environ if environ is None else environ
    colour = False if env.get("NO_COLOR") else True if env.get("FORCE_COLOR") else None
    return Looks(colour, env.get("TERM", "").lower() in ("dumb", "unknown"))


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Return the settings; raise ValueError naming a variable with an invalid value."""
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
    """Return the whole environment, for processes that a manifest starts on this machine."""
    return dict(os.environ)


def _passwd_home() -> str:
    """Return the home directory from passwd, for when HOME is unset (cron, systemd, `env -i`); "" without an entry."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


# An empty variable counts as unset: manifests leave a variable out in this way.


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
    # No variable needs more than six digits; int() raises another error for thousands of them.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 6 and least <= int(text) <= most):
        raise ValueError(f"{name} must be {what}, got {text!r}")
    return int(text)


def _keys(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in re.split(r"[,\n]", env.get(name, "")) if key.strip())
    if name in env and not keys:  # only here empty is an error: a mistake must not open the API
        raise ValueError(f"{name} is set and holds no key; to require none, leave it out")
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

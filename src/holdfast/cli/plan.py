"""From what a person asked `holdfast up` for to the processes that should run. Pure.

Always true: the same wishes give the same settings byte for byte, so that the next `up` knows its processes again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.cli.launch import FrontendLaunch, Launch, SimLaunch, StoreLaunch, WorkerLaunch, role_of
from holdfast.core.address import UNIX_PATH_BYTES_MAX, TcpAddress
from holdfast.core.errors import UserError
from holdfast.discovery.keys import check_deployment_name
from holdfast.supervise.loop import Job

WORKERS_MAX = 256  # processes on one machine; more is a typing mistake
FRONTENDS_MAX = 64

# SIGTERM to SIGKILL. A worker hands its streams back in milliseconds; together with the frontends' drain and the
# store's bound this keeps a whole Ctrl-C under ten seconds.
WORKER_STOP_S = 3.0
STORE_STOP_S = 1.0
FRONTEND_GRACE_S = 1.0  # on top of its own drain


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `holdfast up` was asked for."""

    deployment: str
    engine: str = "sim"
    model: str = "holdfast-sim"
    workers: int = 2
    frontends: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    store: str = ""  # empty: an embedded store of our own
    hold_s: float = 30.0
    drain_s: float = 4.0
    allow_chaos: bool = False
    api_keys: tuple[str, ...] = ()
    sim: SimLaunch = field(default_factory=SimLaunch)
    log_level: str = "info"


def plan(state_dir: Path, options: UpOptions) -> list[Launch]:
    """Every process that should run; UserError says what is wrong with the wishes."""
    _check(state_dir, options)
    run = state_dir / "run"
    store = options.store or f"unix://{run}/store.sock"
    launches: list[Launch] = []
    if not options.store:
        launches.append(StoreLaunch(str(state_dir), store, log_level=options.log_level))
    launches += [_worker(state_dir, store, f"worker-{place}", options) for place in range(1, options.workers + 1)]
    names = ["frontend", *(f"frontend-{place}" for place in range(2, options.frontends + 1))]
    launches += [_frontend(state_dir, store, name, options) for name in names]
    return launches


def _worker(state_dir: Path, store: str, name: str, options: UpOptions) -> WorkerLaunch:
    return WorkerLaunch(
        str(state_dir),
        store,
        options.deployment,
        name,
        options.engine,
        options.model,
        address=f"unix://{state_dir}/run/{name}.sock",
        beat_address=f"unix://{state_dir}/run/{name}.beat",
        allow_chaos=options.allow_chaos,
        sim=options.sim,
        log_level=options.log_level,
    )


def _frontend(state_dir: Path, store: str, name: str, options: UpOptions) -> FrontendLaunch:
    return FrontendLaunch(
        str(state_dir),
        store,
        options.deployment,
        name,
        address=str(TcpAddress(options.host, options.port)),
        api_keys=options.api_keys,
        hold_s=options.hold_s,
        drain_s=options.drain_s,
        log_level=options.log_level,
    )


def job_of(launch: Launch) -> Job:
    """The launch as the supervisor sees it."""
    assert launch.parent == 0, "who the parent is does not belong to the settings"
    bound_s = {"store": STORE_STOP_S, "worker": WORKER_STOP_S}.get(role_of(launch), 0.0)
    if isinstance(launch, FrontendLaunch):
        bound_s = launch.drain_s + FRONTEND_GRACE_S
    return Job(launch.name, role_of(launch), msgspec.json.encode(launch), bound_s)


def _check(state_dir: Path, options: UpOptions) -> None:
    try:
        check_deployment_name(options.deployment)
    except ValueError as error:
        raise UserError(str(error)) from error
    check_state_dir(state_dir)
    if not 0 <= options.workers <= WORKERS_MAX:
        raise UserError(f"--workers must be 0 to {WORKERS_MAX}, got {options.workers}")
    if not 1 <= options.frontends <= FRONTENDS_MAX:
        raise UserError(f"--frontends must be 1 to {FRONTENDS_MAX}, got {options.frontends}")
    if options.store and "://" not in options.store:
        raise UserError(f"--store {options.store!r} must be a URL, e.g. etcd://127.0.0.1:2379")


def check_state_dir(state_dir: Path) -> None:
    """Sockets live in it, and the kernel bounds their paths."""
    longest = len(str(state_dir / "run" / f"worker-{WORKERS_MAX}.chaos").encode())
    if longest > UNIX_PATH_BYTES_MAX:
        room = UNIX_PATH_BYTES_MAX - (longest - len(str(state_dir).encode()))
        raise UserError(
            f"the state directory's path is too long for Unix sockets ({state_dir}); "
            f"set HOLDFAST_STATE_DIR to one of at most {room} bytes"
        )

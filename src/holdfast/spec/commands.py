"""`holdfast worker`, `frontend` and `control` as their environment and words say, before anybody places them: the same
on a command line and in a container of a manifest.

Always true: words win over the environment, and that over the defaults; what was given is checked, and refused by the
name it was given under.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.address import TcpAddress
from holdfast.settings import Environment
from holdfast.spec.arguments import by_path, options_of, parse
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.engines import Place
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, WorkerLaunch
from holdfast.spec.option_checks import check_given
from holdfast.spec.settings import S, filled


def worker_by(env: Environment) -> WorkerLaunch:
    """What `holdfast worker` does where nothing is said, but for what the environment says."""
    return WorkerLaunch(
        **_told(env),
        store=own_store(env),
        deployment=env.deployment,
        model=env.served_name,
        source="",
        cache_dir=str(env.cache_dir),
        canary_prompts=env.canary_prompts,
        beat_address="",
        status_address=_status_address(env),
        lock=env.failover_lock,
        starting_ready=env.starting_ready,
        set_hash=env.set_hash,
        component=env.component,
        health_endpoints=env.ready_endpoints,
        engine_token=env.engine_token,
        place=Place(engine_id=env.engine_id),
    )


def frontend_by(env: Environment) -> DeploymentSpec:
    """`holdfast frontend`, likewise: one of a deployment's, with the same options."""
    launch = FrontendLaunch(
        **_told(env), store=own_store(env), deployment=env.deployment, shares=env.shares, api_keys=env.api_keys
    )
    return DeploymentSpec(env.deployment, host=env.http_host, port=env.http_port, frontend=launch)


def control_by(env: Environment) -> ControlLaunch:
    """`holdfast control`, likewise."""
    return ControlLaunch(
        **_told(env),
        store=own_store(env),
        deployment=env.deployment,
        status_address=_status_address(env),
        engine_token=env.engine_token,
    )


def own_store(env: Environment) -> str:
    return f"unix://{env.state_dir}/run/store.sock"


def asked(pattern: S, command: str, words: Sequence[str]) -> S:
    """The pattern as the words after `holdfast COMMAND` change it; UserError names what is wrong with them."""
    options = options_of(pattern, command, own=False)
    said = parse(words, options, f"holdfast {command}")
    check_given(options, said)
    return filled(pattern, by_path(options, said))


def _told(env: Environment) -> dict[str, Any]:
    """What only the environment says."""
    return {"state_dir": str(env.state_dir), "log_level": env.log_level}


def _status_address(env: Environment) -> str:
    """Empty: the environment wants no status server."""
    return str(TcpAddress(env.status_host, env.status_port)) if env.status_enabled and env.status_port >= 0 else ""

"""Builds the settings of `holdfast worker`, `frontend` and `control` from environment and arguments, in the same way
for a command line and for a container of a manifest.

Always true: arguments override the environment, and the environment overrides the defaults. An invalid value is refused
under the name that the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.address import TcpAddress
from holdfast.settings import Environment
from holdfast.spec.arguments import by_path, options_of, parse
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.engines import FailoverSettings
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, WorkerLaunch
from holdfast.spec.option_checks import check_given
from holdfast.spec.settings import S, filled


def worker_by(env: Environment) -> WorkerLaunch:
    """Return the settings of `holdfast worker` without arguments."""
    return WorkerLaunch(
        **_from_environment(env),
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
        failover=FailoverSettings(engine_id=env.engine_id),
    )


def frontend_by(env: Environment) -> DeploymentSpec:
    """Return the settings of `holdfast frontend` without arguments: a deployment with this frontend."""
    launch = FrontendLaunch(
        **_from_environment(env),
        store=own_store(env),
        deployment=env.deployment,
        shares=env.shares,
        api_keys=env.api_keys,
    )
    return DeploymentSpec(env.deployment, host=env.http_host, port=env.http_port, frontend=launch)


def control_by(env: Environment) -> ControlLaunch:
    """Return the settings of `holdfast control` without arguments."""
    return ControlLaunch(
        **_from_environment(env),
        store=own_store(env),
        deployment=env.deployment,
        status_address=_status_address(env),
        engine_token=env.engine_token,
    )


def own_store(env: Environment) -> str:
    return f"unix://{env.state_dir}/run/store.sock"


def asked(pattern: S, command: str, words: Sequence[str]) -> S:
    """Return the pattern changed by the arguments of `holdfast COMMAND`; raise UserError if one is invalid."""
    return settings_from(pattern, command, parse(words, options_of(pattern, command, own=False), f"holdfast {command}"))


def settings_from(pattern: S, command: str, said: Mapping[str, Any]) -> S:
    """Return the pattern with the given options of `holdfast COMMAND`, by flag; raise UserError if one is invalid."""
    options = options_of(pattern, command, own=False)
    check_given(options, said)
    return filled(pattern, by_path(options, said))


def _from_environment(env: Environment) -> dict[str, Any]:
    """Return the settings that come only from the environment."""
    return {"state_dir": str(env.state_dir), "log_level": env.log_level}


def _status_address(env: Environment) -> str:
    """Return the status server's address; empty if the environment disables it."""
    return str(TcpAddress(env.status_host, env.status_port)) if env.status_enabled and env.status_port >= 0 else ""

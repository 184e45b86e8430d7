"""What the environment says of a worker's status page, its place in the group and its lock."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.settings import read_environment
from holdfast.spec.commands import frontend_by, worker_by


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0, True, False, (), 0, "")),
        ({"DYN_SYSTEM_PORT": "9090"}, (9090, True, False, (), 0, "")),
        ({"DYN_SYSTEM_PORT": "-1"}, (0, False, False, (), 0, "")),
        ({"DYN_SYSTEM_PORT": "-1", "DYN_SYSTEM_ENABLED": "true"}, (0, False, False, (), 0, "")),
        ({"DYN_SYSTEM_PORT": "", "DYN_SYSTEM_ENABLED": "", "ENGINE_ID": ""}, (0, True, False, (), 0, "")),
        ({"DYN_SYSTEM_ENABLED": "False"}, (0, False, False, (), 0, "")),
        ({"DYN_SYSTEM_ENABLED": "1"}, (0, True, False, (), 0, "")),
        ({"DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready"}, (0, True, True, (), 0, "")),
        ({"DYN_SYSTEM_STARTING_HEALTH_STATUS": "notready"}, (0, True, False, (), 0, "")),
        ({"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]'}, (0, True, False, ("generate",), 0, "")),
        ({"ENGINE_ID": "3", "FAILOVER_LOCK_PATH": "/shared/lock"}, (0, True, False, (), 3, "/shared/lock")),
    ],
)
def test_what_the_environment_says(given: dict[str, str], expected: tuple[Any, ...]) -> None:
    """Dynamo's variables mean here what they mean there; an empty one is an unset one."""
    env = read_environment(given)
    status = (env.status_port, env.status_enabled, env.starting_ready, env.ready_endpoints)
    assert (*status, env.engine_id, env.failover_lock) == expected


def test_where_a_pods_worker_and_frontend_stand() -> None:
    """What a manifest's plan sets; empty and unset are by the settings, as without a manifest."""
    pod = {"DYN_NAMESPACE": "chat", "DYN_NAMESPACE_WORKER_SUFFIX": "0123abcd", "DYN_COMPONENT": "worker-decode"}
    pod |= {"DYN_SERVED_MODEL_NAME": "m", "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]'}
    launch = worker_by(read_environment(pod))
    assert launch.health_endpoints == ("generate",)
    assert (launch.namespace(), launch.component, launch.model) == ("chat-0123abcd", "worker-decode", "m")
    for unset in ({}, {"DYN_NAMESPACE_WORKER_SUFFIX": "", "DYN_COMPONENT": "", "DYN_HTTP_PORT": ""}):
        env = read_environment(unset)
        assert (worker_by(env).set_hash, worker_by(env).component) == ("", "worker")
        assert (env.http_host, env.http_port) == ("127.0.0.1", 8000)
    spec = frontend_by(read_environment({"DYN_HTTP_HOST": "0.0.0.0", "DYN_HTTP_PORT": "81"}))
    assert (spec.host, spec.port) == ("0.0.0.0", 81)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("DYN_SYSTEM_PORT", value) for value in ("-2", "65536", "x", "--1", "²", "9" * 5000, "-")],
        ("DYN_SYSTEM_ENABLED", "perhaps"),
        ("DYN_SYSTEM_STARTING_HEALTH_STATUS", "healthy"),
        *[("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", value) for value in ("generate", '"x"', "[1]", '[""]', "{}")],
        *[("ENGINE_ID", value) for value in ("-1", "primary", "1.5")],
        *[("DYN_NAMESPACE_WORKER_SUFFIX", value) for value in ("v2", "0123ABCD", "0123abcd\n")],
        ("DYN_COMPONENT", "a/b"),
        *[("DYN_HTTP_PORT", value) for value in ("-1", "65536", "http")],
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    """Whoever set it learns which one, and what it was."""
    with pytest.raises(ValueError, match=name):
        read_environment({name: value})

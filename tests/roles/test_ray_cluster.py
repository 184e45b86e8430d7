"""What can be said of Ray without Ray: what is missing, by name, and how shares are counted."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Refused, UserError
from holdfast.core.tasks import beside
from holdfast.fleet.actions import replica_name
from holdfast.roles.ray import cluster, watcher
from holdfast.roles.ray.clearing import Left, left_in, take_away
from holdfast.roles.ray.model_actor import record_name, replica_of
from holdfast.spec.launch import RayLaunch
from holdfast.testing.rig import DeploymentRig


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_nothing_is_started() -> None:
    """Whoever asks for Ray where it is not installed is told how to install it, before anything runs."""
    with DeploymentRig() as rig:
        said = rig.run("up", "--backend", "ray")
        assert said.returncode == 1
        assert "pip install 'holdfast-llm[ray]'" in said.stderr
        assert not rig.pids()


def test_an_older_ray_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which version there is, and which is needed."""
    monkeypatch.setattr(cluster, "version", lambda _name: "2.9.3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    with pytest.raises(UserError, match=r"Ray 2\.9\.3 is installed, and --backend ray needs 2\.60"):
        cluster.check_installed()


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.58.0"), "Version mismatch: The"),
        (ConnectionError("Could not find any running Ray instance."), "no Ray cluster runs here"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    """A Ray of another version, and none at all: one line, and no second try."""

    def init(**_options: Any) -> None:
        raise raised

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with pytest.raises(Refused, match=said) as found:
        cluster.connect("", "local")
    assert "\n" not in str(found.value)


async def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    """Ray itself would try for two minutes."""
    with pytest.raises(Refused, match=r"--address 127\.0\.0\.1:1: no Ray cluster answers there"):
        await watcher._reach("127.0.0.1:1")
    with pytest.raises(Refused, match="HOST:PORT"):
        await watcher._reach("ray://127.0.0.1:10001")


async def test_who_waits_for_ray_is_not_kept_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs ends the wait in time, and no thread is waited for at the end."""
    monkeypatch.setattr(cluster, "ASK_S", 0.05)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        await cluster.asked(never.wait)
    never.set()
    assert await asyncio.wait_for(cluster.asked(lambda: 7), 60) == 7


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_what_fits_by_bytes_fits_in_ray(promised: list[int]) -> None:
    """Shares of one device are together no more than one of it, where the bytes are no more than it has."""
    total = max(sum(promised), 10_001)
    assert sum(cluster.share_of(each * 10_000, total * 10_000) for each in promised) <= 1.0 + 1e-9
    assert cluster.share_of(0, total) == cluster.share_of(total, total) == 1.0


@pytest.mark.parametrize("model", ["a", "a-b", "llama-3.1-8b-r2", "r1"])
def test_whose_a_record_is_is_told_by_its_name(model: str) -> None:
    """Whatever dashes a model's name has: a replica without a placement group is found by that."""
    replica = replica_name(model, 12)
    assert replica_of(record_name(replica)) == replica


async def test_what_was_on_a_cluster_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """Its head's end was its end; and nobody who only looks is told of it again."""
    left = Left("local", "127.0.0.1:1")
    left.write(tmp_path)
    Left("other", "127.0.0.1:1").write(tmp_path)
    assert [one.deployment for one in left_in(tmp_path)] == ["local", "other"]
    told: list[str] = []
    await take_away(left, tmp_path, told.append)
    assert told == ["local on the Ray cluster 127.0.0.1:1 is gone with its head"]
    assert [one.deployment for one in left_in(tmp_path)] == ["other"]


def test_what_ray_says_of_an_end_is_told_in_short() -> None:
    """The reason, without the advice; words that are none of these stay as they are."""
    long = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: ModelActor\n"
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits with a connection error. End of file.\n"
        "Some common causes include: (1) the process was killed by the OOM killer"
    )
    assert cluster.in_short(long) == "Worker exits with a connection error. End of file."
    assert cluster.in_short("its node is\ndead") == "its node is dead"


async def test_up_waits_for_a_node_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a node that has devices, and with one whose agent does not come, `up` fails by name within a bound."""
    monkeypatch.setattr(watcher, "FIRST_NODE_S", 0.05)
    monkeypatch.setattr(watcher, "FIRST_AGENT_S", 0.05)
    monkeypatch.setattr(watcher, "AGAIN_S", 0.0)
    found: list[cluster.RayNode] = []

    async def asked(ask: Any, *_words: Any) -> Any:
        if ask is cluster.begin:
            raise cluster.Gone("its process ended")
        return list(found) if ask is cluster.nodes else []

    monkeypatch.setattr(cluster, "asked", asked)
    monkeypatch.setattr(cluster, "on_node", lambda node_id: node_id)
    with pytest.raises(Refused, match="no node of the Ray cluster h:1 has devices"):
        await _first_agent(RayLaunch(state_dir="/x", name="ray", store="unix:///s", deployment="d", address="h:1"))
    found.append(cluster.RayNode(id="a" * 56, host="h", resource="GPU", devices=1, memory_bytes=0))
    with pytest.raises(Refused, match=r"no agent of d runs on the Ray cluster .*: its process ended"):
        await _first_agent(RayLaunch(state_dir="/x", name="ray", store="unix:///s", deployment="d"))


async def _first_agent(launch: RayLaunch) -> None:
    made = watcher.Watcher(launch)
    async with beside(made.run(), "nodes"):
        await made.first_agent()

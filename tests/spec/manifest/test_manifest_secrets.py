"""Secrets of a manifest on one machine: what a container is given, what is refused, and what changes a set's hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.errors import Refused
from holdfast.rollout.revision import revision_of
from holdfast.spec.launch import FrontendLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine, replica_launches
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.secrets import Digests, values_of
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.manifest.whole import findings

TEXT = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {{name: keyed}}
spec:
  services:
    Frontend:
      componentType: frontend
      {more}
    Worker:
      componentType: worker
      extraPodSpec: {{mainContainer: {{args: [--engine, sim]}}}}
"""
REFERS = "envs: [{name: HOLDFAST_API_KEYS, valueFrom: {secretKeyRef: {name: door, key: keys%s}}}]"


@dataclass
class Source:
    """Secrets in memory."""

    files: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)  # by hash
    before: dict[str, str] = field(default_factory=dict)  # by reference
    directory: str = "/secrets"

    def read(self, secret: str, key: str) -> str | None:
        return self.files.get(secret, {}).get(key)

    def keys(self, secret: str) -> tuple[str, ...] | None:
        return tuple(self.files[secret]) if secret in self.files else None

    def last(self, reference: str) -> str | None:
        return self.before.get(reference)

    def kept(self, digest: str) -> str | None:
        return self.values.get(digest)


def manifest_of(more: str) -> Manifest:
    manifest = check(TEXT.format(more=more).encode()).manifest
    assert manifest is not None
    return manifest


def machine_of(source: Source | None, **environ: str) -> Machine:
    return Machine(Path("/state"), {"HOME": "/", **environ}, secret_source=source)


def frontend_of(manifest: Manifest, machine: Machine, digests: Digests | None = None) -> FrontendLaunch:
    pod = next(pod for pod in pods(manifest, digests or {}) if pod.service == "Frontend")
    (launch,) = replica_launches(pod, pod.replica(0), (), machine)
    assert isinstance(launch, FrontendLaunch)
    return launch


@pytest.mark.parametrize(
    ("source", "environ", "keys"),
    [
        (Source({"door": {"keys": "a,b"}}), {"HOLDFAST_API_KEYS": "c"}, ("a", "b")),
        (Source({"door": {"other": "a"}}), {"HOLDFAST_API_KEYS": "c"}, ("c",)),
        (Source(before={"door/keys": "d"}), {}, ("d",)),
    ],
)
def test_a_value_is_looked_for_in_the_file_the_variable_and_what_was_before(
    source: Source, environ: dict[str, str], keys: tuple[str, ...]
) -> None:
    """In this order: the nearest wins."""
    launch = frontend_of(manifest_of(REFERS % ""), machine_of(source, **environ))
    assert launch.api_keys == keys
    assert dict(launch.env) == {"HOLDFAST_API_KEYS": ",".join(keys)}


def test_a_missing_secret_is_refused_with_where_it_was_looked_for() -> None:
    """One reference, a whole secret, an empty key; but not an optional one."""
    text = TEXT.format(more=REFERS % "").encode()
    (problem,) = check(text, (partial(findings, machine=machine_of(Source({"door": {}}))),)).problems
    said = "HOLDFAST_API_KEYS needs the key 'keys' of the secret 'door', and it is missing: "
    where = "looked for the file /secrets/door/keys and for the variable HOLDFAST_API_KEYS"
    assert said + where in str(problem)
    with pytest.raises(Refused, match="the secret 'whole' is missing: make /secrets/whole with one file per key"):
        frontend_of(manifest_of("envFromSecret: whole"), machine_of(Source()))
    with pytest.raises(Refused, match="HOLDFAST_API_KEYS is set and holds no key"):
        frontend_of(manifest_of(REFERS % ""), machine_of(Source({"door": {"keys": ""}})))
    assert frontend_of(manifest_of(REFERS % ", optional: true"), machine_of(Source())).api_keys == ()


def test_every_key_of_a_whole_secret_is_a_variable() -> None:
    """The container's own variables win over it, and the plan's over both."""
    source = Source({"whole": {"HOLDFAST_API_KEYS": "a", "HF_TOKEN": "t", "DYN_NAMESPACE": "mine"}})
    manifest = manifest_of("envFromSecret: whole\n      envs: [{name: HF_TOKEN, value: u}]")
    launch = frontend_of(manifest, machine_of(source))
    assert launch.api_keys == ("a",)
    assert dict(launch.env) == {"HOLDFAST_API_KEYS": "a", "HF_TOKEN": "u"}
    assert launch.deployment == "keyed"


def test_a_whole_secret_without_the_file_of_its_guard_keeps_the_guard() -> None:
    """A file that is away, in a rotation say, opens nothing; another variable goes with its file."""
    before = {"whole/HOLDFAST_API_KEYS": "a", "whole/HF_TOKEN": "t"}
    manifest, source = manifest_of("envFromSecret: whole"), Source({"whole": {"OTHER": "o"}}, before=before)
    assert values_of(manifest, source, {}) == {"whole/OTHER": "o", "whole/HOLDFAST_API_KEYS": "a"}
    source.files["whole"]["HOLDFAST_API_KEYS"] = "b"
    assert values_of(manifest, source, {})["whole/HOLDFAST_API_KEYS"] == "b"
    assert values_of(manifest, Source(before=before), {}) == {}, "without its folder it is refused as missing"


def test_a_set_keeps_the_values_that_it_was_asked_for_with() -> None:
    """Whatever the files and the environment say by now; a value that was lost is refused, and never left out."""
    source = Source({"door": {"keys": "new"}}, values={"1": "old"})
    refers, plain = manifest_of(REFERS % ""), manifest_of("replicas: 1")
    assert frontend_of(refers, machine_of(source), {"door/keys": "1"}).api_keys == ("old",)
    assert frontend_of(plain, machine_of(source), {"$HOLDFAST_API_KEYS": "1"}).api_keys == ("old",)
    for manifest, one in ((refers, "door/keys"), (plain, "$HOLDFAST_API_KEYS")):
        with pytest.raises(Refused, match="that this set was asked for with is not kept in /state"):
            frontend_of(manifest, machine_of(source, HOLDFAST_API_KEYS="new"), {one: "2"})


def test_another_value_is_another_set_of_the_services_that_have_it() -> None:
    """And of no other; without secrets the hash is what it was."""
    refers, plain = manifest_of(REFERS % ""), manifest_of("replicas: 1")
    for manifest, one in ((refers, "door/keys"), (plain, "$HOLDFAST_API_KEYS")):
        first, second = (revision_of(manifest, 1, {one: digest}).sets for digest in "12")
        assert first["Frontend"] != second["Frontend"]
        assert first["Worker"] == second["Worker"]
    assert revision_of(refers, 1, {"$HOLDFAST_API_KEYS": "1"}).sets == revision_of(refers, 1).sets
    assert values_of(plain, Source(), {"HOLDFAST_API_KEYS": "k", "PATH": "/"}) == {"$HOLDFAST_API_KEYS": "k"}

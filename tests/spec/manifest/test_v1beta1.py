"""`nvidia.com/v1beta1`: components are read as the services that mean the same, and mistakes have the file's paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_manifest_fields import FIELDS, manifest_with, outcome, parts, written

from holdfast.spec.manifest.addresses import address_of
from holdfast.spec.manifest.checking import check, text_of
from holdfast.spec.manifest.parts import Section
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.manifest.v1beta1 import ComponentsManifest
from tests.rigs.manifests import accepted, problems, warnings

EXAMPLES = Path(__file__).parents[3] / "examples"
SAME = ("replicas", "canaryPrompts", "multinode", "worker", "frontend", "control", "rollout", "fleet")
# A component has no probes or variables of its own, only its container; failover is enabled by being there.
ONLY_SERVICES = {"Service.livenessProbe", "Service.readinessProbe", "Service.envs", "Failover.enabled"}
NEW = sorted(set(parts(ComponentsManifest)) - set(parts(Manifest)), key=lambda kind: kind.__name__)


def component(name: str, service: dict[str, Any]) -> dict[str, Any]:
    """A service as a component."""
    own = {key: service[key] for key in SAME if key in service}
    made = {"name": name, "type": service.get("subComponentType") or service.get("componentType"), **own}
    if "modelName" in service:
        made["modelRef"] = {"name": service["modelName"]}
    if service.get("failover", {}).get("enabled"):
        made["experimental"] = {"failover": {k: v for k, v in service["failover"].items() if k != "enabled"}}
    pod = dict(service.get("extraPodSpec", {}))
    container = {"name": "main", **pod.pop("mainContainer", {})}
    if (gpu := service.get("resources", {}).get("limits", {}).get("gpu")) is not None:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpu}}
    if "envFromSecret" in service:
        container["envFrom"] = [{"secretRef": {"name": service["envFromSecret"]}}]
    return made | {"podTemplate": {"spec": {**pod, "containers": [container]}}}


def beta(text: str) -> str:
    """A manifest with services, as one with components."""
    tree = yaml.safe_load(text)
    spec = tree["spec"]
    made = {"components": [component(*one) for one in spec["services"].items()]}
    made |= {new: spec[old] for old, new in (("envs", "env"), ("shares", "shares")) if old in spec}
    version = "nvidia.com/v1beta1" if tree["apiVersion"] == "nvidia.com/v1alpha1" else tree["apiVersion"]
    return yaml.safe_dump(tree | {"apiVersion": version, "spec": made}, sort_keys=False)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_the_same_manifest_in_both_forms(path: Path) -> None:
    """With the same sets, and no warning more."""
    text = path.read_text()
    if "v1beta1" in text:
        text = text_of(text.encode(), accepted(text))
    assert accepted(beta(text)) == accepted(text)
    assert len(warnings(beta(text))) == len(warnings(text))


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in ONLY_SERVICES])
def test_every_field_does_something_in_components_too(field: str) -> None:
    """Another value changes the plan, how it is replaced, or what is refused; and what is accepted is the manifest that
    services would have made."""
    path, before, after = FIELDS[field]
    one, other = manifest_with(path, before), manifest_with(path, after)
    assert outcome(beta(one)) != outcome(beta(other))
    for text in (one, other):
        manifest = check(beta(text).encode()).manifest
        assert manifest == check(text.encode()).manifest


RIGHT = """\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  components:
    - {name: door, type: frontend}
    - name: engine
      type: worker
      multinode: null
      modelRef: {name: m}
      experimental: {failover: {numShadows: 1}}
      podTemplate: {spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]}}
"""
ENGINE = "spec.components[1]"
# Where an idle field of a part is written: before this, with this indentation.
PLACES = {
    "ComponentsManifest": ("metadata: {name: chat}", ""),
    "ComponentsSpec": ("  components:", "  "),
    "Component": ("      type: worker", "      "),
    "ModelRef": ("modelRef: {", None),
    "Experimental": ("experimental: {", None),
    "Standbys": ("failover: {", None),
    "PodTemplate": ("podTemplate: {", None),
    "ComponentPod": ("podTemplate: {spec: {", None),
    "ComponentContainer": ("[{", None),
    "ContainerResources": ("resources: {", None),
    "GpuLimits": ("limits: {", None),
    "ComponentNodes": ("multinode: null", "multinode: {nodeCount: 1, NAME: anything}"),
}


def with_idle(kind: type[Section], name: str) -> str:
    mark, how = PLACES[kind.__name__]
    assert RIGHT.count(mark) == 1
    if how is None:
        return RIGHT.replace(mark, f"{mark}{name}: anything, ")
    if "NAME" in how:
        return RIGHT.replace(mark, how.replace("NAME", name))
    return RIGHT.replace(mark, f"{how}{name}: anything\n{mark}")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in NEW for name in kind.idle],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_every_idle_field_is_warned_about(kind: type[Section], name: str) -> None:
    """By the path that it has in the file; and it changes nothing."""
    text = with_idle(kind, name)
    (warning,) = [one for one in check(text.encode()).warnings if one.path.endswith(name)]
    assert warning.what == f"does nothing here: {kind.idle[name]}"
    if kind.__name__ != "ComponentNodes":  # several machines are refused anyway
        assert accepted(text) == accepted(RIGHT)


def test_no_field_is_of_two_kinds() -> None:
    """A name is read, idle or refused."""
    for kind in NEW:
        names = [*written(kind), *kind.idle, *kind.refused]
        assert len(set(names)) == len(names), kind


def with_engine(text: str) -> str:
    return RIGHT + f"      {text}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (with_engine("replicas: many"), f"{ENGINE}.replicas: must be a whole number, got 'many'"),
        (with_engine("replica: 2"), f"{ENGINE}.replica: there is no such field; did you mean replicas?"),
        (RIGHT.replace("type: worker", "type: worke"), f"{ENGINE}.type: must be one of"),
        (RIGHT.replace("type: worker", "type: epp"), "leave it out; frontends choose workers themselves"),
        (RIGHT.replace("gpu: 1", "gpu: 0"), f"{ENGINE}.podTemplate.spec.containers[0].resources.limits.nvidia.com/gpu"),
        (RIGHT.replace("type: worker", "type: planner"), f"{ENGINE}.experimental.failover: only workers have standbys"),
        (RIGHT.replace("type: frontend", "type: frontend, modelRef: {name: x}"), "spec.components[0].modelRef.name: a"),
        (RIGHT.replace("type: worker", "type: prefill"), f"{ENGINE}.type: there is no decode worker of m"),
        (RIGHT.replace("name: engine", "name: door"), "spec.components[0]: 2 components are called door"),
        (RIGHT.replace("name: engine", "name: Door"), "another service has this name but for its capitals"),
        (RIGHT.replace("{name: main,", "{name: other,"), f"{ENGINE}.podTemplate.spec.containers[0].name: must be main"),
        (RIGHT.replace("[{name: main", "[{name: main}, {name: main"), "containers: a pod's other containers are made"),
        (RIGHT.replace("  components:", "  services: {}\n  components:"), "spec.services: that is nvidia.com/v1alpha1"),
        (RIGHT.replace("  components:", "  env: [{name: A}, {name: A}]\n  components:"), "spec.env[1].name: A is"),
        (RIGHT.replace("  components:", "  parts:"), "spec.components: is missing"),
        (with_engine("worker: {engine: sim, kvGb: 1}"), f"{ENGINE}.worker.kvGb: there is no such field; did you mean"),
        (
            RIGHT.replace("{name: main,", "{name: main, envFrom: [{secretRef: {name: a}}, {secretRef: {name: b}}],"),
            f"{ENGINE}.podTemplate.spec.containers[0].envFrom: one secret's keys become variables here",
        ),
    ],
)
def test_a_mistake_has_the_path_of_the_file(text: str, said: str) -> None:
    """And its line."""
    found = problems(text)
    assert any(said in problem for problem in found), found
    assert all(problem.startswith("line ") for problem in found)


def test_what_is_stored_has_services() -> None:
    """The same manifest, for every process that reads it; a number of replicas that was given stays given."""
    for text in (RIGHT, with_engine("replicas: 1"), (EXAMPLES / "v1beta1.yaml").read_text()):
        stored = text_of(text.encode(), accepted(text))
        assert accepted(stored) == accepted(text)
        assert "v1alpha1" in stored
        assert ("replicas: 1" in stored) == ("replicas: 1" in text)
        for service in accepted(text).spec.services:
            assert address_of(accepted(stored), service) == address_of(accepted(text), service)
    alpha = (EXAMPLES / "failover.yaml").read_text()
    assert text_of(alpha.encode(), accepted(alpha)) == alpha

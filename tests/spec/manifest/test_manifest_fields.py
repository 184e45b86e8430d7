"""Every field that is accepted does something, or is warned about: there is no third kind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
import yaml

from holdfast.fleet.desired_changes import model_from_service, scaling_from
from holdfast.rollout.revision import revision_of
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.parts import Section
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.typed import OPTIONS, ControlBlock, FrontendBlock, WorkerBlock, manifest_name
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.settings import fields_of
from tests.rigs.manifests import RIGHT, another, problems, warnings

WORKER = "spec.services.Worker"
MAIN = f"{WORKER}.extraPodSpec.mainContainer"
PROBE = f"{MAIN}.startupProbe"
SECRET = "spec.envs.0.valueFrom.secretKeyRef"
OF_POD = "spec.envs.0.valueFrom.fieldRef"
ASKS = {"httpGet": {"port": 9090, "path": "/live"}}
RUNS = {"exec": {"command": ["alive"]}}
KEY = {"name": "s", "key": "k"}
FIELD = {"fieldPath": "metadata.uid"}
GPU = {"limits": {"gpu": 1}}
CANARY = {"prompt": "a", "expectedTokens": [7]}
SCALED = f"{WORKER}.fleet.autoscale"
SCALES = {"enabled": True}
SCALING = (
    *("waitSeconds", "kvHigh", "kvLow", "idleSeconds"),
    *("upAfterSeconds", "downAfterSeconds", "upEverySeconds", "downEverySeconds"),
)
BLOCKS = {
    "worker": (WorkerBlock, "worker"),
    "frontend": (FrontendBlock, "frontend"),
    "control": (ControlBlock, "planner"),
}


def typed_fields() -> Iterator[tuple[str, tuple[str, Any, Any]]]:
    """A row for every option that is a typed setting of a service."""
    for role, (kind, component_type) in BLOCKS.items():
        names = written(kind)
        for flag, option in OPTIONS[role].items():
            if (name := manifest_name(flag)) in names:
                value = another(option)
                settings = {name: list(value) if isinstance(value, tuple) else value}
                plain = {"componentType": component_type, role: {}}
                yield f"{kind.__name__}.{name}", ("spec.services.More", plain, plain | {role: settings})


def written(kind: type[Section]) -> list[str]:
    return [one.encode_name for one in msgspec.structs.fields(kind)]


# struct.field -> where it is, one value, another; None: it is not written at all
FIELDS: dict[str, tuple[str, Any, Any]] = {
    "Manifest.apiVersion": ("apiVersion", "nvidia.com/v1alpha1", "v1"),
    "Manifest.kind": ("kind", "DynamoGraphDeployment", "Pod"),
    "Manifest.metadata": ("metadata", {"name": "a"}, {"name": "b"}),
    "Manifest.spec": ("spec", {"services": {}}, {"services": {"F": {"componentType": "frontend"}}}),
    "Metadata.name": ("metadata.name", "a", "b"),
    "Spec.services": ("spec.services.More", None, {"componentType": "planner"}),
    "Spec.envs": ("spec.envs", None, [{"name": "A"}]),
    "Spec.shares": ("spec.shares", ["a"], ["b"]),
    "Service.componentType": (f"{WORKER}.componentType", "worker", "planner"),
    "Service.subComponentType": (f"{WORKER}.subComponentType", None, "decode"),
    "Service.replicas": (f"{WORKER}.replicas", None, 2),
    "Service.modelName": (f"{WORKER}.modelName", None, "m"),
    "Service.canaryPrompts": (f"{WORKER}.canaryPrompts", None, [CANARY]),
    "CanaryQuestion.prompt": (f"{WORKER}.canaryPrompts", [CANARY], [CANARY | {"prompt": "b"}]),
    "CanaryQuestion.promptTokens": (
        f"{WORKER}.canaryPrompts", [CANARY], [{"promptTokens": [1], "expectedTokens": [7]}]
    ),
    "CanaryQuestion.expectedTokens": (f"{WORKER}.canaryPrompts", [CANARY], [CANARY | {"expectedTokens": [7, 8]}]),
    "CanaryQuestion.logprobRange": (f"{WORKER}.canaryPrompts", [CANARY], [CANARY | {"logprobRange": [-1, 0]}]),
    "Service.resources": (f"{WORKER}.resources", None, GPU),
    "Service.failover": (f"{WORKER}.failover", None, {"enabled": True}),
    "Service.multinode": (f"{WORKER}.multinode", None, {"nodeCount": 2}),
    "Service.envs": (f"{WORKER}.envs", None, [{"name": "A"}]),
    "Service.envFromSecret": (f"{WORKER}.envFromSecret", None, "s"),
    "Service.livenessProbe": (f"{WORKER}.livenessProbe", None, RUNS),
    "Service.readinessProbe": (f"{WORKER}.readinessProbe", None, RUNS),
    "Service.extraPodSpec": (f"{WORKER}.extraPodSpec", None, {"mainContainer": {"image": "i"}}),
    "Service.worker": (f"{WORKER}.worker", None, {"engine": "torch"}),
    "Service.frontend": ("spec.services.Frontend.frontend", None, {"port": 9000}),
    "Service.control": (f"{WORKER}.control", None, {}),
    **dict(typed_fields()),
    "Service.rollout": (f"{WORKER}.rollout", None, {"maxSurge": 2}),
    "Resources.limits": (f"{WORKER}.resources.limits", None, {"gpu": 2}),
    "Limits.gpu": (f"{WORKER}.resources.limits.gpu", "1", 2),
    "Failover.enabled": (f"{WORKER}.failover.enabled", False, True),
    "Failover.numShadows": (f"{WORKER}.failover", {"enabled": True}, {"enabled": True, "numShadows": 2}),
    "Failover.lock": (f"{WORKER}.failover", {"enabled": True}, {"enabled": True, "lock": "/l"}),
    "Multinode.nodeCount": (f"{WORKER}.multinode.nodeCount", 2, "many"),
    "Rollout.maxSurge": (f"{WORKER}.rollout.maxSurge", 1, 2),
    "Rollout.maxUnavailable": (f"{WORKER}.rollout.maxUnavailable", 1, "50%"),
    "Rollout.progressDeadlineSeconds": (f"{WORKER}.rollout.progressDeadlineSeconds", 60, 90),
    "Rollout.errorPercentMax": (f"{WORKER}.rollout.errorPercentMax", 1, 2),
    "Rollout.inexact": (f"{WORKER}.rollout.inexact", False, True),
    "Rollout.paused": (f"{WORKER}.rollout.paused", False, True),
    "Service.fleet": (f"{WORKER}.fleet", None, {"replicasMax": 2}),
    "Fleet.replicasMin": (f"{WORKER}.fleet.replicasMin", 1, 2),
    "Fleet.replicasMax": (f"{WORKER}.fleet.replicasMax", 1, 2),
    "Fleet.floor": (f"{WORKER}.fleet.floor", "hot", "cold"),
    "Fleet.dedicated": (f"{WORKER}.fleet.dedicated", False, True),
    "Fleet.nodes": (f"{WORKER}.fleet.nodes", ["a"], ["b"]),
    "Fleet.perNode": (f"{WORKER}.fleet.perNode", 1, 2),
    "Fleet.memoryGib": (f"{WORKER}.fleet.memoryGib", 1, 2.5),
    "Fleet.hostGib": (f"{WORKER}.fleet.hostGib", 1, 2),
    "Fleet.readySeconds": (f"{WORKER}.fleet.readySeconds", 1, 2),
    "Fleet.drainSeconds": (f"{WORKER}.fleet.drainSeconds", 1, 2),
    "Fleet.autoscale": (f"{WORKER}.fleet.autoscale", None, {"enabled": True}),
    "Autoscale.enabled": (f"{WORKER}.fleet.autoscale.enabled", False, True),
    **{f"Autoscale.{name}": (SCALED, SCALES, SCALES | {name: 0.8}) for name in SCALING},
    "Autoscale.devicesMax": (SCALED, SCALES, SCALES | {"devicesMax": 3}),
    "ExtraPodSpec.mainContainer": (MAIN, None, {"image": "i"}),
    "ExtraPodSpec.terminationGracePeriodSeconds": (f"{WORKER}.extraPodSpec.terminationGracePeriodSeconds", None, 5),
    "MainContainer.image": (f"{MAIN}.image", "i", "j"),
    "MainContainer.command": (f"{MAIN}.command", None, ["python3"]),
    "MainContainer.args": (f"{MAIN}.args", None, ["--engine", "sim"]),
    "MainContainer.env": (f"{MAIN}.env", None, [{"name": "A"}]),
    "MainContainer.workingDir": (f"{MAIN}.workingDir", None, "/w"),
    "MainContainer.startupProbe": (PROBE, None, ASKS),
    "MainContainer.livenessProbe": (f"{MAIN}.livenessProbe", None, RUNS),
    "MainContainer.readinessProbe": (f"{MAIN}.readinessProbe", None, RUNS),
    "Probe.httpGet": (PROBE, RUNS, ASKS),
    "Probe.exec": (PROBE, ASKS, RUNS),
    "Probe.initialDelaySeconds": (PROBE, ASKS, ASKS | {"initialDelaySeconds": 5}),
    "Probe.periodSeconds": (PROBE, ASKS, ASKS | {"periodSeconds": 5}),
    "Probe.timeoutSeconds": (PROBE, ASKS, ASKS | {"timeoutSeconds": 5}),
    "Probe.failureThreshold": (PROBE, ASKS, ASKS | {"failureThreshold": 5}),
    "HttpGet.port": (f"{PROBE}.httpGet", {"port": 1}, {"port": "system"}),
    "HttpGet.path": (f"{PROBE}.httpGet", {"port": 1}, {"port": 1, "path": "/live"}),
    "Exec.command": (f"{PROBE}.exec.command", ["a"], ["b"]),
    "EnvVar.name": ("spec.envs.0", {"name": "A"}, {"name": "B"}),
    "EnvVar.value": ("spec.envs.0", {"name": "A"}, {"name": "A", "value": "a"}),
    "EnvVar.valueFrom": ("spec.envs.0", {"name": "A"}, {"name": "A", "valueFrom": {"secretKeyRef": KEY}}),
    "ValueFrom.secretKeyRef": ("spec.envs.0", {"name": "A"}, {"name": "A", "valueFrom": {"secretKeyRef": KEY}}),
    "ValueFrom.fieldRef": ("spec.envs.0", {"name": "A"}, {"name": "A", "valueFrom": {"fieldRef": FIELD}}),
    "PodField.fieldPath": (f"{OF_POD}.fieldPath", "metadata.uid", "metadata.name"),
    "SecretKey.name": (f"{SECRET}.name", "s", "t"),
    "SecretKey.key": (f"{SECRET}.key", "k", "l"),
    "SecretKey.optional": (f"{SECRET}.optional", None, True),
}
# Where fields that do nothing are written.
PLACES = {
    "Manifest": "",
    "Metadata": "metadata.",
    "Spec": "spec.",
    "Service": f"{WORKER}.",
    "Resources": f"{WORKER}.resources.",
    "Limits": f"{WORKER}.resources.limits.",
    "Failover": f"{WORKER}.failover.",
    "Fleet": f"{WORKER}.fleet.",
    "ExtraPodSpec": f"{WORKER}.extraPodSpec.",
    "MainContainer": f"{MAIN}.",
    "Probe": f"{PROBE}.",
    "HttpGet": f"{PROBE}.httpGet.",
    "SecretKey": f"{SECRET}.",
    "PodField": f"{OF_POD}.",
}


def parts(kind: type[Section]) -> Iterator[type[Section]]:
    """A struct, and those inside it."""
    yield kind
    for setting in fields_of(kind):
        for inner in (setting.type, *get_args(setting.type)):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from parts(inner)


PARTS = sorted(set(parts(Manifest)), key=lambda kind: kind.__name__)


def manifest_with(path: str, value: Any) -> str:
    """A right manifest, all of whose parts are there, with another value at the path."""
    tree = yaml.safe_load(RIGHT)
    tree["spec"]["envs"] = [{"name": "A", "valueFrom": {"secretKeyRef": dict(KEY)}}]
    container = {"mainContainer": {"startupProbe": copy.deepcopy(ASKS)}}
    tree["spec"]["services"]["Worker"] |= {"failover": {"enabled": False}, "extraPodSpec": container}
    *above, last = path.split(".")
    part = tree
    for step in above:
        if step in ("httpGet", "exec", "fieldRef"):  # the one way to ask, the one source
            part.clear()
        part = part[int(step)] if isinstance(part, list) else part.setdefault(step, {})
    if isinstance(part, list):
        part[int(last)] = value
    elif value is None:
        part.pop(last, None)
    else:
        part[last] = value
    if last != "port" and "httpGet" in above:
        part.setdefault("port", 9090)
    if last != "fieldPath" and "fieldRef" in above:
        part.setdefault("fieldPath", "metadata.uid")
    return yaml.safe_dump(tree, sort_keys=False)


def outcome(text: str) -> Any:
    """All that comes of it but for hashes: what is wrong with it, or its pods, their peers, how they roll, and how a
    fleet keeps them."""
    manifest = check(text.encode()).manifest
    if manifest is None:
        return problems(text)
    plans = [str(msgspec.to_builtins(pod)).replace(pod.namespace[-8:], "HASH") for pod in pods(manifest)]
    kept = {
        name: (model_from_service(name, one, "HASH", 1), scaling_from(one.fleet.autoscale))
        for name, one in manifest.of_type("worker").items()
    }
    parts = revision_of(manifest, 1).parts.values()
    return plans, [msgspec.structs.replace(one, set_id="HASH") for one in parts], kept


def test_every_field_that_is_read_is_in_the_table() -> None:
    """A new field needs its row."""
    assert {f"{kind.__name__}.{name}" for kind in PARTS for name in written(kind)} == FIELDS.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_that_is_read_does_something(field: str) -> None:
    """Another value changes the plan, and not only its hash; or how it is replaced; or what is refused."""
    path, before, after = FIELDS[field]
    assert outcome(manifest_with(path, before)) != outcome(manifest_with(path, after))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in PARTS for name in kind.idle],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_every_other_field_that_is_accepted_is_warned_about(kind: type[Section], name: str) -> None:
    """With its path and why it does nothing; and it does nothing: the plan is the same, with its hash."""
    path = PLACES[kind.__name__] + name
    without, with_it = manifest_with(path, None), manifest_with(path, "anything")
    said = {warning.partition(": ")[2] for warning in warnings(with_it)}
    assert said == {f"{path.replace('.0.', '[0].')}: does nothing here: {kind.idle[name]}"}
    plans = [check(text.encode()).manifest for text in (without, with_it)]
    assert plans[0] is not None
    assert plans[0] == plans[1]


def test_no_field_is_of_two_kinds() -> None:
    """A name is read, idle or refused."""
    for kind in PARTS:
        names = [*written(kind), *kind.idle, *kind.refused]
        assert len(set(names)) == len(names), kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("envs: [{name: DYN_NAMESPACE}]", "envs[0].name: DYN_NAMESPACE does nothing here: it is metadata.name"),
        ("envs: [{name: ENGINE_ID}]", "envs[0].name: ENGINE_ID does nothing here: every engine has its own"),
        ("failover: {enabled: false, numShadows: 2}", "failover: does nothing while it is not enabled"),
        (
            "fleet: {autoscale: {enabled: false, kvLow: 0.1}}",
            "fleet.autoscale: does nothing while it is not enabled",
        ),
    ],
)
def test_what_does_less_than_somebody_may_think_is_warned_about(text: str, said: str) -> None:
    """Variables that the plan sets itself, and settings of something that is switched off."""
    whole = RIGHT + f"      {text}\n"
    assert warnings(whole) == [f"line 12: {WORKER}.{said}"]


def test_a_deployment_without_a_frontend_is_warned_about() -> None:
    """Its workers serve nobody unless another deployment says so."""
    text = RIGHT.replace("    Frontend:\n      componentType: frontend\n", "")
    said = "there is no frontend: its workers serve only a deployment whose spec.shares names this one"
    assert warnings(text) == [f"line 6: spec.services: {said}"]

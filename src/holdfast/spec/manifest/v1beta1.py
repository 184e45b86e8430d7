"""Reads `nvidia.com/v1beta1`: a manifest with a list of components becomes the same `Manifest` as one with services.

Always true: it is converted once, where the file is read; what is stored and shown has services (`as_v1alpha1`). What
is wrong with it is told by the paths of the file (`path_in_file`).
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar

import msgspec

from holdfast.spec.manifest.fleet import REPLICAS_MAX, Fleet
from holdfast.spec.manifest.parts import (
    CLUSTER,
    GRACE_S,
    NAME,
    EnvVar,
    ExtraPodSpec,
    MainContainer,
    Names,
    Refusals,
    Section,
    as_plain,
    or_none,
)
from holdfast.spec.manifest.rules import Finding, Findings, Steps
from holdfast.spec.manifest.typed import ControlBlock, FrontendBlock, WorkerBlock
from holdfast.spec.manifest.types import (
    API_VERSION,
    COMPONENT_TYPES,
    COUNT_FORM,
    DECODE,
    KIND,
    LOCK_FORM,
    MODEL_FORM,
    PREFILL,
    SHADOWS_MAX,
    V1BETA1,
    WORKER,
    CanaryQuestion,
    Failover,
    Limits,
    Manifest,
    Metadata,
    Multinode,
    Resources,
    Rollout,
    Service,
    Spec,
)
from holdfast.spec.settings import about

MAIN: Steps = ("podTemplate", "spec", "containers", 0)


class GpuLimits(Section, frozen=True):
    gpu: Annotated[str, about("GPUs per replica; its engines share them.", like=COUNT_FORM, number=True)] = (
        msgspec.field(default="0", name="nvidia.com/gpu")
    )

    idle: ClassVar[Names] = dict.fromkeys(("cpu", "memory", "ephemeral-storage"), CLUSTER)


class ContainerResources(Section, frozen=True):
    limits: Annotated[GpuLimits, about("Resources of a replica.")] = GpuLimits()

    idle: ClassVar[Names] = Resources.idle


class SecretRef(Section, frozen=True):
    name: Annotated[str, about("The secret's name.", like=NAME)]


class EnvFrom(Section, frozen=True):
    secret_ref: Annotated[SecretRef, about("Secret whose keys become environment variables.")]

    refused: ClassVar[Refusals] = {"configMapRef": ("variables come from here or a secret", "write them as env")}


class ComponentContainer(MainContainer, frozen=True):
    name: Annotated[str, about("Name of the container.", choices=("main",))] = "main"
    resources: Annotated[ContainerResources, about("Resources of each replica.")] = ContainerResources()
    env_from: Annotated[tuple[EnvFrom, ...], about("Secret whose keys become environment variables; one.")] = ()

    idle: ClassVar[Names] = {k: v for k, v in MainContainer.idle.items() if k not in ("name", "resources")}
    refused: ClassVar[Refusals] = {k: v for k, v in MainContainer.refused.items() if k != "envFrom"}


class ComponentPod(Section, frozen=True):
    containers: Annotated[tuple[ComponentContainer, ...], about("The container of the component, called main.")] = ()
    termination_grace_period_seconds: Annotated[int, about("Time from SIGTERM to SIGKILL.", "s", min=0, max=86400)] = (
        GRACE_S
    )

    idle: ClassVar[Names] = ExtraPodSpec.idle
    refused: ClassVar[Refusals] = {
        **dict.fromkeys(
            ("initContainers", "ephemeralContainers"),
            ("a pod's other containers are made by the plan", "describe the component's own in containers"),
        ),
        "restartPolicy": ExtraPodSpec.refused["restartPolicy"],
    }


class PodTemplate(Section, frozen=True):
    spec: Annotated[ComponentPod, about("Container and pod settings.")] = ComponentPod()

    idle: ClassVar[Names] = {"metadata": CLUSTER}


class ModelRef(Section, frozen=True):
    name: Annotated[
        str,
        about(
            "Model name that clients use.",
            like=MODEL_FORM,
        ),
    ]

    idle: ClassVar[Names] = {"revision": "an engine's model option says it"}


class Standbys(Section, frozen=True):
    num_shadows: Annotated[int, about("Number of standby engines.", min=0, max=SHADOWS_MAX)] = 1
    lock: Annotated[
        str, about("Lock that elects the active engine (empty: a file shared within the pod).", like=or_none(LOCK_FORM))
    ] = ""

    idle: ClassVar[Names] = Failover.idle


class Experimental(Section, frozen=True):
    failover: Annotated[Standbys | None, about("Run standby engines, with the memory in a vault.")] = None

    idle: ClassVar[Names] = {
        "gpuMemoryService": Service.idle["gpuMemoryService"],
        "checkpoint": Service.idle["checkpoint"],
        "grove": CLUSTER,
    }


class ComponentNodes(Multinode, frozen=True):
    idle: ClassVar[Names] = dict.fromkeys(("leader", "worker"), CLUSTER)


class Component(Section, frozen=True):
    name: Annotated[str, about("The component's name.")]
    type: Annotated[
        str,
        about(
            "The type of the component: frontend, planner (runs control), worker, prefill or decode.",
            choices=(*COMPONENT_TYPES, PREFILL, DECODE),
            mends={"epp": "leave it out; frontends choose workers themselves"},
        ),
    ]
    replicas: Annotated[int, about("Number of replicas.", min=0, max=REPLICAS_MAX)] = 1
    model_ref: Annotated[ModelRef | None, about("The model's name.")] = None
    canary_prompts: Annotated[
        tuple[CanaryQuestion, ...], about("Known-answer prompts with which control checks the workers.")
    ] = ()
    multinode: Annotated[ComponentNodes | None, about("Spread one engine over several machines.")] = None
    worker: Annotated[WorkerBlock | None, about("Settings of a worker, instead of args.")] = None
    frontend: Annotated[FrontendBlock | None, about("Settings of a frontend, instead of args.")] = None
    control: Annotated[ControlBlock | None, about("Settings of a planner, instead of args.")] = None
    pod_template: Annotated[PodTemplate, about("The component's pod.")] = PodTemplate()
    experimental: Annotated[Experimental, about("Standby engines of a worker.")] = Experimental()
    rollout: Annotated[Rollout, about("How a new revision replaces the old one.")] = Rollout()
    fleet: Annotated[Fleet, about("Replicas, placement and scaling in a fleet.")] = Fleet()

    idle: ClassVar[Names] = {
        **{name: Service.idle[name] for name in ("minAvailable", "scalingAdapter", "runtimeVersionOverride")},
        **dict.fromkeys(("sharedMemorySize", "compilationCache", "topologyConstraint"), CLUSTER),
    }
    refused: ClassVar[Refusals] = Service.refused

    @property
    def service(self) -> Service:
        container = next(iter(self.pod_template.spec.containers), ComponentContainer())
        standbys = self.experimental.failover
        own = {one: getattr(container, one) for one in MainContainer.__struct_fields__}
        same = ("replicas", "canary_prompts", "worker", "frontend", "control", "rollout", "fleet")
        return Service(
            component_type=self.type if self.type in COMPONENT_TYPES else WORKER,
            sub_component_type="" if self.type in COMPONENT_TYPES else self.type,
            model_name=self.model_ref.name if self.model_ref is not None else "",
            resources=Resources(Limits(container.resources.limits.gpu)),
            failover=Failover(True, standbys.num_shadows, standbys.lock) if standbys else Failover(enabled=False),
            multinode=Multinode(self.multinode.node_count) if self.multinode is not None else None,
            env_from_secret=next((one.secret_ref.name for one in container.env_from), ""),
            extra_pod_spec=ExtraPodSpec(MainContainer(**own), self.pod_template.spec.termination_grace_period_seconds),
            **{one: getattr(self, one) for one in same},
        )


class ComponentsSpec(Section, frozen=True):
    components: Annotated[tuple[Component, ...], about("The list of components to run.")]
    env: Annotated[tuple[EnvVar, ...], about("Environment variables of every container.")] = ()
    shares: Annotated[tuple[str, ...], about("Other deployments whose workers this one's frontends serve, too.")] = ()

    idle: ClassVar[Names] = {name: why for name, why in Spec.idle.items() if name != "pvcs"}
    refused: ClassVar[Refusals] = {
        "restart": Spec.refused["restart"],
        "services": (f"that is {API_VERSION}", f"write them as components, or apiVersion: {API_VERSION}"),
    }


class ComponentsManifest(Section, frozen=True):
    api_version: Annotated[str, about("The version of the manifest format.", choices=(V1BETA1,))]
    kind: Annotated[str, about("The kind of the manifest.", choices=(KIND,))]
    metadata: Annotated[Metadata, about("The deployment's name.")]
    spec: Annotated[ComponentsSpec, about("The desired state of the deployment.")]

    idle: ClassVar[Names] = Manifest.idle

    @property
    def manifest(self) -> Manifest:
        services = {one.name: one.service for one in self.spec.components}
        return Manifest(API_VERSION, KIND, self.metadata, Spec(services, self.spec.env, self.spec.shares))


def components_wrong(components: tuple[Component, ...]) -> Findings:
    """Yield what would be lost in a mapping of services; the paths are those of services."""
    count = Counter(one.name for one in components)
    for one in components:
        at: Steps = ("spec", "services", one.name)
        if count[one.name] > 1:
            yield Finding(at, f"{count[one.name]} components are called {one.name}", mend="give each its own name")
        if len(one.pod_template.spec.containers) > 1:
            what = "a pod's other containers are made by the plan"
            yield Finding((*at, *MAIN[:-1]), what, mend="describe the component's own, main")
        if any(len(container.env_from) > 1 for container in one.pod_template.spec.containers):
            yield Finding((*at, *MAIN, "envFrom"), "one secret's keys become variables here", mend="leave one of them")


# -- paths, and the text that is stored

_PATHS: dict[Steps, Steps] = {
    ("componentType",): ("type",),
    ("subComponentType",): ("type",),
    ("modelName",): ("modelRef", "name"),
    ("failover",): ("experimental", "failover"),
    ("envFromSecret",): (*MAIN, "envFrom"),
    ("resources", "limits", "gpu"): (*MAIN, "resources", "limits", "nvidia.com/gpu"),
    ("extraPodSpec", "mainContainer"): MAIN,
    ("extraPodSpec",): MAIN[:2],
}
_WORDS = (
    ("{limits: {gpu:", "{limits: {nvidia.com/gpu:"),
    ("resources.limits.gpu", "resources.limits.nvidia.com/gpu"),
    ("modelName", "modelRef.name"),
)


def in_file(finding: Finding, names: list[str]) -> Finding:
    """Return a finding about services with the path that the file has. `names`: of its components, in order."""
    match finding.at:
        case ("spec", "services", str() as name, *rest):
            known = (steps for steps in _PATHS if tuple(rest[: len(steps)]) == steps)
            old = next(known, ())
            at: Steps = ("spec", "components", names.index(name), *_PATHS.get(old, ()), *rest[len(old) :])
        case ("spec", "services"):
            at = ("spec", "components")
        case ("spec", "envs", *rest):
            at = ("spec", "env", *rest)
        case other:
            at = other
    what, mend = finding.what, finding.mend
    for old_word, word in _WORDS:
        what, mend = what.replace(old_word, word), mend.replace(old_word, word)
    return Finding(at, what, finding.nearest, mend)


def as_v1alpha1(said: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Return a manifest that was read from components (`said`) as plain data with services. Replicas that were given
    stay given, also if they are the default: a number that scaling changed is then set back."""
    plain: dict[str, Any] = as_plain(manifest)
    for component in said["spec"]["components"]:
        if component.get("replicas") is not None:
            plain["spec"]["services"][component["name"]]["replicas"] = component["replicas"]
    return plain

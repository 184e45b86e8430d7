"""Defines a manifest as plain data: the deployment, its services and their rollouts. Containers are in `parts.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from holdfast.spec.manifest.fleet import REPLICAS_MAX, Fleet
from holdfast.spec.manifest.parts import (
    CLUSTER,
    NAME,
    EnvVar,
    ExtraPodSpec,
    MainContainer,
    Names,
    Probe,
    Refusals,
    Section,
    or_none,
)
from holdfast.spec.manifest.typed import ControlBlock, FrontendBlock, TypedSettings, WorkerBlock
from holdfast.spec.settings import about

API_VERSION, V1BETA1 = API_VERSIONS = ("nvidia.com/v1alpha1", "nvidia.com/v1beta1")
KIND = "DynamoGraphDeployment"
FRONTEND, PLANNER, WORKER = COMPONENT_TYPES = ("frontend", "planner", "worker")
ROLES = {FRONTEND: "frontend", PLANNER: "control", WORKER: "worker"}
PREFILL, DECODE = "prefill", "decode"
SERVICES_MAX = 25  # the limit of the CRD
SHADOWS_MAX = 8  # each is a whole engine, and one suffices to survive one crash

_WORD = (r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", "1 to 30 of a-z, 0-9 and '-', with no '-' at either end")
COUNT_FORM = (r"[0-9]{1,4}", 'a whole number, e.g. "1"')
_COUNT_OR_SHARE = (r"[0-9]{1,4}|(100|[0-9]{1,2})%", 'a whole number or a share, e.g. 1 or "25%"')
LOCK_FORM = (
    r"/.+|flock:///.+|lock\+unix:///.+|lock\+tcp://[^/]+:[0-9]+|etcd://[^/]+:[0-9]+/.+",
    "/path, flock:///path, lock+unix:///path, lock+tcp://host:port or etcd://host:port/key",
)
MODEL_FORM = (r"[^\x00-\x20\x7f][^\x00-\x1f\x7f]{0,199}", "1 to 200 characters without control characters")


class Limits(Section, frozen=True):
    gpu: Annotated[str, about("GPUs per replica; its engines share them.", like=COUNT_FORM, number=True)] = "0"

    idle: ClassVar[Names] = dict.fromkeys(("cpu", "memory", "gpuType", "custom"), CLUSTER)
    refused: ClassVar[Refusals] = {"nvidia.com/gpu": ("a service's GPUs are called gpu", "write gpu in its place")}


class Resources(Section, frozen=True):
    limits: Annotated[Limits, about("Resources of a replica.")] = Limits()

    idle: ClassVar[Names] = {"requests": "limits are read", "claims": "the plan makes its own claim"}


class Failover(Section, frozen=True):
    enabled: Annotated[bool, about("Run standby engines, with the memory in a vault.")]
    num_shadows: Annotated[int, about("Number of standby engines.", min=0, max=SHADOWS_MAX)] = 1
    lock: Annotated[
        str, about("Lock that elects the active engine (empty: a file shared within the pod).", like=or_none(LOCK_FORM))
    ] = ""

    idle: ClassVar[Names] = {"mode": "all engines of a failover group are in one pod"}


class Multinode(Section, frozen=True):
    node_count: Annotated[int, about("The number of machines that share one engine.", min=1, max=1000)]


class Rollout(Section, frozen=True):
    """Settings for replacing one set with the next; changing them does not start a rollout."""

    max_surge: Annotated[
        str,
        about("Extra replicas allowed during a rollout: a number or a percentage.", like=_COUNT_OR_SHARE, number=True),
    ] = "1"
    max_unavailable: Annotated[
        str,
        about(
            "Replicas that may be missing during a rollout: a number or a percentage.",
            like=_COUNT_OR_SHARE,
            number=True,
        ),
    ] = "0"
    progress_deadline_seconds: Annotated[
        int, about("Undo the rollout after this time without progress.", "s", min=1, max=86400)
    ] = 600
    error_percent_max: Annotated[
        int,
        about(
            "Undo the rollout if a larger share of the new set's requests fails, and more than elsewhere.",
            "%",
            min=0,
            max=100,
        ),
    ] = 5
    inexact: Annotated[
        bool, about("Let streams whose set was replaced continue on another set, flagged as inexact.")
    ] = False
    paused: Annotated[bool, about("Pause the rollout.")] = False


_LORA = ("LoRA adapters are not supported", "serve the merged model under a name of its own")
_DRAFT = ("draft models are not supported", "leave it out; every model decodes by itself")


_OTHER_TYPES = {
    **{kind: f"write componentType: worker and subComponentType: {kind}" for kind in (PREFILL, DECODE)},
    "epp": "leave it out; frontends choose workers themselves",
    "main": "say what it is",
}


class CanaryQuestion(Section, frozen=True):
    """A canary prompt of the worker's model (`spec.canaries.CanaryPrompt`)."""

    prompt: Annotated[str, about("Prompt as text.")] = ""
    prompt_tokens: Annotated[tuple[int, ...], about("Prompt as token ids, instead of prompt.")] = ()
    expected_tokens: Annotated[tuple[int, ...], about("Token ids that must be answered at temperature 0.")] = ()
    logprob_range: Annotated[
        tuple[float, ...], about("Lowest and highest log-probability allowed for each expected token (none: any).")
    ] = ()

    refused: ClassVar[Refusals] = {
        "expectedTopLogitRange": ("engines tell log-probabilities, and no logits", "give logprobRange"),
    }


class Service(Section, frozen=True):
    component_type: Annotated[
        str,
        about(
            "The type of the service: frontend, planner (runs control) or worker.",
            choices=COMPONENT_TYPES,
            mends=_OTHER_TYPES,
        ),
    ]
    sub_component_type: Annotated[str, about("Kind of worker, e.g. prefill or decode.", like=or_none(_WORD))] = ""
    replicas: Annotated[int, about("Number of replicas.", min=0, max=REPLICAS_MAX)] = 1
    model_name: Annotated[
        str, about("Model name that clients use (default: the model's own).", like=or_none(MODEL_FORM))
    ] = ""
    canary_prompts: Annotated[
        tuple[CanaryQuestion, ...], about("Known-answer prompts with which control checks the workers.")
    ] = ()
    resources: Annotated[Resources, about("Resources of each replica.")] = Resources()
    failover: Annotated[Failover, about("Standby engines of a worker.")] = Failover(enabled=False)
    multinode: Annotated[Multinode | None, about("Spread one engine over several machines.")] = None
    envs: Annotated[
        tuple[EnvVar, ...],
        about("Environment variables of its containers; they take precedence over the deployment's."),
    ] = ()
    env_from_secret: Annotated[str, about("Secret whose keys become environment variables.", like=or_none(NAME))] = ""
    liveness_probe: Annotated[Probe | None, about("Liveness probe, unless the container has its own.")] = None
    readiness_probe: Annotated[Probe | None, about("Readiness probe, unless the container has its own.")] = None
    worker: Annotated[WorkerBlock | None, about("Settings of a worker, instead of args.")] = None
    frontend: Annotated[FrontendBlock | None, about("Settings of a frontend, instead of args.")] = None
    control: Annotated[ControlBlock | None, about("Settings of a planner, instead of args.")] = None
    extra_pod_spec: Annotated[ExtraPodSpec, about("Container and pod settings.")] = ExtraPodSpec()
    rollout: Annotated[Rollout, about("How a new revision replaces the old one.")] = Rollout()
    fleet: Annotated[Fleet, about("Replicas, placement and scaling in a fleet.")] = Fleet()

    idle: ClassVar[Names] = {
        "dynamoNamespace": "its namespace is made of metadata.name and what it is",
        "annotations": "they are not read; surge and the like are in rollout",
        "labels": "they are not read",
        "serviceName": "its name is its key in spec.services",
        "gpuMemoryService": "a worker's memory is in a vault wherever failover is enabled",
        "modelRef": "modelName is read",
        "autoscaling": "replicas is read",
        "scalingAdapter": "replicas is read",
        "checkpoint": "engines start from their model",
        "minAvailable": "rollout.maxUnavailable is read",
        "runtimeVersionOverride": "an engine says itself what it is",
        **dict.fromkeys(("pvc", "volumeMounts"), "no volumes are made"),
        **dict.fromkeys(("ingress", "sharedMemory", "extraPodMetadata", "topologyConstraint"), CLUSTER),
        "providerOverride": CLUSTER,
    }
    refused: ClassVar[Refusals] = {
        "globalDynamoNamespace": (
            "a frontend serves its own deployment",
            "name the others in the spec.shares of the deployment whose frontend serves them",
        ),
        "eppConfig": ("there is no endpoint picker", "leave it out; frontends choose workers themselves"),
        "frontendSidecar": ("a worker's pod has no frontend in it", "make the frontend a service of its own"),
        **dict.fromkeys(("lora", "loras", "loraAdapters", "adapters", "loraModules"), _LORA),
        **dict.fromkeys(("draftModel", "draft", "speculative", "speculativeConfig", "specDec"), _DRAFT),
    }

    @property
    def container(self) -> MainContainer:
        return self.extra_pod_spec.main_container

    @property
    def role(self) -> str:
        """Return the command of its processes, which is the name of its typed settings, too."""
        return ROLES[self.component_type]

    @property
    def typed(self) -> TypedSettings | None:
        """Return its typed settings; None: its container has args."""
        return {"worker": self.worker, "frontend": self.frontend, "control": self.control}[self.role]

    @property
    def given(self) -> dict[str, Any]:
        """Return its typed settings by flag."""
        return self.typed.given if self.typed is not None else {}

    @property
    def gpus(self) -> int:
        return int(self.resources.limits.gpu)

    @property
    def component(self) -> str:
        """Return the component's name in addresses."""
        return self.component_type + (f"-{self.sub_component_type}" if self.sub_component_type else "")


# -- the whole manifest


class Spec(Section, frozen=True):
    services: Annotated[dict[str, Service], about("The mapping of services to run, by name.")]
    envs: Annotated[tuple[EnvVar, ...], about("Environment variables of every container.")] = ()
    shares: Annotated[tuple[str, ...], about("Other deployments whose workers this one's frontends serve, too.")] = ()

    idle: ClassVar[Names] = {
        "backendFramework": "a container's command says it",
        "pvcs": "no volumes are made",
        **dict.fromkeys(("annotations", "labels"), "they are not read"),
        **dict.fromkeys(("priorityClassName", "topologyConstraint", "providerOverride", "experimental"), CLUSTER),
    }
    refused: ClassVar[Refusals] = {
        "restart": ("it is an action, not a desired state", "change what should run, or use `holdfast rollout`"),
        "components": (f"that is {V1BETA1}", f"write them as services, or apiVersion: {V1BETA1}"),
    }


_SERVERS = "a cluster writes it"


class Metadata(Section, frozen=True):
    name: Annotated[str, about("The deployment's name.", like=NAME)]

    idle: ClassVar[Names] = {
        **dict.fromkeys(("labels", "annotations"), "they are not read"),
        "namespace": "a deployment is kept apart by its name",
        **dict.fromkeys(("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"), _SERVERS),
        **dict.fromkeys(("ownerReferences", "finalizers", "selfLink", "deletionTimestamp"), _SERVERS),
    }
    refused: ClassVar[Refusals] = {"generateName": ("a deployment has a name", "use name")}


_OTHER_KINDS = {"List": "one file is one manifest; `holdfast get NAME -o yaml` writes one"}


class Manifest(Section, frozen=True):
    api_version: Annotated[str, about("The version of the manifest format.", choices=API_VERSIONS)]
    kind: Annotated[str, about("The kind of the manifest.", choices=(KIND,), mends=_OTHER_KINDS)]
    metadata: Annotated[Metadata, about("The deployment's name.")]
    spec: Annotated[Spec, about("The desired state of the deployment.")]

    idle: ClassVar[Names] = {"status": _SERVERS}

    @property
    def name(self) -> str:
        return self.metadata.name

    def __str__(self) -> str:
        """Return the name in kubectl's form."""
        return f"{self.kind.lower()}.{self.api_version.partition('/')[0]}/{self.name}"

    def of_type(self, component_type: str) -> dict[str, Service]:
        return {name: one for name, one in self.spec.services.items() if one.component_type == component_type}

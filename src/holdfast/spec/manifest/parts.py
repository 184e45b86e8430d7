"""Defines the parts of a manifest that describe containers (variables, probes, commands), and the base of all parts.

Always true: every known field is read, accepted without effect (idle, with a warning), or refused; an unknown field is
an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from holdfast.spec.settings import Settings, about

NAME = (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "1 to 63 of a-z, 0-9 and '-', with no '-' at either end")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_.-]{0,254}", "letters, digits, '_', '.' and '-', and begin with no digit")
_PORT = (r"[1-9][0-9]{0,4}|[a-z]([a-z0-9-]{0,13}[a-z0-9])?", "a port's number or name, e.g. 8000 or system")
_ABSOLUTE = (r"/.*", "an absolute path")
POD_FIELDS = (
    *("metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "status.hostIP", "status.podIP"),
)
_LINE = (r"[^\x00-\x1f\x7f]*", "one line without control characters")

Names = Mapping[str, str]
Refusals = Mapping[str, tuple[str, str]]
GRACE_S = 60  # default time from SIGTERM to SIGKILL
CLUSTER = "only a cluster reads it, and none is run from here"


def or_none(like: tuple[str, str]) -> tuple[str, str]:
    """Return the pattern with the empty string allowed, which means not set."""
    return f"|{like[0]}", like[1]


class Section(Settings, frozen=True, rename="camel"):
    """A mapping in a manifest, where field names are in camelCase."""

    idle: ClassVar[Names] = {}  # fields accepted with a warning: name -> why it has no effect
    refused: ClassVar[Refusals] = {}  # fields refused: name -> what is wrong, and what to do


def as_plain(value: Any) -> Any:
    """Return a part in a manifest's form, without the fields that have their default."""
    if isinstance(value, Section):
        fields = ((one.encode_name, getattr(value, one.name), one.default) for one in _fields(type(value)))
        return {name: as_plain(own) for name, own, default in fields if own != default}
    if isinstance(value, dict):
        return {name: as_plain(own) for name, own in value.items()}
    return [as_plain(one) for one in value] if isinstance(value, tuple) else value


@functools.cache
def _fields(kind: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a section. Cached: it takes a millisecond, and every address needs those of ten sections."""
    return msgspec.structs.fields(kind)


class SecretKey(Section, frozen=True):
    name: Annotated[str, about("The secret's name.", like=NAME)]
    key: Annotated[str, about("The key in the secret.", like=_VARIABLE)]
    optional: Annotated[bool, about("Start without the variable if the secret or the key is missing.")] = False


class PodField(Section, frozen=True):
    field_path: Annotated[str, about("The path of the field, e.g. metadata.name or status.podIP.", choices=POD_FIELDS)]

    idle: ClassVar[Names] = {"apiVersion": "v1 is meant"}


class ValueFrom(Section, frozen=True):
    secret_key_ref: Annotated[SecretKey | None, about("Take the value from a key of a secret.")] = None
    field_ref: Annotated[PodField | None, about("Take the value from a field of the pod.")] = None

    refused: ClassVar[Refusals] = dict.fromkeys(
        ("configMapKeyRef", "resourceFieldRef", "fileKeyRef"),
        ("a variable's value comes from here, a secret or its pod", "write it as value, or use secretKeyRef"),
    )


class EnvVar(Section, frozen=True):
    name: Annotated[str, about("The variable's name.", like=_VARIABLE)]
    value: Annotated[str, about("Value of the variable.")] = ""
    value_from: Annotated[ValueFrom | None, about("Source of the value, instead of value.")] = None


class HttpGet(Section, frozen=True):
    port: Annotated[str, about("The port, by number or by name.", like=_PORT, number=True)]
    path: Annotated[str, about("Path to request.", like=_ABSOLUTE)] = "/"

    idle: ClassVar[Names] = {"scheme": "probes speak plain HTTP", "host": "a probe asks its own container"}
    refused: ClassVar[Refusals] = {"httpHeaders": ("probes send no headers", "leave it out")}


class Exec(Section, frozen=True):
    command: Annotated[tuple[str, ...], about("The command to run; exit status 0 is success.")]


class Probe(Section, frozen=True):
    http_get: Annotated[HttpGet | None, about("HTTP page that must answer 200.")] = None
    exec: Annotated[Exec | None, about("Command that must succeed.")] = None
    initial_delay_seconds: Annotated[int, about("Time before the first probe.", "s", min=0, max=86400)] = 0
    period_seconds: Annotated[int, about("Time between probes.", "s", min=1, max=3600)] = 10
    timeout_seconds: Annotated[int, about("Time limit for an answer.", "s", min=1, max=3600)] = 1
    failure_threshold: Annotated[
        int, about("Consecutive failures after which the probe counts as failed.", min=1, max=10000)
    ] = 3

    idle: ClassVar[Names] = {
        "successThreshold": "one answer is enough",
        "terminationGracePeriodSeconds": "extraPodSpec.terminationGracePeriodSeconds is read",
    }
    refused: ClassVar[Refusals] = dict.fromkeys(
        ("tcpSocket", "grpc"), ("an open port proves nothing", "ask with httpGet or exec")
    )


_RESTARTED = ("containers are always started again", "leave it out")


class MainContainer(Section, frozen=True):
    image: Annotated[
        str, about("Container image; `holdfast up -f` runs the installed version instead.", like=_LINE)
    ] = ""
    command: Annotated[
        tuple[str, ...], about("Command to run (none: `holdfast` with the component's own subcommand).")
    ] = ()
    args: Annotated[tuple[str, ...], about("Arguments of the command.")] = ()
    env: Annotated[tuple[EnvVar, ...], about("Environment variables; they take precedence over the service's.")] = ()
    working_dir: Annotated[str, about("Working directory.", like=or_none(_ABSOLUTE))] = ""
    startup_probe: Annotated[Probe | None, about("Until it succeeds, the other probes do not run.")] = None
    liveness_probe: Annotated[Probe | None, about("A container that fails it is restarted.")] = None
    readiness_probe: Annotated[Probe | None, about("A container that fails it is not ready.")] = None

    idle: ClassVar[Names] = {
        **dict.fromkeys(("imagePullPolicy", "securityContext", "terminationMessagePath"), CLUSTER),
        **dict.fromkeys(("terminationMessagePolicy", "volumeMounts", "volumeDevices", "resizePolicy"), CLUSTER),
        "name": "containers are named by the plan",
        "ports": "ports are named by the plan: http on a frontend, system on the others",
        "resources": "the service's resources are read",
        **dict.fromkeys(("stdin", "stdinOnce", "tty"), "a container here has no terminal"),
    }
    refused: ClassVar[Refusals] = {
        "envFrom": ("whole sources of variables are not read here", "name the secret in the service's envFromSecret"),
        "lifecycle": ("hooks are not run", "leave it out; a stop is SIGTERM and a time to finish"),
        **dict.fromkeys(("restartPolicy", "restartPolicyRules"), _RESTARTED),
    }


_POD_SPEC = """
activeDeadlineSeconds affinity automountServiceAccountToken dnsConfig dnsPolicy enableServiceLinks hostAliases hostIPC
hostNetwork hostPID hostUsers hostname hostnameOverride imagePullSecrets nodeName nodeSelector os overhead
preemptionPolicy priority priorityClassName readinessGates resourceClaims resources runtimeClassName schedulerName
schedulingGates schedulingGroup securityContext serviceAccount serviceAccountName setHostnameAsFQDN
shareProcessNamespace subdomain tolerations topologySpreadConstraints volumes
"""


class ExtraPodSpec(Section, frozen=True):
    main_container: Annotated[MainContainer, about("Container of the component.")] = MainContainer()
    termination_grace_period_seconds: Annotated[int, about("Time from SIGTERM to SIGKILL.", "s", min=0, max=86400)] = (
        GRACE_S
    )

    idle: ClassVar[Names] = dict.fromkeys(_POD_SPEC.split(), CLUSTER)
    refused: ClassVar[Refusals] = {
        **dict.fromkeys(
            ("containers", "initContainers", "ephemeralContainers"),
            ("a pod's containers are made by the plan", "describe the component's own in mainContainer"),
        ),
        "restartPolicy": _RESTARTED,
    }

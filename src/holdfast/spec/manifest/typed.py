"""Defines the typed settings of a service: its `worker`, `frontend` or `control` block in a manifest.

The fields of a block are the options of `holdfast run worker`, `frontend` and `control` (`spec.settings`), with the
same types, bounds and sentences; only the name is written otherwise: `--kv-gib` is `kvGib`. Options that the plan sets,
and those that have a place of their own in a manifest, are refused by name.

Always true: a field that is None (or, if it may be repeated, empty) was not given, so that a container's environment
and the defaults apply. The same settings give the same words, in whatever order they were written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from holdfast.spec.arguments import Options, kind_of, options_of, takes_many
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, WorkerLaunch
from holdfast.spec.manifest.parts import Refusals, Section
from holdfast.spec.settings import Setting, Settings, about, all_settings

# Options for a process's addresses and deployment: the plan sets them, not a container.
PLACED = frozenset({"--name", "--address", "--beat-address", "--status-address", "--advertise", "--store"}) | {
    *("--deployment", "--lock", "--lock-token-file", "--group", "--vault-socket", "--device", "--engine-id")
}
# What a command has without options. Frontends get host and port from the machine, so that no value is a default.
PATTERNS: Mapping[str, Settings] = {
    "worker": WorkerLaunch(source=""),
    "frontend": DeploymentSpec("", host="", port=0, frontend=FrontendLaunch()),
    "control": ControlLaunch(),
}
ENGINE = "--engine"
_ELSEWHERE = {
    "--served-name": ("the service's modelName says it", "write modelName, beside worker"),
    "--api-key": (
        "a manifest holds no secrets",
        "refer to one: envs: [{name: HOLDFAST_API_KEYS, valueFrom: {secretKeyRef: {name: NAME, key: KEY}}}]",
    ),
}
_PLANNED = ("is for the plan to say", "leave it out")


class TypedSettings(Section, frozen=True):
    """Base of the blocks."""

    @property
    def given(self) -> dict[str, Any]:
        """Return the given values by flag, in the order of the options."""
        values = ((f"--{name.replace('_', '-')}", getattr(self, name)) for name in self.__struct_fields__)
        return {flag: value for flag, value in values if value not in (None, ())}


def manifest_name(flag: str) -> str:
    """Return the name of an option in a manifest."""
    first, *others = flag.removeprefix("--").split("-")
    return first + "".join(map(str.capitalize, others))


def _options(role: str) -> dict[str, Setting]:
    return options_of(PATTERNS[role], role, own=False)


OPTIONS: Mapping[str, Options] = {role: _options(role) for role in PATTERNS}


def _block(name: str, role: str) -> type[TypedSettings]:
    options = OPTIONS[role]
    refused: Refusals = {
        manifest_name(flag): _ELSEWHERE.get(flag, _PLANNED)
        for flag in options
        if flag in PLACED or flag in _ELSEWHERE
    }
    fields = [
        (flag.removeprefix("--").replace("-", "_"), *_field(one))
        for flag, one in options.items()
        if manifest_name(flag) not in refused
    ]
    made = msgspec.defstruct(
        name, fields, bases=(TypedSettings,), module=__name__, namespace={"refused": refused}, frozen=True
    )
    assert issubclass(made, TypedSettings)
    return made


def _field(one: Setting) -> tuple[Any, Any]:
    """Return the type and the default of an option's field."""
    described = about(one.sentence, one.unit, **one.extra)
    return (Annotated[one.type, described], ()) if takes_many(one) else (Annotated[one.type | None, described], None)


if TYPE_CHECKING:
    WorkerBlock = TypedSettings
    FrontendBlock = TypedSettings
    ControlBlock = TypedSettings
else:
    WorkerBlock = _block("WorkerBlock", "worker")
    FrontendBlock = _block("FrontendBlock", "frontend")
    ControlBlock = _block("ControlBlock", "control")


B = TypeVar("B", bound=TypedSettings)


def block_from(kind: type[B], role: str, settings: Settings) -> B:
    """Return the block for a process's settings: what differs from the defaults, and always the engine."""
    values = {one.path: one.default for one in all_settings(settings)}
    own = {flag.removeprefix("--").replace("-", "_"): one for flag, one in OPTIONS[role].items()}
    differing = {
        name: values[own[name].path]
        for name in kind.__struct_fields__
        if values[own[name].path] != own[name].default or f"--{name}" == ENGINE
    }
    return kind(**differing)


def words_of(role: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments that mean the same for `holdfast run ROLE`; values that equal the default are left out. The
    hash of a set is made of them, so that their form must not change."""
    options = OPTIONS[role]
    words = [ENGINE, given.get(ENGINE, options[ENGINE].default)] if ENGINE in options else []
    for flag, one in options.items():
        value = given.get(flag, one.default)
        if flag == ENGINE or value == one.default:
            continue
        if kind_of(one) is bool:
            on, _, off = one.flag.partition("/")
            words.append(on if value or not off else off)
        else:
            words += [f"{flag}={_number(each)}" for each in (value if takes_many(one) else (value,))]
    return tuple(words)


def _number(value: Any) -> Any:
    """Return a float as short as it can be written without becoming another."""
    short = f"{value:g}" if isinstance(value, float) else value
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def in_manifest_names(text: str, role: str) -> str:
    """Return an error about options in the words of a manifest."""
    return re.sub(
        r"--[a-z][a-z-]*[a-z]", lambda found: manifest_name(found[0]) if found[0] in OPTIONS[role] else found[0], text
    )

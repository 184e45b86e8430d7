"""Secrets of a manifest: which values its containers refer to, and the names under which their hashes are kept. Pure.

A reference is written `SECRET/KEY`, or `$VARIABLE` for a variable that containers inherit from the environment of
`holdfast up`. A revision holds the hash of the value of each reference, so that another value is another set and rolls
out like any change; the values stay on the machine that runs the deployment (`supervise.secrets`).

Always true: a container whose required secret is missing is refused, never started without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import Refused
from holdfast.spec.manifest.pod import Container, Variable
from holdfast.spec.manifest.rules import PLANNED, variables_in
from holdfast.spec.manifest.types import FRONTEND, PLANNER, WORKER, Manifest, Service

Digests = Mapping[str, str]  # hash of a value, by its reference

# Variables that guard something and that containers inherit, by the types of component that read them.
INHERITED = {"HOLDFAST_API_KEYS": (FRONTEND,), "HOLDFAST_ENGINE_TOKEN": (WORKER, PLANNER)}


class SecretSource(Protocol):
    """Where the values of secrets are looked for on this machine."""

    @property
    def directory(self) -> str:
        """The directory with one folder per secret and one file per key."""

    def read(self, secret: str, key: str) -> str | None:
        """Return the value in the secret's file for the key; None: there is no such file."""

    def keys(self, secret: str) -> tuple[str, ...] | None:
        """Return the keys of the secret; None: there is no such folder."""

    def last(self, reference: str) -> str | None:
        """Return the value that the deployment was last asked for with; None: none is known."""

    def kept(self, digest: str) -> str | None:
        """Return the value with this hash; None: it is not kept here."""


def reference(secret: str, key: str) -> str:
    return f"{secret}/{key}"


def inherited(variable: str) -> str:
    return f"${variable}"


def refers(manifest: Manifest) -> bool:
    """Return whether a container of the manifest refers to a secret."""
    variables = (one.value_from for _, one in variables_in(manifest))
    return any(one is not None and one.secret_key_ref is not None for one in variables) or any(
        service.env_from_secret for service in manifest.spec.services.values()
    )


def keys_in(secret: str, digests: Digests) -> tuple[str, ...]:
    """Return the keys of the secret that are among the references."""
    return tuple(one.removeprefix(f"{secret}/") for one in digests if one.startswith(f"{secret}/"))


def digests_of(service: Service, names: Mapping[str, tuple[str, str]], digests: Digests) -> dict[str, str]:
    """Return the hashes that concern one service. `names`: by variable, the secret and key that it refers to, or two
    empty strings where the manifest writes its value."""
    wanted = {reference(*one) for one in names.values() if one[0]}
    given = set(names)
    if service.env_from_secret:
        keys = keys_in(service.env_from_secret, digests)
        wanted |= {reference(service.env_from_secret, key) for key in keys}
        given |= set(keys)
    wanted |= {
        inherited(name) for name, types in INHERITED.items() if service.component_type in types and name not in given
    }
    return {one: digests[one] for one in sorted(wanted) if one in digests}


def values_of(manifest: Manifest, source: SecretSource, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the value of every reference of the manifest that is found on this machine."""
    found: dict[str, str] = {}
    for one, variable, secret, key in _references(manifest, source):
        value = value_of(source, environ, secret, key, variable)
        if value is not None:
            found[one] = value
    return found


def value_of(
    source: SecretSource, environ: Mapping[str, str], secret: str, key: str, variable: str
) -> str | None:
    """Return a value as it is now: the secret's file, else the variable of `holdfast up`, else what the deployment was
    last asked for with."""
    if secret and (value := source.read(secret, key)) is not None:
        return value
    if variable and variable in environ:
        return environ[variable]
    return source.last(reference(secret, key) if secret else inherited(variable))


def _references(manifest: Manifest, source: SecretSource) -> Iterator[tuple[str, str, str, str]]:
    """Yield reference, variable, secret and key of every value that a container of the manifest may refer to."""
    for _, variable in variables_in(manifest):
        ref = variable.value_from.secret_key_ref if variable.value_from is not None else None
        if ref is not None:
            yield reference(ref.name, ref.key), variable.name, ref.name, ref.key
    for service in manifest.spec.services.values():
        secret = service.env_from_secret
        for key in _keys_now(source, secret) if secret else ():
            if key not in PLANNED:
                yield reference(secret, key), "", secret, key
    for name in INHERITED:
        yield inherited(name), name, "", ""


def _keys_now(source: SecretSource, secret: str) -> tuple[str, ...]:
    """Return the keys of a whole secret. A variable that guards something stays with its last value when its file is
    gone (it may be in the middle of a rotation): only another manifest takes the guard away."""
    keys = source.keys(secret)
    if keys is None:
        return ()  # refused where the container is made
    guards = (name for name in INHERITED if name not in keys and source.last(reference(secret, name)) is not None)
    return (*keys, *guards)


@dataclass(frozen=True, slots=True)
class SecretValues:
    """The environment that a manifest gives one container on this machine, with the values of its secrets."""

    container: Container
    source: SecretSource | None  # None: the container is started elsewhere, and its secrets looked for there
    environ: Mapping[str, str]  # of `holdfast up`
    state_dir: Path

    def variables(self) -> dict[str, str]:
        """Return what the manifest puts into the container's environment; Refused names a secret that is missing. What
        a pod would say of itself is in the starter's environment, or nowhere."""
        said = self._whole_secret(self.container.env_from_secret) if self.container.env_from_secret else {}
        for variable in self.container.env:
            if variable.secret:
                value = self._value(variable.secret, variable.key, variable.name)
                if value is not None:
                    said[variable.name] = value
                elif self.source is not None and not variable.optional:
                    raise Refused(self._missing(variable))
            elif not variable.field:
                said[variable.name] = variable.value
        return said

    def inherited(self) -> dict[str, str]:
        """Return the variables of `holdfast up` that the container's set was asked for with."""
        known = [(one, digest) for one, digest in self.container.digests if one.startswith("$")]
        return {one.removeprefix("$"): self._kept(one, digest) for one, digest in known}

    def _whole_secret(self, secret: str) -> dict[str, str]:
        """Return all keys of a secret with their values, by variable."""
        if self.source is None:
            return {}
        keys = keys_in(secret, dict(self.container.digests)) or self.source.keys(secret)
        if keys is None:
            folder = f"{self.source.directory}/{secret}"
            raise Refused(f"envFromSecret: the secret {secret!r} is missing: make {folder} with one file per key")
        values = {key: self._value(secret, key, "") for key in keys if key not in PLANNED}
        return {key: value for key, value in values.items() if value is not None}

    def _value(self, secret: str, key: str, variable: str) -> str | None:
        if self.source is None:
            return None
        one, digests = reference(secret, key), dict(self.container.digests)
        if one in digests:
            return self._kept(one, digests[one])
        return value_of(self.source, self.environ, secret, key, variable)

    def _kept(self, one: str, digest: str) -> str:
        value = self.source.kept(digest) if self.source is not None else None
        if value is None:
            what = f"the value of {one} that this set was asked for with is not kept in {self.state_dir}"
            raise Refused(f"{what}; `holdfast apply -f FILE` asks again, with the value of now")
        return value

    def _missing(self, variable: Variable) -> str:
        assert self.source is not None
        where = f"the file {self.source.directory}/{variable.secret}/{variable.key}"
        return (
            f"{variable.name} needs the key {variable.key!r} of the secret {variable.secret!r}, and it is missing: "
            f"looked for {where} and for the variable {variable.name} in the environment of this command; "
            "write the file, set the variable, or say optional: true to start without it"
        )

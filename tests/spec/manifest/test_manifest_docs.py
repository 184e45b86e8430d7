"""docs/manifest.md lists every field as the structs have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from holdfast.spec.manifest.parts import EnvVar, Probe, Section
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.manifest.v1beta1 import ComponentsManifest
from holdfast.spec.settings import Setting, fields_of

DOCS = Path(__file__).parents[3] / "docs" / "manifest.md"


def inner(kind: Any) -> type[Section] | None:
    """The struct that a field is, or has several of."""
    for one in (kind, *(one for one in get_args(kind) if one is not NoneType)):
        if isinstance(one, type) and issubclass(one, Section):
            return one
    return None


def lines(kind: type[Section], path: str) -> Iterator[str]:
    """A line for every field; of structs that are met again (variables, probes) only their own."""
    for setting, one in zip(fields_of(kind), msgspec.structs.fields(kind), strict=True):
        name, part = path + one.encode_name, inner(setting.type)
        if part is None:
            yield f"| `{name}` | {default(setting)} | {setting.sentence} |"
        elif part.__name__ in ("EnvVar", "Probe"):
            yield f"| `{name}` | | {setting.sentence} |"
        else:
            step = {dict: ".NAME", tuple: "[]"}.get(get_origin(setting.type), "")  # type: ignore[call-overload]
            yield from lines(part, f"{name}{step}.")


def default(setting: Setting) -> str:
    value = setting.default
    if value is msgspec.NODEFAULT:
        return "needed"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value not in ("", (), None) else ""


def everything() -> set[str]:
    return {*lines(Manifest, "."), *lines(EnvVar, "VARIABLE."), *lines(Probe, "PROBE.")}


def parts(kind: type[Section]) -> Iterator[type[Section]]:
    yield kind
    for setting in fields_of(kind):
        if (part := inner(setting.type)) is not None:
            yield from parts(part)


def test_every_field_is_listed_as_it_is() -> None:
    """With its default and its sentence; and no field that is not there."""
    listed = {line for line in DOCS.read_text().splitlines() if line.startswith(("| `.", "| `VARIABLE", "| `PROBE"))}
    assert listed == everything(), "\n".join(sorted(everything() - listed))


def test_every_field_of_components_is_named() -> None:
    """The table of v1beta1 has each field that services do not have."""
    text = DOCS.read_text().partition("## Components")[2].partition("\n## ")[0]
    old, new = (
        {one.encode_name for part in parts(kind) for one in msgspec.structs.fields(part)}
        for kind in (Manifest, ComponentsManifest)
    )
    assert sorted(name for name in new - old if name not in text) == []


def test_every_idle_and_refused_field_is_named() -> None:
    """Who has such a field in a manifest finds it by its name."""
    text = DOCS.read_text()
    both = (*parts(Manifest), *parts(ComponentsManifest))
    names = {name for part in both for name in (*part.idle, *part.refused)}
    assert sorted(name for name in names if f"`{name}`" not in text) == []

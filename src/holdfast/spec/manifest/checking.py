"""Checks a manifest's text: returns the manifest or all problems, and warnings for fields without effect.

Always true: a struct is made only if all its fields are valid; every field is checked, even if others are invalid.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from holdfast.spec.arguments import nearest
from holdfast.spec.manifest.parts import Section
from holdfast.spec.manifest.rules import OF_ALL, OF_EACH, WARNINGS, Finding, Rules
from holdfast.spec.manifest.types import API_VERSION, API_VERSIONS, KIND, V1BETA1, Manifest, Metadata, Service, Spec
from holdfast.spec.manifest.v1beta1 import Component, ComponentsManifest, as_v1alpha1, components_wrong, in_file
from holdfast.spec.manifest.yaml_text import SHOWN_MAX, Problem, YamlNode, in_order, in_yaml, inside, plain, read
from holdfast.spec.settings import Setting, fields_of

P = TypeVar("P", bound=Section)
KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"} | {
    tuple: "a list",
    dict: "a mapping",
}


class Shaper:
    """Makes structs from a tree, by their fields, and collects problems and warnings."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def part(self, kind: type[P], node: YamlNode, path: str) -> P | None:
        """Return the struct for a mapping; None if something in it is wrong."""
        if not isinstance(node.value, dict):
            self._wrong(node, path, dict)
            return None
        before = len(self.problems)
        fields = fields_by_name(kind)
        said: dict[str, Any] = {}
        for name, inner in node.value.items():
            if name not in fields:
                self._not_read(kind, name, inner, path)
        for name, setting in fields.items():
            own = node.value.get(name)
            if own is not None and own.value is not None:
                said[setting.name] = self._value(setting, setting.type, own, inside(path, name))
            elif setting.default is msgspec.NODEFAULT:
                self._tell(node, inside(path, name), "is missing", mend=f"it is {_example(setting)}")
        return kind(**said) if len(self.problems) == before else None

    def _not_read(self, kind: type[Section], name: str, node: YamlNode, path: str) -> None:
        if name in kind.idle:
            if node.value not in (None, (), {}):
                self.warnings.append(Problem(node.line, inside(path, name), f"does nothing here: {kind.idle[name]}"))
        elif name in kind.refused:
            what, mend = kind.refused[name]
            if node.value is not None:  # null counts as not written, for every field
                self._tell(node, inside(path, name), what, mend=mend)
        else:
            known = fields_by_name(kind)
            is_shown = len(self.problems) <= SHOWN_MAX  # further ones are only counted
            meant = nearest(name, known) or nearest(name, kind.idle) if is_shown else ""
            mend = "" if meant else f"there are {', '.join(sorted(known))}"
            self._tell(node, inside(path, name), "there is no such field", meant=meant, mend=mend)

    def _value(self, setting: Setting, kind: Any, node: YamlNode, path: str) -> Any:
        if isinstance(kind, UnionType):
            kind = next(one for one in get_args(kind) if one is not NoneType)
        if get_origin(kind) is tuple:
            return self._list(setting, get_args(kind)[0], node, path)
        if get_origin(kind) is dict:
            return self._by_name(get_args(kind)[1], node, path)
        if issubclass(kind, Section):
            return self.part(kind, node, path)
        return self._scalar(setting, kind, node, path)

    def _list(self, setting: Setting, kind: Any, node: YamlNode, path: str) -> Any:
        if not isinstance(node.value, tuple):
            self._wrong(node, path, tuple)
            return None
        return tuple(self._value(setting, kind, one, f"{path}[{index}]") for index, one in enumerate(node.value))

    def _by_name(self, kind: type[Section], node: YamlNode, path: str) -> Any:
        if not isinstance(node.value, dict):
            self._wrong(node, path, dict)
            return None
        return {name: self.part(kind, one, inside(path, name)) for name, one in node.value.items()}

    def _scalar(self, setting: Setting, kind: type, node: YamlNode, path: str) -> Any:
        value = node.value
        if setting.extra.get("number") and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self._wrong(node, path, kind)
            return None
        if wrong := setting.wrong(value):
            choices = setting.extra.get("choices", ())
            wrong = choices[0] if len(choices) == 1 else wrong
            mend = setting.extra.get("mends", {}).get(value, "")
            meant = nearest(str(value), choices) if len(choices) > 1 and not mend else ""
            self._tell(node, path, f"must be {wrong}, got {shown(node)}", meant=meant, mend=mend)
        return value

    def _wrong(self, node: YamlNode, path: str, kind: type) -> None:
        mend = ""
        if kind is str and isinstance(node.value, int | float):  # includes true and false
            mend = "quote it"
        elif kind in (int, float, bool) and isinstance(node.value, str):
            is_number = node.value.isascii() and node.value.lstrip("-").isdecimal()
            mend = "write it without quotes" if is_number or kind is bool else ""
        elif kind is tuple and isinstance(node.value, str):
            mend = f"write it as [{', '.join(node.value.split())}]" if len(node.value) < 40 else "begin it with '- '"
        self._tell(node, path, f"must be {KINDS[kind]}, got {shown(node)}", mend=mend)

    def _tell(self, node: YamlNode, path: str, what: str, *, meant: str = "", mend: str = "") -> None:
        self.problems.append(Problem(node.line, path, what, meant, mend))


@functools.cache
def fields_by_name(kind: type[Section]) -> dict[str, Setting]:
    """Return a struct's fields by their names in a manifest."""
    written = (one.encode_name for one in msgspec.structs.fields(kind))
    return dict(zip(written, fields_of(kind), strict=True))


def shown(node: YamlNode) -> str:
    match node.value:
        case dict():
            return "a mapping"
        case tuple():
            return "a list"
        case None:
            return "nothing"
        case bool() as value:
            return str(value).lower()
        case str() as value:
            return repr(value if len(value) <= 60 else f"{value[:60]}…")
        case value:
            return str(value)


def _example(setting: Setting) -> str:
    """Return a description of a missing field's value."""
    *others, last = setting.extra.get("choices", ("",))
    choices = f"{', '.join(others)} or {last}" if others else last
    if setting.type is bool:
        return KINDS[bool]
    return choices or setting.sentence[:1].lower() + setting.sentence[1:-1]


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check: the manifest, or None and all `problems`, in the order of lines."""

    manifest: Manifest | None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def check(data: bytes, more: Rules = (), hints: Rules = ()) -> Checked:
    """Check a file's bytes. `more` and `hints` are further rules, for errors and for warnings, of the machine or fleet
    that will run it."""
    root, problems = read(data)
    if root is None:
        return Checked(None, in_order(problems))
    shaper = Shaper()
    names = _components(root)
    manifest = shaper.part(Manifest, root, "") if names is None else _from_components(shaper, root, names)
    unreadable = {(problem.line, problem.path) for problem in problems}
    problems += [problem for problem in shaper.problems if (problem.line, problem.path) not in unreadable]
    if _is_another(root):
        return Checked(None, in_order(one for one in problems if one.path in ("apiVersion", "kind")))
    warnings = shaper.warnings
    problems += _problems_by(root, names, OF_EACH, manifest or _whole_services(root, names))
    if manifest is not None:
        problems += _problems_by(root, names, OF_ALL, manifest)
        problems += _problems_by(root, names, more, manifest) if not problems else []
        warnings += _problems_by(root, names, WARNINGS + hints, manifest)
    return Checked(None if problems else manifest, in_order(problems), in_order(warnings))


def _is_another(root: YamlNode) -> bool:
    """Return True if both kind and API version are others, so that no field could be right."""
    said = root.value if isinstance(root.value, dict) else {}
    known = {"apiVersion": API_VERSIONS, "kind": (KIND,)}
    return all(name in said and said[name].value not in (None, *meant) for name, meant in known.items())


def text_of(data: bytes, manifest: Manifest) -> str:
    """Return the text to store of a checked file: its own, or for components the same manifest with services."""
    said = plain(data.decode())
    return in_yaml(as_v1alpha1(said, manifest)) if said["apiVersion"] == V1BETA1 else data.decode()


def _components(root: YamlNode) -> list[str] | None:
    """Return the names of the components of a v1beta1 manifest, in their order; None: it is of the other version."""
    if _inner(root, "apiVersion").value != V1BETA1:
        return None
    nodes = _inner(root, "spec", "components").value
    return [str(_inner(one, "name").value) for one in nodes] if isinstance(nodes, tuple) else []


def _from_components(shaper: Shaper, root: YamlNode, names: list[str]) -> Manifest | None:
    found = shaper.part(ComponentsManifest, root, "")
    if found is None:
        return None
    wrong = list(components_wrong(found.spec.components))
    shaper.problems += [_placed(root, in_file(finding, names)) for finding in wrong]
    return found.manifest if not wrong else None


def _inner(node: YamlNode, *steps: str) -> YamlNode:
    for step in steps:
        inner = node.value.get(step) if isinstance(node.value, dict) else None
        node = inner or YamlNode(None, node.line)
    return node


def _whole_services(root: YamlNode, names: list[str] | None) -> Manifest:
    """Return a manifest of the valid services, so that the rules between their fields are checked as well."""
    services: dict[str, Service] = {}
    if names is None:
        node = _inner(root, "spec", "services").value
        for name, one in node.items() if isinstance(node, dict) else ():
            if (service := Shaper().part(Service, one, "")) is not None:
                services[name] = service
    else:
        nodes = _inner(root, "spec", "components").value
        for one in nodes if isinstance(nodes, tuple) else ():
            if (component := Shaper().part(Component, one, "")) is not None:
                services[component.name] = component.service
    return Manifest(API_VERSION, KIND, Metadata("x"), Spec(services))


def _problems_by(root: YamlNode, names: list[str] | None, rules: Rules, manifest: Manifest) -> list[Problem]:
    found = (finding for rule in rules for finding in rule(manifest))
    return [_placed(root, finding if names is None else in_file(finding, names)) for finding in found]


def _placed(root: YamlNode, finding: Finding) -> Problem:
    """Return a finding with its path and line; for a missing field, the line of the mapping or list that should contain
    it."""
    path, line, node = "", root.line, root
    for step in finding.at:
        path = inside(path, step) if isinstance(step, str) else f"{path}[{step}]"
        inner = node.value
        if isinstance(inner, dict) and step in inner:
            node = inner[str(step)]
            line = node.line
        elif isinstance(inner, tuple) and isinstance(step, int) and step < len(inner):
            node = inner[step]
            line = node.line
        else:
            node = YamlNode(None, line)
    return Problem(line, path, finding.what, finding.nearest, finding.mend)

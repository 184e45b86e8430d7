"""A manifest's text, looked at whole: the manifest, or all that is wrong with it; and what does nothing in it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spec.manifest.problems import Problem, in_order, inside
from holdfast.spec.manifest.reading import Node, read
from holdfast.spec.manifest.rules import OF_ALL, OF_EACH, WARNINGS, Finding, Rules
from holdfast.spec.manifest.shaping import Shaper
from holdfast.spec.manifest.types import API_VERSION, KIND, Manifest, Metadata, Service, Spec


@dataclass(frozen=True, slots=True)
class Checked:
    """No manifest: `problems` says why, all of it, in the order of lines."""

    manifest: Manifest | None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def check(data: bytes, more: Rules = (), hints: Rules = ()) -> Checked:
    """Look at a file's bytes; `more` and `hints`: what is refused, or warned about, where it is to run."""
    root, problems = read(data)
    if root is None:
        return Checked(None, in_order(problems))
    shaper = Shaper()
    manifest = shaper.part(Manifest, root, "")
    unreadable = {(problem.line, problem.path) for problem in problems}
    problems += [problem for problem in shaper.problems if (problem.line, problem.path) not in unreadable]
    if _is_another(root):
        return Checked(None, in_order(one for one in problems if one.path in ("apiVersion", "kind")))
    warnings = shaper.warnings
    problems += _told(root, OF_EACH, manifest or _whole_services(root))
    if manifest is not None:
        problems += _told(root, OF_ALL, manifest)
        problems += _told(root, more, manifest) if not problems else []
        warnings += _told(root, WARNINGS + hints, manifest)
    return Checked(None if problems else manifest, in_order(problems), in_order(warnings))


def _is_another(root: Node) -> bool:
    """Whether it is something else altogether, of which no field would be right."""
    said = root.value if isinstance(root.value, dict) else {}
    known = {"apiVersion": API_VERSION, "kind": KIND}
    return all(name in said and said[name].value not in (None, meant) for name, meant in known.items())


def _whole_services(root: Node) -> Manifest:
    """Of a manifest with mistakes the services that have none: what is wrong between their fields is told as well."""
    node = root
    for step in ("spec", "services"):
        inner = node.value.get(step) if isinstance(node.value, dict) else None
        node = inner or Node(None, root.line)
    named = node.value.items() if isinstance(node.value, dict) else ()
    shaped = {name: Shaper().part(Service, one, "") for name, one in named}
    services = {name: service for name, service in shaped.items() if service is not None}
    return Manifest(API_VERSION, KIND, Metadata("x"), Spec(services))


def _told(root: Node, rules: Rules, manifest: Manifest) -> list[Problem]:
    return [_placed(root, finding) for rule in rules for finding in rule(manifest)]


def _placed(root: Node, finding: Finding) -> Problem:
    """With its path, and the line of it, or of what it should have been in."""
    path, line, node = "", root.line, root
    for step in finding.at:
        path = inside(path, step) if isinstance(step, str) else f"{path}[{step}]"
        inner = node.value
        if isinstance(inner, dict) and step in inner:
            node = inner[str(step)]
            line = node.line
        elif isinstance(inner, tuple) and isinstance(step, int):
            node = inner[step]
            line = node.line
        else:
            node = Node(None, line)
    return Problem(line, path, finding.what, finding.nearest, finding.mend)

"""Manifests for tests: a right one, and others that differ from it in one place."""

from __future__ import annotations

import textwrap
from typing import Any

from holdfast.spec.arguments import kind_of, takes_many
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.settings import Setting

RIGHT = """\
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata:
  name: chat
spec:
  services:
    Frontend:
      componentType: frontend
    Worker:
      componentType: worker
      resources: {limits: {gpu: "1"}}
"""
WORKER_LINE = 9  # of RIGHT: where its worker begins
END_LINE = 12  # where what is added to the worker begins


def worker(text: str) -> str:
    """Return RIGHT with these fields in its worker."""
    return RIGHT + textwrap.indent(textwrap.dedent(text).strip("\n"), " " * 6) + "\n"


def accepted(text: str) -> Manifest:
    found = check(text.encode())
    assert found.manifest is not None, "\n".join(map(str, found.problems))
    return found.manifest


def problems(text: str) -> list[str]:
    return [str(problem) for problem in check(text.encode()).problems]


def warnings(text: str) -> list[str]:
    return [str(warning) for warning in check(text.encode()).warnings]


def another(option: Setting) -> Any:
    """Return a value of an option that is not its default."""
    if choices := option.extra.get("choices"):
        return next(one for one in choices if one != option.default)
    if takes_many(option):
        return (7,) if kind_of(option) is int else ("--a b", "c")
    kinds = {bool: not option.default, str: "x", int: 7, float: 0.125}
    return kinds[kind_of(option)]

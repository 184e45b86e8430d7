"""Manifests for tests: a right one, and others that differ from it in one place."""

from __future__ import annotations

import textwrap

from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.types import Manifest

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

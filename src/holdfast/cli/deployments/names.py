"""How a person says which deployment is meant: by its name, with its kind before it or without, as kubectl has both.

Always true: a name with another kind before it means nothing here, so that nobody deletes a deployment who wrote of a
pod.
"""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about

_WHOLE = ("dynamographdeployment", "dynamographdeployments")
KINDS = ("dgd", *_WHOLE, *(f"{one}.nvidia.com" for one in _WHOLE), "deployment", "deployments", "deploy")
PROCESSES = ("pods", "pod", "po", "all", "services", "service", "svc")  # what `holdfast status` shows

Name = Annotated[
    str,
    about("Deployment name; optional if there is only one.", positional=True, flag="NAME", kinds=KINDS),
]


def bare(name: str) -> str:
    """Without the kind before it. UsageError, if that is another's."""
    kind, slash, name = name.rpartition("/")
    if slash and kind.lower() not in KINDS:
        raise UsageError(f"there are only deployments here, and no {kind}: write dgd/{name}, or {name}")
    return name

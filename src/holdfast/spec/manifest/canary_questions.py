"""Known questions of a manifest's worker (`canaryPrompts`), as the worker takes them (`spec.canaries`). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from holdfast.spec.canaries import PROMPTS_MAX, CanaryPrompt
from holdfast.spec.manifest.types import WORKER, CanaryQuestion, Service

NAMES = {one.name: one.encode_name for one in structs.fields(CanaryQuestion)}  # of fields, as manifests write them


def asked_of(service: Service) -> tuple[CanaryPrompt, ...]:
    """Return the known questions of a service."""
    return tuple(CanaryPrompt(**structs.asdict(one)) for one in service.canary_prompts)


def problems(service: Service) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield where in `canaryPrompts` something cannot be, and what is wrong with it."""
    asked = asked_of(service)
    if asked and service.component_type != WORKER:
        yield (), f"only workers are asked known questions, and this is a {service.component_type}; leave it out"
    if len(asked) > PROMPTS_MAX:
        yield (), f"must be {PROMPTS_MAX} or fewer, got {len(asked)}"
    for place, one in enumerate(asked):
        if (wrong := one.problem()) is not None:
            yield (place, NAMES[wrong[0]]), wrong[1]

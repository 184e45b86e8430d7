"""What frontends do while nobody can serve: who waits how long, and which models are known all the same."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about

_ALL = ("up", "frontend")


class HoldSettings(Settings, frozen=True):
    """What happens while a set has no worker, or all are full."""

    hold_s: Annotated[float, about("How long streams wait for a worker.", "s", min=0, commands=_ALL)] = 30.0
    # Twice what the slowest engine measured takes to stand by again (stock vLLM with an 8B on an H200: 35-53 s).
    loading_s: Annotated[
        float,
        about(
            "How much longer streams wait while an engine of their set is loading, at most.", "s", min=0, commands=_ALL
        ),
    ] = 120.0
    # As long as a large model may take from a disk onto a device that others have to leave first.
    provision_s: Annotated[
        float,
        about(
            "How long streams wait for a worker of a model that is brought up when it is asked for.",
            "s",
            min=0,
            commands=_ALL,
        ),
    ] = 600.0
    # Longer than a rollout may stand still (`progressDeadlineSeconds`) before it is undone.
    away_s: Annotated[
        float,
        about(
            "How long streams wait beyond --hold-s: for the end of a rollout that took their workers away, and for a "
            "store that is away to return.",
            "s",
            min=0,
        ),
    ] = 900.0
    # About as long as a client waits before it gives up; an engine's queue is as long as its batch.
    queue_s: Annotated[
        float,
        about(
            "How long new requests wait for a place in a batch, in the frontend's line and in the engine's queue "
            "together; then they are refused (429).",
            "s",
            min=0,
            commands=_ALL,
        ),
    ] = 30.0
    fresh_max: Annotated[
        int, about("New requests that may wait at once, per set; streams under way always may.", min=0)
    ] = 1024
    shed_retry_s: Annotated[
        float, about("When requests that are shed are told to come back.", "s", min=1, commands=_ALL)
    ] = 30.0
    stand_in_after_s: Annotated[
        float,
        about(
            "How long a set must be gone before one with the same tokenizer takes over, flagged inexact.", "s", min=0
        ),
    ] = 10.0


class KnownSettings(Settings, frozen=True):
    """Which models are known though no worker of theirs is there."""

    models: Annotated[
        tuple[str, ...],
        about(
            "A model that will have workers: until then it is answered 503, not 404; may be repeated.",
            flag="--expect-model",
            commands=("frontend",),
        ),
    ] = ()
    fleet: Annotated[
        bool,
        about(
            "Models come when they are asked for, and those that are not wanted do not exist.", commands=("frontend",)
        ),
    ] = False
    known_s: Annotated[
        float,
        about("How long a model whose last worker went is answered 503, not 404.", "s", min=0, commands=_ALL),
    ] = 3600.0

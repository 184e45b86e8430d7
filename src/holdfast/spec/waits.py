"""What frontends do while nobody can serve: who waits how long, and which models are known all the same."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about

_ALL = ("up", "frontend")


class HoldSettings(Settings, frozen=True):
    """What happens while a set has no worker, or all are full."""

    hold_s: Annotated[
        float, about("Time that streams and requests wait for a worker if there is none.", "s", min=0, commands=_ALL)
    ] = 30.0
    # Twice what the slowest engine measured takes to stand by again (stock vLLM with an 8B on an H200: 35-53 s).
    loading_s: Annotated[
        float,
        about(
            "Maximum additional wait of running streams while an engine of their set loads.", "s", min=0, commands=_ALL
        ),
    ] = 120.0
    # As long as a large model may take from a disk onto a device that others have to leave first.
    provision_s: Annotated[
        float,
        about(
            "Time that streams and requests wait for a fleet model that is being started.",
            "s",
            min=0,
            commands=_ALL,
        ),
    ] = 600.0
    # Longer than a rollout may stand still (`progressDeadlineSeconds`) before it is undone.
    away_s: Annotated[
        float,
        about(
            "Maximum wait of running streams, beyond --hold-s, for a rollout to end or the store to return.",
            "s",
            min=0,
        ),
    ] = 900.0
    # About as long as a client waits before it gives up; an engine's queue is as long as its batch.
    queue_s: Annotated[
        float,
        about(
            "Time that a new request may be queued, in frontend and engine together, before it is refused (429).",
            "s",
            min=0,
            commands=_ALL,
        ),
    ] = 30.0
    fresh_max: Annotated[
        int, about("Maximum number of new requests queued per set; running streams are not limited.", min=0)
    ] = 1024
    shed_retry_s: Annotated[
        float, about("Retry-After time sent with requests refused for lack of capacity.", "s", min=1, commands=_ALL)
    ] = 30.0
    stand_in_after_s: Annotated[
        float,
        about(
            "Time without workers of a set before another with the same tokenizer takes over, flagged inexact.",
            "s",
            min=0,
        ),
    ] = 10.0


class KnownSettings(Settings, frozen=True):
    """Which models are known though no worker of theirs is there."""

    models: Annotated[
        tuple[str, ...],
        about(
            "Model that will have workers: until then it returns 503, not 404; may be repeated.",
            flag="--expect-model",
            commands=("frontend",),
        ),
    ] = ()
    fleet: Annotated[
        bool,
        about("Fleet mode: start models on demand; unknown models return 404.", commands=("frontend",)),
    ] = False
    known_s: Annotated[
        float,
        about("Time that a model whose last worker is gone returns 503, not 404.", "s", min=0, commands=_ALL),
    ] = 3600.0

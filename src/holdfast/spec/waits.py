"""Defines the settings of frontends for models without a free worker: waiting times, and models known without a worker.

`holdfast up` and `holdfast run frontend` have an option for every field unless the field names other commands.
"""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about


class HoldSettings(Settings, frozen=True):
    """Waiting times while a set has no worker, or all are full."""

    # The wait of streams. `DegradationSettings.hold_s` is the level's: control refuses new requests after the same
    # time.
    hold_s: Annotated[
        float, about("Time that streams and requests wait for a worker if there is none.", "s", min=0)
    ] = 30.0
    # Twice the measured time in which the slowest engine becomes a standby again (stock vLLM with an 8B on an H200:
    # 35-53 s).
    loading_s: Annotated[
        float, about("Maximum additional wait of running streams while an engine of their set loads.", "s", min=0)
    ] = 120.0
    # Long enough to load a large model from disk after evicting others from the device.
    provision_s: Annotated[
        float, about("Time that streams and requests wait for a fleet model that is being started.", "s", min=0)
    ] = 600.0
    # Longer than the time without progress after which a rollout is undone (`progressDeadlineSeconds`).
    away_s: Annotated[
        float,
        about(
            "Maximum wait of running streams, beyond --hold-s, for a rollout to end or the store to return.",
            "s",
            min=0,
            commands=(),
        ),
    ] = 900.0
    # About as long as clients wait. An engine's queue is as long as its batch.
    queue_s: Annotated[
        float,
        about(
            "Time that a new request may be queued, in frontend and engine together, before it is refused (429).",
            "s",
            min=0,
        ),
    ] = 30.0
    fresh_max: Annotated[
        int,
        about("Maximum number of new requests queued per set; running streams are not limited.", min=0, commands=()),
    ] = 1024
    shed_retry_s: Annotated[
        float,
        about(
            "Retry-After time sent with requests that a degradation level refuses or a full queue pushes out.",
            "s",
            min=1,
        ),
    ] = 30.0
    stand_in_after_s: Annotated[
        float,
        about(
            "Time without workers of a set before another with the same tokenizer takes over, flagged inexact.",
            "s",
            min=0,
            commands=(),
        ),
    ] = 10.0


class KnownSettings(Settings, frozen=True):
    """Settings for models that are known although they have no worker."""

    models: Annotated[
        tuple[str, ...],
        about(
            "Model that will have workers: until then it returns 503, not 404; may be repeated.",
            flag="--expect-model",
            commands=("frontend",),
            expert=False,
        ),
    ] = ()
    fleet: Annotated[
        bool,
        about("Fleet mode: start models on demand; unknown models return 404.", commands=("frontend",), expert=False),
    ] = False
    known_s: Annotated[
        float, about("Time that a model whose last worker is gone returns 503, not 404.", "s", min=0)
    ] = 3600.0

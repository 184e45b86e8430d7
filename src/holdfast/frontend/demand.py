"""What is asked for and not served: how many wait for each model, and since when, for who brings workers up.

Always true: a model without anybody who waits is not in it, nor one that only a client has named.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.frontend.lobby import Lobby
from holdfast.health.records import Demand
from holdfast.streams.directory import ModelDirectory

NEVER = (0, float("inf"))


class Demands:
    """Of one deployment, in one frontend."""

    def __init__(
        self,
        deployment: str,
        directory: ModelDirectory,
        lobby: Lobby,
        clock: Callable[[], float],
        unix_s: Callable[[], float],
    ) -> None:
        self._deployment = deployment
        self._directory = directory
        self._lobby = lobby
        self._clock = clock
        self._unix_s = unix_s
        # As it was first told: the two clocks drift, and a report is written when it changed.
        self._since: dict[str, tuple[float, float]] = {}  # by model, on either clock

    def now(self) -> dict[str, Demand]:
        found = self._waiting()
        since = {model: self._since.get(model) for model in found}
        self._since = {}
        for model, (_, since_s) in found.items():
            told = since[model]
            if told is None or told[0] != since_s:
                told = (since_s, round(self._unix_s() - (self._clock() - since_s), 3))
            self._since[model] = told
        return {
            model: Demand(waiting=count, since_unix_s=self._since[model][1]) for model, (count, _) in found.items()
        }

    def _waiting(self) -> dict[str, tuple[int, float]]:
        """Requests by model, and since when the first of them waits."""
        found = {model: told for model, told in self._lobby.demand().items() if self._is_ours(model)}
        for workers in self._directory.of_deployment(self._deployment):
            if len(workers.holds):
                count, since_s = found.get(workers.card.name, NEVER)
                held = list(workers.holds)
                count += len({id(one.item.consumer.asker) for one in held})
                found[workers.card.name] = count, min(since_s, *(one.since_s for one in held))
        return found

    def _is_ours(self, model: str) -> bool:
        """Of a model that is wanted it is known of whom; another may be anybody's."""
        if self._directory.wants(model):
            return model in self._directory.wanted(self._deployment)
        return self._directory.knows(model)

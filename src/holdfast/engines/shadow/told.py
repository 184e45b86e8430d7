"""What an engine's tenant and its seats tell, on the way to whoever runs the engine.

Always true: of what was taken over nothing leaves before its first token was right, and nothing after one was wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.requests import Output
from holdfast.engines.contract import EngineEvents
from holdfast.engines.shadow.proving import CANARY, Proving


class Told(EngineEvents):
    """What the tenant and its seats tell, on its way to whoever runs the engine. What was taken over is judged here."""

    def __init__(self, passed: Callable[[], None]) -> None:
        self.events: EngineEvents  # from `load` on
        self.proving = Proving(passed)
        self._silent = False

    def outputs(self, outputs: list[Output]) -> bool:
        if self.proving.left:
            judged = self.proving.judge(outputs)
            if judged is None:
                self.proving.end(alive=False)
                self._silent = True
                self.events.disproved("the canary's answer was wrong after taking over")
            outputs = judged or []
        return self.events.outputs(outputs) if outputs and not self._silent else True

    def closed(self, streams: list[int]) -> None:
        if others := [stream for stream in streams if stream != CANARY]:
            self.events.closed(others)

    def fatal(self, why: str) -> None:
        self.events.fatal(why)

    def memory(self, why: str) -> None:
        self.events.memory(why)

    def loading(self, why: str) -> None:
        self.events.loading(why)

    def owner_gone(self, epoch: int) -> None:
        self.events.owner_gone(epoch)

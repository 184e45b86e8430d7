"""What an engine's tenant and its seats tell, on the way to whoever runs the engine.

Always true: of what was taken over nothing leaves before its first token was right, and nothing after one was wrong,
until a second answer was right or `serve_on` was called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.core.requests import Output
from holdfast.engines.contract import EngineEvents
from holdfast.engines.shadow.proving import CANARY, Proving, Stage

log = logging.getLogger("holdfast.engine")


class Told(EngineEvents):
    """What the tenant and its seats tell, on its way to whoever runs the engine. What was taken over is judged here.
    `ask_again` has the known question asked once more, in a turn of the loop of its own."""

    def __init__(self, passed: Callable[[], None], ask_again: Callable[[], None]) -> None:
        self.events: EngineEvents  # from `load` on
        self.proving = Proving(passed)
        self._ask_again = ask_again

    def outputs(self, outputs: list[Output]) -> bool:
        proving = self.proving
        if proving.under_way:
            before, outputs = proving.stage, proving.judge(outputs)
            if proving.stage is not before:
                self._tell_stage(proving.stage)
        return self.events.outputs(outputs) if outputs else True

    def _tell_stage(self, stage: Stage) -> None:
        if stage is Stage.DOUBTED:
            log.warning("the canary's answer was wrong after taking over: it is asked again before anything is sent")
            self._ask_again()
        elif stage is Stage.DISPROVED:
            self.events.disproved("the canary's answer was wrong after taking over, twice")

    def cannot_ask(self, why: str) -> None:
        """There will be no answer to the known question."""
        log.warning("the canary could not be asked: %s", why)
        self.proving.miss()
        self._tell_stage(self.proving.stage)

    def serve_on(self) -> None:
        """What was held while the engine was in doubt goes out, and all that follows."""
        if held := self.proving.release():
            self.events.outputs(held)

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

"""A worker as far as an observer of its liveness can tell: a beat thread, and an engine thread that makes steps.

Prints its Welcome (hex) and its beat address, then obeys the words on stdin: work, idle, wedge, unwedge, spin.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from holdfast.core.address import parse_address
from holdfast.engines.contract import Progress
from holdfast.wire.messages import VERSION, Welcome
from holdfast.worker.beat import BeatThread


class Engine:
    """Makes a step every 10 ms while it has work; `mode` is set by the test."""

    def __init__(self) -> None:
        self.steps = 0
        self.mode = "idle"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            if self.mode == "spin":
                continue
            time.sleep(0.01)
            if self.mode == "work":
                self.steps += 1

    def progress(self) -> Progress:
        running = 0 if self.mode == "idle" else 3
        return Progress(self.steps, running, 0, 11.0, 0.0, (os.getpid(), self.thread.native_id or 0))


def main() -> None:
    os.nice(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    engine = Engine()
    beat = BeatThread(parse_address(sys.argv[1]), engine.progress)
    beat.start()
    identity = beat.identity
    beat.set_welcome(Welcome(VERSION, 1, "test-00000000", "sum", 4, 4, True, identity))
    print(beat.address, flush=True)
    for line in sys.stdin:
        engine.mode = line.strip()


main()

"""Runs `python -m bench.degrade`."""

from __future__ import annotations

from typing import Annotated

from bench.command import main, show, tell
from bench.degrade.run import DegradeBench, run
from bench.degrade.telling import table
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.terminal import write_out
from holdfast.settings import Environment
from holdfast.spec.settings import about


class DegradeOptions(CommandOptions, frozen=True):
    """Stop workers one by one until none is left, then resume them, under load of all tiers: degradation levels, batch
    sizes, and which requests were refused.

    Exits with 1 if levels, refusals and batch sizes did not follow and return, premium was refused before level 4, or a
    noisy bound made levels flap. Times are shorter than the defaults; bounds and rules are not.
    """

    workers: Annotated[int, about("Number of sim workers.", min=10, max=100)] = 10
    seed: Annotated[int, about("Random seed for when clients start.")] = 1
    json: Json = False

    def run(self, env: Environment) -> int:
        result = run(DegradeBench(self.workers, seed=self.seed), tell)
        if self.json:
            show(result, True)
        else:
            write_out(table(result))
        return 1 if result["missed"] else 0


if __name__ == "__main__":
    main(DegradeOptions, "degrade")

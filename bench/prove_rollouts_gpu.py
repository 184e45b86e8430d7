"""`make prove-rollouts-gpu`: a failover pair of torch engines on one device is replaced under load, in under 8 minutes.

With memory for a second pair beside the first: once with nothing done to it, once with the old active engine killed
while the new pair loads, once with the new one killed when it serves. With memory for one only. And with exact
arithmetic, so that every token can be compared, while the old active is killed as it drains. `--device cpu` plays all
of it with the tiny model in host memory, to try the proof itself: what a rollout is told of the device, and what it
decides by that, is the same there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.prove import Rows, machine_of, tell
from bench.rollouts import campaign
from bench.rollouts.hits import Hit, Victim
from bench.rollouts.scenario import Scenario
from bench.rollouts.shapes import Shape
from holdfast.core.errors import UserError
from holdfast.roles.devices import choose, sizes_of
from holdfast.spec.engines import GIB

FIGURES = (
    "changes", "hits", "answers", "lost", "wrong", "inexact", "resumed", "nobody_s", "pause_s", "wait_s",
    "calm_pause_s", "start_s", "calm_s", "longest_s",
)  # fmt: skip
# Steps of such a rollout: the new pair is to stand by, takes over, counts; the old one is stopped, is gone; steady.
HITS = {
    "room-for-two": (None, Hit(Victim.OLD, 1), Hit(Victim.NEW, 3)),
    "room-for-one": (None,),
    "exact": (Hit(Victim.OLD, 2), Hit(Victim.NEW, 3)),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is kept, and what is asked of it."""

    model: str
    exact: tuple[str, ...]  # the engine whose tokens are compared
    two_gib: float  # KV that leaves room for a second pair
    one_gib: float  # and KV that does not
    more: tuple[str, ...] = ()
    streams: int = 32
    tokens: int = 600  # 4 s: they end while their workers drain in place
    long_tokens: int = 2000  # 14 s: they do not


H200 = Sizes("random:8b", ("--model", "random:1b"), two_gib=40, one_gib=60)
# The GPU's own terms count there, too: engines of 0.8 GiB each, beside weights and pools that are next to nothing.
CPU = Sizes("tiny", ("--model", "tiny"), 0.05, 0.5, ("--torch-threads", "1"), streams=8, tokens=100, long_tokens=400)
CPU_BYTES = 5 * GIB


def scenarios(sizes: Sizes, gpus: tuple[tuple[str, int], ...]) -> dict[str, Scenario]:
    def pair(*words: str, kv_gib: float) -> Shape:
        engine = ("--engine", "torch", *words, "--kv-gib", f"{kv_gib:g}", *sizes.more)
        # Requests that find no worker wait for as long as a swap takes, and more.
        hold = ("--hold-s", "180")
        return Shape(workers=1, model="m", engine=engine, failover=True, deadline_s=180, frontend_args=hold)

    def renewed(name: str, shape: Shape, **more: Any) -> Scenario:
        return Scenario(name, replace(shape, image="holdfast:2.0"), shape, gpus=gpus, **more)

    fast = {"streams": sizes.streams, "tokens": sizes.tokens, "long_tokens": sizes.long_tokens, "exact": False}
    exact = {"streams": 8, "tokens": 60, "long_tokens": 200}
    model = ("--model", sizes.model, "--fast")
    return {
        "room-for-two": renewed("room-for-two", pair(*model, kv_gib=sizes.two_gib), **fast),
        "room-for-one": renewed("room-for-one", pair(*model, kv_gib=sizes.one_gib), in_place=True, **fast),
        "exact": renewed("exact", pair(*sizes.exact, "--exact", kv_gib=sizes.two_gib / 4), **exact),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda-0", help="cuda-0, a GPU's UUID, or cpu")
    parser.add_argument("--seed", type=int, default=1, help="of what clients ask")


def rows(chosen: argparse.Namespace) -> Rows:
    gpus = choose("torch", chosen.device, 1).gpus
    known = tuple(zip(gpus, sizes_of(gpus), strict=True)) or (("host-1", CPU_BYTES),)
    if not all(size for _, size in known):
        raise UserError(f"the driver does not say how much memory {known[0][0]} has")
    made = scenarios(H200 if gpus else CPU, known)
    return {
        name: partial(campaign.play, scenario, tell, HITS[name], seed=chosen.seed) for name, scenario in made.items()
    }


def machine(chosen: argparse.Namespace) -> str:
    return machine_of("host-1" if chosen.device == "cpu" else chosen.device)

"""`make prove-fleet-gpu`: weights of 16 GiB between a GPU and host memory, and a fleet's model that goes there and is
fetched when it is asked, beside another's streams; under 6 minutes.

The link is measured in the same run: pinned memory to the device by the driver's plain copy. `--device cpu` plays all
of it in host memory with the tiny model, to try the proof itself.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from bench import warm
from bench.fleet_gpu import link, wake
from bench.prove import Row, Rows, machine_of
from holdfast.spec.names import is_host

FIGURES = (
    "promote_copy_gb_per_s_p50", "promote_took_ms_p50", "demote_copy_gb_per_s_p50", "link_gb_per_s", "share",
    "wakes", "first_token_s_p50", "first_token_s_max", "hot_first_token_s", "cold_first_token_s", "freed_mib_min",
    "wrong", "others_lost", "others_gap_at_moves_ms", "others_gap_far_ms",
)  # fmt: skip
SHARE = 0.9  # of the link
TOOK_MS_MAX = 330.0  # 16 GiB at 55 GB/s, and what is beside the copy (facts 5)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda-0", help="cuda-0, a GPU's UUID, or cpu")
    parser.add_argument("--logs", type=Path, help="where to write what the fleet's processes logged")


def machine(chosen: argparse.Namespace) -> str:
    return machine_of(_device(chosen))


def rows(chosen: argparse.Namespace) -> Rows:
    device = _device(chosen)
    return {"copy": partial(copy, device), "wake": partial(woken, device, chosen.logs)}


def _device(chosen: argparse.Namespace) -> str:
    return "host-0" if chosen.device == "cpu" else str(chosen.device)


def copy(device: str) -> Row:
    """By a vault with its keeper; nothing else is on the device."""
    found = warm.run(warm.WarmBench(device, 0.25 if is_host(device) else 16.0, 5))
    if is_host(device):
        return found | {"bound": "none without a GPU", "met": True}
    best = link.gb_per_s()
    share = round(found["promote_copy_gb_per_s_p50"] / best, 3)
    return found | {
        "link_gb_per_s": best,
        "share": share,
        "bound": f"to the device at {SHARE:.0%} of the link, all that a vault does within {TOOK_MS_MAX:g} ms",
        "met": share >= SHARE and found["promote_took_ms_p50"] <= TOOK_MS_MAX,
    }


def woken(device: str, out: Path | None) -> Row:
    logs: list[str] = []
    try:
        return wake.run(wake.trial(device) if is_host(device) else wake.WakeBench(device), logs)
    finally:
        if out is not None:
            out.write_text("\n".join(logs))

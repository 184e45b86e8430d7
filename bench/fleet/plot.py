"""`python -m bench.fleet.plot` draws docs/fleet.svg from bench/results/fleet.json: what a planning pass costs, all at
once against replicas, and kept up against the nodes that changed. `make prove-fleet` does so after it has measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import ROOT
from bench.prove import Row

RESULTS, PICTURE = ROOT / "bench" / "results" / "fleet.json", ROOT / "docs" / "fleet.svg"
LEFT, TOP, WIDE, HIGH = 70, 56, 340, 220  # of the first panel's axes
APART = 460  # from one panel's axes to the next
SIGN_WIDE = 8  # of a figure below an axis, and some room
INK, RED, BLUE, GREEN = "#1f2d33", "#b3392f", "#31505f", "#2f7d46"

Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """Two axes: `across` and `up` say at which share of its length a figure stands."""

    left: int
    across: Callable[[float], float]
    up: Callable[[float], float]

    def at(self, point: Point) -> str:
        x, y = self.left + WIDE * self.across(point[0]), TOP + HIGH * (1 - self.up(point[1]))
        return f"{x:.1f},{y:.1f}"

    def axes(self, title: str, below: str, xs: Sequence[float], ys: Sequence[tuple[float, str]]) -> list[str]:
        low = TOP + HIGH
        lines = [
            f'<path d="M{self.left} {TOP}V{low}H{self.left + WIDE}" fill="none" stroke="{INK}"/>',
            text(self.left, TOP - 24, title, "start", bold=True),
            text(self.left + WIDE / 2, low + 42, below, "middle"),
        ]
        after = -math.inf  # where the last one ends: one that would touch it is left out
        for x in xs:
            said, at = f"{x:,.0f}", self.left + WIDE * self.across(x)
            half = SIGN_WIDE * len(said) / 2
            if at - half > after:
                lines.append(text(at, low + 20, said, "middle"))
                after = at + half
        for y, word in ys:
            height = low - HIGH * self.up(y)
            lines.append(f'<path d="M{self.left} {height:.1f}h{WIDE}" stroke="#d7dde0"/>')
            lines.append(text(self.left - 8, height + 4, word, "end"))
        return lines

    def curve(self, points: Sequence[Point], colour: str, dashed: bool = False) -> list[str]:
        where = [self.at(point) for point in points]
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        line = f'<polyline points="{" ".join(where)}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        dots = [] if dashed else [one.split(",") for one in where]
        return [line, *(f'<circle cx="{x}" cy="{y}" r="3.2" fill="{colour}"/>' for x, y in dots)]

    def word(self, point: Point, said: str, colour: str, down: float = -8, anchor: str = "end") -> str:
        x, y = map(float, self.at(point).split(","))
        return text(x, y + down, said, anchor, colour)


def text(x: float, y: float, said: str, anchor: str, colour: str = INK, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{said}</text>'


def at_once(scale: Row) -> list[str]:
    """Draw CPU seconds of a pass over everything, against replicas."""
    panel = Panel(LEFT, lambda replicas: replicas / 10_000, lambda seconds: seconds / 1.1)
    rows = scale["by_replicas"]
    placing, resting = ([(row["replicas"], row[name]) for row in rows] for name in ("place_all_s", "at_rest_s"))
    ys = [(tenths / 10, f"{tenths / 10:g} s") for tenths in range(0, 11, 2)]
    return [
        *panel.axes("A pass over everything, CPU", "replicas", [row["replicas"] for row in rows], ys),
        *panel.curve([(0, 1.0), (10_000, 1.0)], RED, dashed=True),
        panel.word((150, 1.0), "bound", RED, -6, "start"),
        *panel.curve(placing, BLUE),
        panel.word(placing[-1], "all are placed", BLUE),
        *panel.curve(resting, GREEN),
        panel.word(resting[-1], "all are there", GREEN, 32),
    ]


def kept_up(scale: Row) -> list[str]:
    """CPU milliseconds after so many nodes lost all their replicas."""
    panel = Panel(LEFT + APART, lambda nodes: math.log10(nodes) / 3, lambda took_ms: (math.log10(took_ms) + 1) / 4.2)
    rows = [(float(count), row) for count, row in scale["by_nodes_changed"].items()]
    told, placed = ([(count, row[name]) for count, row in rows] for name in ("told_ms", "pass_ms"))
    ys = [(0.1, "0.1 ms"), (1, "1 ms"), (10, "10 ms"), (100, "100 ms"), (1_000, "1 s")]
    first_ms = told[0][1]
    return [
        *panel.axes("Kept up: passes after a change, CPU", "nodes that changed", [count for count, _ in rows], ys),
        *panel.curve([(1, first_ms), (1_000 / first_ms, 1_000.0)], RED, dashed=True),
        panel.word((1_000 / first_ms, 1_000.0), "in proportion", RED, -6),
        *panel.curve(told, BLUE),
        panel.word(told[2], "told, and passed over", BLUE, -10),
        *panel.curve(placed, GREEN),
        panel.word(placed[1], "their replicas are placed again", GREEN, 18, "start"),
    ]


def svg(results: Row) -> str:
    scale, about = results["rows"]["scale"], results["about"]
    size = f"{scale['replicas']:,} replicas of {scale['models']:,} models on {scale['nodes']:,} nodes"
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 350" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">'
    )
    title = f"<title>What the fleet's planner costs, up to {size} ({about['machine']}, {about['date']})</title>"
    ground = '<rect width="900" height="350" rx="10" fill="#fbfbf8"/>'
    return "\n".join([head, title, ground, *at_once(scale), *kept_up(scale), "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(svg(json.loads(RESULTS.read_text())))

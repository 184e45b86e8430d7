"""`python -m bench.fleet_local.plot` draws docs/fleet-local.svg from bench/results/fleet-local.json: a load that grows,
falls and ends, the replicas that its traffic brought, and how long requests waited. `make prove-fleet-local` does
so after it has measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench import ROOT
from bench.fleet.plot import BLUE, GREEN, LEFT, RED, Panel, Point
from bench.prove import Row

RESULTS, PICTURE = ROOT / "bench" / "results" / "fleet-local.json", ROOT / "docs" / "fleet-local.svg"
APART = 440  # from one panel's axes to the next


def stairs(points: Sequence[Point]) -> list[Point]:
    """What stays as it is until it changes."""
    out: list[Point] = []
    for point in points:
        if out and out[-1][1] != point[1]:
            out.append((point[0], out[-1][1]))
        if not out or out[-1] != point:
            out.append(point)
    return out


def line(panel: Panel, points: Sequence[Point], colour: str) -> str:
    where = " ".join(panel.at(point) for point in points)
    return f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def followed(curve: Row) -> list[str]:
    samples, end_s = curve["samples"], curve["ended_s"]
    most = max(one["clients"] for one in samples)
    panel = Panel(LEFT, lambda at_s: at_s / end_s, lambda count: count / (most + 1))
    clients, hot = ([(one["at_s"], one[name]) for one in samples] for name in ("clients", "hot"))
    ys = [(count, str(count)) for count in range(0, most + 1, 2)]
    top = max(hot, key=lambda point: point[1])
    return [
        *panel.axes("Clients, and replicas that serve", "seconds", range(0, int(end_s) + 1, 30), ys),
        line(panel, stairs(clients), RED),
        panel.word(next(point for point in clients if point[1] == most), "clients", RED, -6, "start"),
        line(panel, stairs(hot), BLUE),
        panel.word(top, "replicas", BLUE, -6, "start"),
    ]


def waited(curve: Row) -> list[str]:
    waits, end_s = curve["waits"], curve["ended_s"]
    worst_s = max(wait_s for _, wait_s in waits)
    panel = Panel(LEFT + APART, lambda at_s: at_s / end_s, lambda wait_s: wait_s / (worst_s * 1.1))
    step = max(1, round(worst_s / 5))
    ys = [(second, f"{second} s") for second in range(0, int(worst_s) + 1, step)]
    dots = (panel.at((at_s, wait_s)).split(",") for at_s, wait_s in waits)
    return [
        *panel.axes("Wait for the first token, by when it was asked", "seconds", range(0, int(end_s) + 1, 30), ys),
        *(f'<circle cx="{x}" cy="{y}" r="2" fill="{GREEN}" fill-opacity="0.6"/>' for x, y in dots),
    ]


def svg(results: Row) -> str:
    curve, about = results["rows"]["curve"], results["about"]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 350" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">'
    )
    title = f"<title>A model that its traffic scales ({about['machine']}, {about['date']})</title>"
    ground = '<rect width="900" height="350" rx="10" fill="#fbfbf8"/>'
    return "\n".join([head, title, ground, *followed(curve), *waited(curve), "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(svg(json.loads(RESULTS.read_text())))

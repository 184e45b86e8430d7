"""What people read of a GPU's fault, from the driver's number to the lines of `ps` and `incidents`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from holdfast.cli.screen import Screen
from holdfast.cli.status import _show_incidents
from holdfast.cli.terminal import Terminal
from holdfast.control import health_controller as hc
from holdfast.control.status_page import ControlView, page
from holdfast.health import standing as s
from holdfast.health.device_faults import fault_of
from holdfast.supervise.incident_recorder import IncidentRecorder
from holdfast.supervise.incidents import read_incidents
from holdfast.supervise.status import Status
from holdfast.supervise.verdicts import with_verdicts
from tests.rigs.manual_clock import ManualClock
from tests.rigs.worlds.health import HealthRig

FAULTS = [
    (79, "unhealthy, weight 0", "lost its traffic", "Xid 79: the GPU has fallen off the bus"),
    (64, "draining, weight 0", "was drained", "Xid 64: a row of memory could not be remapped"),
]


@pytest.mark.parametrize(("number", "standing", "happened", "words"), FAULTS)
def test_a_grave_fault_is_told_in_its_words(
    number: int, standing: str, happened: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the worker in `ps`, with what it has left, and as one incident; nothing of the other GPU's worker."""
    made = HealthRig({"worker-1": "w1", "worker-2": "w2"})
    made.workers["worker-1"].device, made.workers["worker-2"].device = "host/0000:3b:00", "host/0000:5e:00"
    made.begin(serving=True)
    made.wait(1.0)
    made.tell(hc.DeviceRead("host/0000:3b:00", s.DeviceReport(fault_of("0000:3b:00", number), made.now)))
    records = {name: made.record(name) for name in made.workers}
    verdicts = page(ControlView(name="control", leads=True, records=records)).verdicts
    statuses = [Status("worker", name, 7, "ready", "", 0, instance=name) for name in made.workers]
    table = io.StringIO()
    Screen(Terminal(table, 120)).table(with_verdicts(statuses, verdicts))
    assert table.getvalue().splitlines()[3:] == [f"  worker-1: {standing}: {words}"]
    witness = IncidentRecorder(tmp_path, ManualClock(made.now))
    witness.decided(verdicts)
    _show_incidents(tmp_path, read_incidents(tmp_path), [])
    assert [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()] == [
        f"worker-1 {happened}: {words}"
    ]

"""The example in docs/testing.md, as a stranger would copy it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast.testing

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
LINES_MAX = 40


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.processes
def test_the_example_passes_in_somebody_elses_folder(tmp_path: Path) -> None:
    """One file, short enough to be copied, that passes with nothing of our tests around it."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert example.count("\n") <= LINES_MAX
    (tmp_path / "test_mine.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_page_tells_of_every_name() -> None:
    """What may be relied on is what the page shows."""
    table = PAGE[PAGE.index("## What you may rely on") :]
    told = set(re.findall(r"`(\w+)", "\n".join(line.split("|")[1] for line in table.splitlines() if line[:3] == "| `")))
    assert told == set(holdfast.testing.__all__)

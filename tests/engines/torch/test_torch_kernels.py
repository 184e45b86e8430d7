"""The Triton kernels, interpreted on CPU tensors: what they compute is what the plain torch path computes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None,
    reason="triton is not installed here",
)

CHECKS = Path(__file__).parents[2] / "rigs" / "engines" / "kernel_checks.py"
SOURCES = Path(__file__).parents[3] / "src"
COUNT = 12  # checks: none is forgotten
CHECKS_S = 110.0  # the interpreter takes 10 to 20 s; a shared machine several times that


def test_kernels_do_what_plain_torch_does() -> None:
    """None of the checks, interpreted, finds a difference. A process of its own: whether Triton interprets is settled
    when it is imported."""
    paths = [str(SOURCES), *(path for path in sys.path if path)]
    ran = subprocess.run(
        [sys.executable, str(CHECKS)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        timeout=CHECKS_S,
        check=True,
    )
    errors: dict[str, str | None] = json.loads(ran.stdout.splitlines()[-1])
    assert len(errors) == COUNT
    for name, error in errors.items():
        assert error is None, f"{name}: {error}"

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

CHECKS = Path(__file__).parent / "torch_kernel_checks.py"
SOURCES = Path(__file__).parents[3] / "src"
NAMES = [
    "decodes",
    "decodes in fp16",
    "chunks",
    "a mixed step",
    "norms",
    "norms in bf16",
    "turns",
    "turns of normed heads",
    "gates",
    "noise",
    "draws",
    "draws in bf16",
]
CHECKS_S = 110.0  # the interpreter takes 10 to 20 s; a shared machine several times that


@pytest.fixture(scope="module")
def errors() -> dict[str, str | None]:
    """Each check's error. A process of its own: whether Triton interprets is settled when it is imported."""
    paths = [str(SOURCES), *(path for path in sys.path if path)]
    ran = subprocess.run(
        [sys.executable, str(CHECKS)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        timeout=CHECKS_S,
        check=True,
    )
    found: dict[str, str | None] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_no_check_is_forgotten(errors: dict[str, str | None]) -> None:
    """Every check of the program is named here."""
    assert sorted(errors) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_does_what_plain_torch_does(errors: dict[str, str | None], name: str) -> None:
    """The check of this name, interpreted, found no difference."""
    assert errors[name] is None, errors[name]

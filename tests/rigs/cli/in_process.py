"""A command said in this very process: for those that end before anything is started, or soon."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest

from holdfast.cli.main import main


def said_here(words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    shown, told = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "argv", ["holdfast", *words]),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(told),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(words, ended.value.code, shown.getvalue(), told.getvalue())

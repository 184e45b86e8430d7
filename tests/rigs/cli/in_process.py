"""A command said in this very process: for those that end before anything is started, or soon."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import pytest

from holdfast.cli.deployments import book, removal
from holdfast.cli.fleet import observed
from holdfast.cli.main import main

ANSWER_S = 60.0  # for a store in this very process, however busy the machine is


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Commands wait longer for a store's answer than a person would."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (book, removal, observed):
            patch.setattr(module, "ANSWER_S", ANSWER_S)
        yield


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

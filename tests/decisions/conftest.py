"""Decisions are tested with the rigs of the rooms that carry them out."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "streams"))

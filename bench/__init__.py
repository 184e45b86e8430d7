"""Proofs (`make prove-NAME`) and comparisons on a GPU; results/ holds what they found. Not in the package."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # where `python -m bench.…` is run, whatever started it

"""Holdfast: LLM serving that outlives its engines."""

__version__ = "0.1.0"

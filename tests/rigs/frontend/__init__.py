"""Runs clients of a frontend under test, and meters on it."""

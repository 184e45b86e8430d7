"""Fleets under test: as one moment's facts, and as real processes."""

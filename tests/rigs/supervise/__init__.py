"""Supervisors under test, over tiny processes."""

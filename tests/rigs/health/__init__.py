"""Processes and sources that tell of health: beats, GPU faults."""

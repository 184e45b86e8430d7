"""Decides whether processes are alive and how much traffic each worker gets: pure state machines, and their inputs."""

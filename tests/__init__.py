"""Tests of Holdfast, a folder for each room, and the rigs that they share (`tests.rigs`)."""

"""Deployments beside each other: what keeps them apart, and what they share where one says so."""

"""Runs whole deployments under test: from a manifest, on one device, on Ray."""

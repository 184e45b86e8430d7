"""Implements the election lock as a server: state machine, messages, server and client."""

"""Instances and model cards in the store, and the worker sets they form."""

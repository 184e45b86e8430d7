"""Vaults and devices under test, and child processes that use them."""

"""Decides what a paged engine computes: streams, steps and KV blocks. No torch, no clock."""

"""Decides which worker takes a request, and which requests are refused while capacity is short."""

"""What every engine gets from its process: memory in a vault, the canary, takeover, and the proof after it."""

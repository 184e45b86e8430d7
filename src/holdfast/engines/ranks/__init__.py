"""The further processes (ranks) of an engine, which the engine's own process starts, commands and ends."""

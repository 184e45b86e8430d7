"""The further ranks of a vLLM engine."""

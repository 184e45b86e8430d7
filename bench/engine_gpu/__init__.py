"""The torch engine on a GPU: a chain of kills, its speed, and vLLM's."""

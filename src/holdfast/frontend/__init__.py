"""The OpenAI-compatible HTTP API: requests, text, admission to streams. Text is handled only here; workers see token
ids."""

"""The OpenAI surface: HTTP, text, admission to streams. All text lives here; workers see token ids only."""

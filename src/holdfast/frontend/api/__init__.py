"""Parses OpenAI requests: turns body bytes into one normalised request, or into an OpenAI error."""

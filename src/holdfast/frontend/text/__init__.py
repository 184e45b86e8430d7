"""Converts between text and token ids: tokenizing, chat templates, incremental detokenizing, stop strings."""

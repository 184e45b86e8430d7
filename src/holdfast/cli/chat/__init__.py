"""`holdfast chat` holds a conversation in the terminal and shows where an engine died and its standby continued."""

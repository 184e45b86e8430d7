"""`holdfast chat`: a conversation in the terminal that shows where an engine died and its standby went on."""

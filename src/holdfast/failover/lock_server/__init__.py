"""The election lock that a server keeps: its machine, its messages, both ends of the connection."""

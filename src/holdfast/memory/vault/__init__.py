"""The vault's process: holds the pages, decides which clients may use them, and outlives them. It loads no torch."""

"""The vault itself: the process that keeps pages, decides who may use them, and outlives its users. Loads no torch."""

"""Engines under test, in this process or in children, and what drives them."""

"""An engine's side of the vault: connections that are made again, and what is mapped through them."""

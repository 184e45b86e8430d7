"""An engine's side of the vault: connections that reconnect, and the memory mapped through them."""

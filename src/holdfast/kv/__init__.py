"""The KV pool of one device: its geometry, its crash-consistent prefix index, its adoption, and the owner's
allocator."""

"""The KV pool of one device: its geometry, its crash-consistent prefix index, adoption, and the owner's allocator."""

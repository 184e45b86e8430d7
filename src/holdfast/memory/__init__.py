"""The vault: weights and KV pages that outlive the processes that use them."""

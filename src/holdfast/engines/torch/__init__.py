"""A small engine for the dense Llama family, on CPU and GPU, whose weights and KV outlive it."""

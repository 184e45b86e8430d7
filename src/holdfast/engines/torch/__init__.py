"""The torch engine serves dense models of the Llama family on CPU and GPU; its weights and KV outlive it."""

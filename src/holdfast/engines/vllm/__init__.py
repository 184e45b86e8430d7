"""Stock vLLM as an engine whose weights and KV outlive it. The only room that imports vllm."""

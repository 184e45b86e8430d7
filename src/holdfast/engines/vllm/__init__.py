"""Stock vLLM as an engine; its weights and KV outlive it. Only this package imports vllm."""

"""What `make prove-vllm` is made of: models, what is asked, stock vLLM beside it, and the chain of kills."""

"""A paged engine's rules without its arithmetic: streams, steps and who has which KV block. No torch, no clock."""

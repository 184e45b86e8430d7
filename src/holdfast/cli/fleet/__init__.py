"""Commands for a fleet's models: deploy, scale, evict, models, nodes. All they read and write is the store."""

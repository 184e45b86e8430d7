"""Commands for a fleet's models: deploy, scale, evict, models, nodes, events. All they read and write is the store."""

"""torch over the vault's memory: tensors at addresses, modules' parameters kept and bound."""

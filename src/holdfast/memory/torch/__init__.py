"""torch on the vault's memory: tensors at addresses, module parameters stored in the vault and bound to it."""

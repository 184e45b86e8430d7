"""A small world of nodes, vaults and agents, in which a fleet's plans are carried out, and what may go wrong there."""

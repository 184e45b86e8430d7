"""What only a GPU does: kernels, graphs, warming up, and the plan of its memory."""

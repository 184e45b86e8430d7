"""What a kill costs on a GPU, and what the fences are for."""

"""Models as they lie in files: what they are, their words, their tensors."""

"""Output tensors: how each is made and stored, and the finished plan."""

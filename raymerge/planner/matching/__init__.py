"""Which tensors meet: layers, logical matrices, adapters laid over them, and the method of each."""

"""What a plan is made from: opened sources, results of stages, quantised tensors as numbers."""

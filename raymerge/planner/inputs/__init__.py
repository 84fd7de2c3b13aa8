"""Inputs of a plan: opened sources, results of stages, quantised tensors."""

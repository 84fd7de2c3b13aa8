"""Quantised tensors of a checkpoint: found from headers and config, described, never computed here."""

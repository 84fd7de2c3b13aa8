"""Finishes the output directory: companion files, model card, config, and the index last."""

"""Finishing the output directory: config, model card, companion files."""

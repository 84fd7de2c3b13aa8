"""Proves a checkpoint on disk; ``raymerge.verify`` is the API function."""

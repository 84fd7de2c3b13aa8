"""Bytes by key: local directories now, object stores later. Knows nothing of tensors."""

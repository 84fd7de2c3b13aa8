"""Bytes and formats of checkpoints: headers, indexes, layouts of files not yet written, views."""

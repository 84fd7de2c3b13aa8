"""What says how good a candidate is, one file a kind; each has a line in ``table``."""

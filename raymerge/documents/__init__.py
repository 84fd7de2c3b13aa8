"""Texts that users write, in YAML: read with the place of every value, checked, all faults told at once."""

"""Searches for the best values of a marked recipe, in rounds of candidates that are evaluated and told."""

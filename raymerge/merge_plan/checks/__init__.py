"""Proofs, from a plan's tables alone, that it can be carried out."""

"""Adapters extracted from two models, or merged from other adapters."""

"""Recipes: read and checked, with the source position of every value."""

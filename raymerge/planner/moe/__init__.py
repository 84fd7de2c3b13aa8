"""Mixtures of experts: built, cut, extended, made dense, and put into one order."""

"""Work that precedes a plan's segments: router rows, orders of experts."""

"""A first recipe for given models: what they are, which is the base of the others, and a method that fits."""

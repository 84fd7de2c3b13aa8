"""Names and roles: what the tensors of a checkpoint are, from their names and the config alone."""

"""Recipe and headers -> plan. Pure: reads no weights, writes nothing, and two calls give equal plans."""

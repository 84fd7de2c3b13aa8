"""Workers: pools, dispatch, placement, sizes."""

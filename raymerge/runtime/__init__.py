"""Where segments run: in this process, or on Ray actors. The only package that imports ray."""

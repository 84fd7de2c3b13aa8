"""The output's ``config.json``."""

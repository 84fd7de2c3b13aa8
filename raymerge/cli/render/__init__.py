"""How what the library answers is shown."""

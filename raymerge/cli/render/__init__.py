"""Tables, progress and reports of the command line."""

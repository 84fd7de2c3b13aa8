"""Talks to people: reads the command line, shows what the library answers, turns errors into exit codes."""

"""YAML texts of users: read with source positions, checked, all faults reported at once."""

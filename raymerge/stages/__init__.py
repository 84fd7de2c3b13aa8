"""What is computed before a plan can run: router rows, orders of experts."""

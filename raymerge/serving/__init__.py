"""What inference servers take weights from, without files. Imports no server until one asks."""

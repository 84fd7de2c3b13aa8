"""Directories of POSIX file systems."""

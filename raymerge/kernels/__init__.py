"""Loops over arrays that are compiled when they are first called, for what torch needs many sweeps for.

Plain arithmetic on numpy arrays: no torch and no state. Every loop that makes elements has a form in torch
beside its caller, which serves other devices, and gives the very same bits: multiplication and addition are
rounded one by one, as IEEE 754 says, never fused or reordered. What was compiled is kept beside this package,
in the user's cache directory where that cannot be written, or in NUMBA_CACHE_DIR (see ``jit``).

Importing numba takes a third of a second, so callers import these modules where they compute, not where they
are loaded.
"""

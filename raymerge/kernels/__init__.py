"""Loops over numpy arrays, compiled when first called, for what would take torch many sweeps.

No torch and no state. Every loop that makes elements has a torch form beside its caller, for other devices,
with the same bits: multiplication and addition are rounded one by one (IEEE 754), never fused or reordered.
Compiled code is cached beside this package, in the user's cache directory where that cannot be written, or in
NUMBA_CACHE_DIR (see ``jit``). Importing numba takes a third of a second, so callers import these modules
where they compute."""

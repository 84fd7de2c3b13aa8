"""Proves a checkpoint on disk.

The design document calls this floor ``verify``; the package is named ``verifier`` because ``raymerge.verify``
is the API function (docs/design/0001-package-names.md).
"""

"""Recipe and headers -> plan. Pure: reads no weights, writes nothing, and two calls give equal plans.

The design document calls this floor ``plan``; the package is named ``planner`` because ``raymerge.plan`` is
the API function (docs/design/0001-package-names.md).
"""

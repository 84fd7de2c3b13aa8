"""Targets of a run: this machine, a running Ray cluster, its Jobs API, Kubernetes."""

TARGETS: dict[str, str] = {
    "local": "",
    "cluster": "",
    "job": "raymerge.deploy.targets.job_server:open_job_server",
    "kubernetes": "raymerge.deploy.targets.kubernetes:open_kubernetes",
}
"""The opener of each target as ``module:name``, imported at first use and called with a ``Where`` and the
environment; "" for runs in this process. Another target is a file and a line here."""

"""Where a run goes: this machine, a running Ray cluster, its Jobs API, Kubernetes."""

TARGETS: dict[str, str] = {
    "local": "",
    "cluster": "",
    "job": "raymerge.deploy.targets.job_server:open_job_server",
    "kubernetes": "raymerge.deploy.targets.kubernetes:open_kubernetes",
}
"""What opens each target, as module and name, imported when it is first needed: called with its ``Where`` and
the environment, it gives a ``Target``. "" where runs are made by this very process. Another target is a file
and a line here."""

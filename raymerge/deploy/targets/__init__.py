"""Where a run goes: this machine, a running Ray cluster, its Jobs API, Kubernetes."""

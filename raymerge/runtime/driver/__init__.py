"""The driver: runs, chained merges, stages, resuming, audits."""

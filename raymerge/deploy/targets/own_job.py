"""The job of Ray that this very process is the driver of, for targets that begin failed jobs again."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets.choose import Where, target_of

_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray gives to drivers of jobs."""
_STOP_SECONDS = 30.0
"""How long that may take: its client waits for ever for a server that does not answer."""


def own_job(environment: Mapping[str, str]) -> str:
    """Name of the job that this process is the driver of; "" where it is that of none."""
    try:
        return str(json.loads(environment[_CONFIG])["metadata"]["job_submission_id"])
    except (KeyError, ValueError, TypeError):
        return ""


def end_for_good(environment: Mapping[str, str]) -> None:
    """Have Ray stop this process's own job: KubeRay begins jobs again that failed, and none that was stopped.

    Ray sends SIGTERM, so that this returns only where there is no job, or it could not be stopped.
    """
    if not (job := own_job(environment)):
        return

    def stop() -> None:
        # What cannot be stopped ends with its exit code, and is tried again.
        with suppress(Exception):
            there = target_of(Where("job", "auto", Profile()), environment)
            if there is not None:
                there.stop(job)

    stopping = threading.Thread(target=stop, name="own job", daemon=True)
    stopping.start()
    stopping.join(_STOP_SECONDS)

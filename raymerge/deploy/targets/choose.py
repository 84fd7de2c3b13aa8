"""The target by profile, flags or an address; and the job that this process is."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pkgutil import resolve_name

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets import TARGETS
from raymerge.deploy.targets.target import Target, Where
from raymerge.errors import OptionError, Problem

_DASHBOARD = ("http://", "https://")


def choose(profile: Profile | None, target: str | None, address: str | None) -> Where:
    """The target. Flags win over the profile; an address of a dashboard means ``job``.

    Raises:
        OptionError: contradictory arguments, or a missing address.
    """
    said = profile or Profile()
    kind = target or _kind_of(address) or said.target
    wanted = address or _address_in(said, kind)
    if kind in ("local", "kubernetes") and address is not None:
        what = f"the target {kind} has no address of a Ray cluster, and {address} was given."
        raise OptionError(Problem("--address", what, "Drop it, or give --target cluster or job."))
    if kind == "job":
        _check_job(wanted)
    if kind == "cluster":
        _check_cluster(wanted)
    if kind == "kubernetes" and said.kubernetes is None:
        what = "the target kubernetes needs a profile with a section 'kubernetes'."
        raise OptionError(Problem("--target", what, "Give --profile FILE; see configs/run."))
    return Where(kind, wanted, said)


def target_of(where: Where, environment: Mapping[str, str]) -> Target | None:
    """The target to send runs to; None if this process makes them.

    Args:
        environment: variables that headers are taken from.

    Raises:
        OptionError: a variable named in the profile is not set, or a package is missing.
    """
    opener = TARGETS.get(where.target)
    return resolve_name(opener)(where, environment) if opener else None


def _kind_of(address: str | None) -> str | None:
    if address is None:
        return None
    return "job" if address.startswith(_DASHBOARD) else "cluster"


def _address_in(profile: Profile, kind: str) -> str | None:
    if kind == "job":
        return profile.job.address
    return profile.cluster.address if kind == "cluster" else None


def _check_job(address: str | None) -> None:
    if address is None:
        what = "the target job needs the address of a dashboard."
        raise OptionError(
            Problem("--target", what, "Give --address http://HEAD:8265, or write it in the profile.")
        )
    if not address.startswith(_DASHBOARD):
        what = f"{address} is the address of a Ray cluster from inside it, and no dashboard."
        raise OptionError(Problem("--address", what, "Give http://HEAD:8265, or --target cluster."))


def _check_cluster(address: str | None) -> None:
    if address is None:
        what = "the target cluster needs the address of a head node."
        raise OptionError(
            Problem("--target", what, "Give --address HOST:PORT, or auto on a node of the cluster.")
        )
    if address.startswith(_DASHBOARD):
        what = f"{address} is the address of a dashboard, which the target cluster does not use."
        raise OptionError(Problem("--address", what, "Give HOST:PORT of the head node, or --target job."))


_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_STOP_SECONDS = 30.0
"""Limit of a stop request: Ray's client waits for ever for a server that does not answer."""


def own_job(environment: Mapping[str, str]) -> str:
    """Name of the job whose driver this process is; "" for none."""
    try:
        return str(json.loads(environment[_CONFIG])["metadata"]["job_submission_id"])
    except (KeyError, ValueError, TypeError):
        return ""


def end_for_good(environment: Mapping[str, str]) -> None:
    """Have Ray stop this process's own job: KubeRay restarts failed jobs, but not stopped ones.

    Ray sends SIGTERM, so this returns only if there is no job, or the stop failed.
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

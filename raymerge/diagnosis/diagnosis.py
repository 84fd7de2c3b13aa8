"""All that is looked at for a place, an address and a profile, in the order in which it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from raymerge.deploy.targets.target import Where
from raymerge.diagnosis import cluster, machine, place
from raymerge.diagnosis.check import Check, Question, examine
from raymerge.runtime.workers.node_facts import versions_here
from raymerge.storage.addresses import is_remote, shown, with_options

_SECONDS = 30.0
_RAY_SECONDS = 60.0
"""An embedded Ray takes seconds to start, and most of a minute where everything is new to the disk."""
_REPORT = "Run it again; where it stays so, look at what the machine is waiting for."
_SENDING = (("Python", machine.python), ("packages", machine.packages))
"""Of a machine that only sends a run to others."""
_HERE = (
    *_SENDING,
    ("GPU", machine.gpus),
    ("compiled loops", machine.kernels),
    ("memory", machine.memory),
    ("cores", machine.cores),
    ("limits", machine.limits),
)


def diagnose(
    where: Where, places: Sequence[str], environment: Mapping[str, str], *, seconds: float | None = None
) -> Iterator[Check]:
    """Check after check. ``places``: what models are read from or written to; ``environment``: variables that
    headers of the Jobs API are taken from; ``seconds``: the longest time for one question."""
    return examine(list(_questions(where, places, environment, seconds)))


def _questions(
    where: Where, places: Sequence[str], environment: Mapping[str, str], seconds: float | None
) -> Iterator[Question]:
    usual, of_ray = seconds or _SECONDS, seconds or _RAY_SECONDS
    own = _HERE if where.target in ("local", "cluster") else _SENDING
    for topic, ask in own:
        yield Question(topic, ask, usual, _REPORT)
    shared = [each for each in places if os.path.isabs(each)]
    yield from _of_target(where, shared, environment, usual, of_ray)
    for each in places:
        name = shown(each)
        if is_remote(each):
            there = partial(place.remote_place, with_options(each, where.profile.storage))
            remedy = "Check the network, the proxy, and storage: in the profile."
            yield Question("store", there, usual, remedy, name, is_far=True)
        else:
            here = partial(place.local_place, each, is_output=each == where.profile.output)
            yield Question("disk", here, usual, _REPORT, name)
    if own is _HERE:
        yield Question("Hub", place.hub_token, usual, _REPORT)


def _of_target(
    where: Where, shared: Sequence[str], environment: Mapping[str, str], usual: float, of_ray: float
) -> Iterator[Question]:
    match where.target:
        case "cluster":
            # The process that asks has the time limit, and a little more is left for it to end.
            ask = partial(cluster.ray_cluster, where.address or "auto", shared, seconds=of_ray)
            yield Question("Ray cluster", ask, of_ray + usual, _REPORT, is_far=True)
        case "job":
            jobs = partial(cluster.jobs_api, where, environment, versions_here())
            remedy = "Check the address, and that the dashboard is reached from here (a port-forward?)."
            yield Question("Jobs API", jobs, usual, remedy, where.address or "", is_far=True)
        case "kubernetes":
            remedy = "See that `kubectl get rayjobs` works from here."
            asked = partial(cluster.kubernetes, where.profile)
            yield Question("Kubernetes", asked, usual, remedy, is_far=True)
        case _:
            start = partial(cluster.embedded_ray, seconds=2 * of_ray)
            yield Question("Ray", start, 2 * of_ray + usual, "Give --inline to merge without Ray.")

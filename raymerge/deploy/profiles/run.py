"""The sections of a profile that say how to run, and how to reach object stores and clusters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Literal, TypeAlias

from pydantic import PlainSerializer, PlainValidator, ValidationError

from raymerge.deploy.profiles.values import Bytes, Directory, Environment, Switch, Text, read_header_sources
from raymerge.documents.fields import (
    Fault,
    FaultError,
    MapEntry,
    between,
    by,
    choice_of,
    faults_of,
    read_positive,
    read_text,
    show,
)
from raymerge.errors import OptionError
from raymerge.storage.addresses import NO_OPTIONS, StoreOptions

_HOST = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\]"
_GCS_ADDRESS = re.compile(rf"auto|({_HOST}):[0-9]{{1,5}}")
_SERVER = re.compile(rf"https?://({_HOST})(:[0-9]{{1,5}})?(/[A-Za-z0-9._~/-]*)?")
_MOST_THREADS = 256
_MOST_WORKERS = 10_000


class RunSettings(MapEntry):
    """``run``: options of a submission. None is what the command line does without the flag."""

    workers: Annotated[int | None, by(between(1, _MOST_WORKERS))] = None
    """Workers; those that an autoscaling cluster does not have yet are asked for."""
    threads: Annotated[int | None, by(between(1, _MOST_THREADS))] = None
    """Threads of a worker that compute at once."""
    memory: Bytes | None = None
    """Bytes that a worker may use beyond an idle one."""
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, by(choice_of("auto", "cpu", "cuda"))] = None
    patience: Annotated[float | None, by(read_positive)] = None
    """Seconds after which a worker that does not get on is replaced."""
    scratch: Directory | None = None
    """Directory for a shard until it is uploaded."""
    steps: Directory | None = None
    """Directory for what stages and merges make for others on the way."""


class _Storage(MapEntry):
    """``storage``: the fields of ``StoreOptions``."""

    region: Text | None = None
    endpoint: Text | None = None
    anonymous: Switch = False
    profile: Text | None = None
    allow_http: Switch = False
    kms_key: Text | None = None
    requester_pays: Switch = False


def _store_options(value: object) -> StoreOptions:
    if isinstance(value, StoreOptions):
        return value
    try:
        fields = _Storage.model_validate(value)
    except ValidationError as error:
        raise FaultError(faults_of(error)) from None
    try:
        return StoreOptions(**fields.model_dump())
    except OptionError as error:
        # They say where by "storage: " and the name of the field.
        faults = (Fault((each.where.split()[-1],), each.what, each.remedy) for each in error.problems)
        raise FaultError(faults) from None


def _plain_options(options: StoreOptions) -> dict[str, object]:
    usual = asdict(NO_OPTIONS)
    return {name: value for name, value in asdict(options).items() if value != usual[name]}


Storage: TypeAlias = Annotated[StoreOptions, PlainValidator(_store_options), PlainSerializer(_plain_options)]


def _gcs_address(value: object) -> str:
    text = read_text(value)
    if text.startswith(("http://", "https://")):
        what = f"{show(text)} is the address of a dashboard."
        raise FaultError(Fault((), what, "Write it below 'job', with target: job."))
    if _GCS_ADDRESS.fullmatch(text) is None:
        what = f"{show(text)} is not the address of a Ray head."
        raise FaultError(Fault((), what, "Write HOST:PORT, like 10.0.0.1:6379, or auto."))
    return text


def _server(value: object) -> str:
    text = read_text(value)
    if _SERVER.fullmatch(text) is None:
        what = f"{show(text)} is not the address of a dashboard."
        raise FaultError(Fault((), what, "Write it like http://head:8265."))
    return text.rstrip("/")


class ClusterSection(MapEntry):
    """``cluster``: a Ray cluster, from inside it."""

    address: Annotated[str | None, by(_gcs_address)] = None
    """``HOST:PORT`` of the head, or ``auto`` for the one that this process is in."""
    autoscaling: Switch = False
    """Whether it adds nodes for workers that wait: those of ``run: {workers: N}`` without room join later."""


class JobSection(MapEntry):
    """``job``: a Ray cluster by its Jobs API, from anywhere."""

    address: Annotated[str | None, by(_server)] = None
    """Its dashboard, like ``http://head:8265``."""
    num_cpus: Annotated[float, by(between(0))] = 0
    """CPU slots that the driver takes; it computes nothing."""
    working_dir: Directory | None = None
    """A directory that is sent with the job; None: one that has the recipe and the profile alone."""
    env: Environment = {}
    """Environment variables of the job, by name; no secrets."""
    headers_from_env: Annotated[Mapping[str, str] | None, by(read_header_sources)] = None
    """Headers of every request, each by the environment variable, here, that has its value."""

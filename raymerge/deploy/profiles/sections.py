"""The sections of a profile: run options, stores, clusters, and the pods of KubeRay; and their values.

Readers of values raise ``FaultError``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import PlainSerializer, PlainValidator, ValidationError

from raymerge.documents import fields as doc
from raymerge.documents.grammar import SWITCH, TEXT, Grammar, accepts, declared, exactly_one, map_of
from raymerge.errors import OptionError
from raymerge.storage.addresses import NO_OPTIONS, StoreOptions, is_path, shown
from raymerge.units import SIZE_FORM, parse_size

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(
    r"(?i)token(?!izer)|passw|pass(_|$)|secret|credential|key(_|$)|sas(_|$)|connection_?string|signature"
)
_FILE_NAME = re.compile(r"(?i).*_(file|path|dir)|GOOGLE_APPLICATION_CREDENTIALS")
"""Variables with the path of a secret, which is no secret."""
_FACTORS = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
    "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
}  # fmt: skip
_MOST_SUBDOMAIN = 253
_QUANTITY_FORM: Grammar = {
    "type": ["number", "string"],
    "exclusiveMinimum": 0,
    "pattern": f"^{_QUANTITY.pattern}$",
}
_TEXTS: Grammar = {"type": "object", "additionalProperties": TEXT}
_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_AFFINITY_RULES = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


@accepts({"type": ["integer", "string"], "minimum": 1, "pattern": SIZE_FORM})
def read_bytes(value: object) -> int:
    try:
        size = parse_size(value) if isinstance(value, (int, str)) else 0
    except ValueError as error:
        raise doc.refusal(f"{doc.show(value)} is not a size.", "Write it like 8GiB.") from error
    if size < 1:
        raise doc.refusal(f"{doc.show(value)} holds nothing.", "Write a size like 8GiB.")
    return size


@accepts(_QUANTITY_FORM)
def read_quantity(value: object) -> str:
    """A positive amount as Kubernetes writes it: ``8``, ``500m``, ``16Gi``."""
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if not isinstance(text, str) or _QUANTITY.fullmatch(text) is None:
        remedy = "Write it as Kubernetes does: 4 or 500m for processors, 16Gi for memory."
        raise doc.refusal(f"{doc.show(value)} is not an amount.", remedy)
    if amount(text) <= 0:
        raise doc.refusal(f"{doc.show(value)} is nothing.", "Write more than 0.")
    return text


@accepts(_QUANTITY_FORM)
def read_memory_quantity(value: object) -> str:
    """Bytes as Kubernetes writes them; less than a mebibyte is a forgotten unit."""
    text = read_quantity(value)
    if amount(text) < 2**20:
        what = f"{doc.show(value)} means {amount(text)} bytes."
        raise doc.refusal(what, f"Write it with its unit, like {text.rstrip('m')}Gi.")
    return text


def amount(quantity: str) -> Decimal:
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None
    return Decimal(match.group(1)) * _FACTORS[match.group(2) or ""]


def matching(pattern: str, what: str, remedy: str) -> Callable[[object], str]:
    """A reader of texts that match as a whole; ``what`` stands behind the value in the fault of others."""
    compiled = re.compile(pattern)

    def read(value: object) -> str:
        text = doc.read_text(value)
        if compiled.fullmatch(text) is None:
            raise doc.refusal(f"{doc.show(text)} {what}", remedy)
        return text

    return accepts({**TEXT, "pattern": f"^({pattern})$"})(read)


_NO_NAME = "cannot be a name on Kubernetes."
read_label = matching(_LABEL, _NO_NAME, "Write small letters, digits and dashes, at most 63 of them.")
"""An RFC 1123 label, as of a namespace or volume."""
_read_subdomain = matching(_SUBDOMAIN.pattern, _NO_NAME, "Write small letters, digits, dashes and dots.")


@accepts({**TEXT, "pattern": f"^{_SUBDOMAIN.pattern}$", "maxLength": _MOST_SUBDOMAIN})
def read_object_name(value: object) -> str:
    """A name of a Kubernetes object: labels joined by dots, at most 253 characters."""
    name = _read_subdomain(value)
    if len(name) > _MOST_SUBDOMAIN:
        raise doc.refusal(f"{doc.show(name)} has more than {_MOST_SUBDOMAIN} characters.", "Shorten it.")
    return name


@accepts({**TEXT, "pattern": "/"})
def read_resource_name(value: object) -> str:
    text = doc.read_text(value)
    if "/" not in text or not _is_qualified(text):
        what = f"{doc.show(value)} is not the name of a resource."
        raise doc.refusal(what, "Write it like nvidia.com/gpu.")
    return text


def texts_by_name(
    fault_of: Callable[[str, str], tuple[str, str] | None],
) -> Callable[[object], Mapping[str, str]]:
    """A reader of maps from names to texts; ``fault_of`` says what is wrong with one, and the remedy."""

    def read(value: object) -> Mapping[str, str]:
        if not isinstance(value, Mapping):
            raise doc.refusal(
                f"{doc.show(value)} is {doc.kind(value)}; expected a map.", "Write it as {name: value}."
            )
        faults = []
        for key, text in value.items():
            if not isinstance(text, str):
                fault: tuple[str, str] | None = (
                    f"{doc.show(text)} is {doc.kind(text)}; expected a text.",
                    "Put it in quotes.",
                )
            elif "\0" in text:
                fault = "it holds the character U+0000.", "Remove it."
            else:
                fault = fault_of(str(key), text)
            if fault is not None:
                faults.append(doc.Fault((key,), *fault))
        if faults:
            raise doc.FaultError(faults)
        return dict(value)

    return accepts(_TEXTS)(read)


@texts_by_name
def read_labels(key: str, text: str) -> tuple[str, str] | None:
    if not _is_qualified(key):
        return f"'{key}' cannot be the key of a label.", "Write it like example.com/team."
    if text and _QUALIFIED.fullmatch(text) is None:
        remedy = "Write at most 63 letters, digits, dashes, underscores and dots."
        return f"{doc.show(text)} cannot be the value of a label.", remedy
    return None


@texts_by_name
def read_annotations(key: str, _: str) -> tuple[str, str] | None:
    what = f"'{key}' cannot be the key of an annotation."
    return None if _is_qualified(key) else (what, "Write it like example.com/team.")


@texts_by_name
def read_environment(name: str, _: str) -> tuple[str, str] | None:
    """Environment variables; names of secrets are refused."""
    if _VARIABLE.fullmatch(name) is None:
        return f"'{name}' cannot be the name of a variable.", "Write letters, digits and underscores."
    if _SECRET_NAME.search(name) and not _FILE_NAME.fullmatch(name):
        what = f"'{name}' is a secret by its name, and a profile is sent about for all to read."
        return what, "Take it out: name a secret in 'env_from_secrets', or set it on the cluster's nodes."
    return None


@texts_by_name
def read_header_sources(header: str, variable: str) -> tuple[str, str] | None:
    """Request headers, each with the environment variable that holds its value."""
    if re.fullmatch(r"[A-Za-z0-9-]+", header) is None:
        return f"'{header}' cannot be a header.", "Write it like Authorization."
    if _VARIABLE.fullmatch(variable) is None:
        # Not shown: this may be the secret itself.
        what = "what stands here is not the name of an environment variable."
        return what, "Write the variable's name; its value is read when it is needed."
    return None


@accepts({**TEXT, "pattern": "^/[^:]*$"})
def read_absolute(value: object) -> str:
    text = doc.read_text(value)
    if not text.startswith("/") or ".." in text.split("/") or text.strip("/") == "" or ":" in text:
        what = f"{doc.show(value)} is not an absolute path below /."
        raise doc.refusal(what, "Write it like /mnt/models.")
    return "/" + "/".join(step for step in text.split("/") if step not in ("", "."))


@accepts({**TEXT, "pattern": "^[^/]"})
def read_sub_path(value: object) -> str:
    text = doc.read_text(value)
    steps = [step for step in text.split("/") if step not in ("", ".")]
    if text.startswith("/") or ".." in steps or not steps:
        what = f"{doc.show(value)} is not a path within a volume."
        raise doc.refusal(what, "Write it like teams/merging.")
    return "/".join(steps)


@accepts(
    {
        "type": "object",
        "properties": {key: {"type": "object", "minProperties": 1} for key in _AFFINITIES},
        "additionalProperties": False,
        "minProperties": 1,
    }
)
def read_affinity(value: object) -> Mapping[str, Any]:
    """The affinity of a pod in Kubernetes' own form; only Kubernetes checks it."""
    if not isinstance(value, Mapping) or not value:
        what = f"{doc.show(value)} is no affinity; expected a map."
        raise doc.refusal(what, f"Write at least one of: {', '.join(_AFFINITIES)}.")
    faults = []
    for key, rules in value.items():
        if key not in _AFFINITIES:
            what = f"'{key}' is no kind of affinity."
            faults.append(doc.Fault((str(key),), what, f"Write one of: {', '.join(_AFFINITIES)}."))
        elif not isinstance(rules, Mapping) or not rules or set(rules) - set(_AFFINITY_RULES):
            what = f"{doc.show(rules)} are no rules of an affinity."
            remedy = f"Write {' or '.join(_AFFINITY_RULES)}, as a pod has them."
            faults.append(doc.Fault((key,), what, remedy))
    if faults:
        raise doc.FaultError(faults)
    return dict(value)


@accepts({**TEXT, "pattern": r"\S"})
def read_place(value: object) -> str:
    text = doc.read_text(value)
    if not text.strip():
        raise doc.refusal("an empty text is no place.", "Write a directory or s3://bucket/dir.")
    return text


@accepts({**TEXT, "pattern": r"\S"})
def read_directory(value: object) -> str:
    text = doc.read_text(value)
    if not text.strip() or not is_path(text):
        what = f"{doc.show(shown(text))} is no path of a directory."
        raise doc.refusal(what, "Write a path, like /mnt/scratch.")
    return text


def _is_qualified(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (_SUBDOMAIN.fullmatch(prefix) is None or len(prefix) > _MOST_SUBDOMAIN):
        return False
    return _QUALIFIED.fullmatch(name) is not None


Bytes: TypeAlias = Annotated[int, doc.by(read_bytes)]
Quantity: TypeAlias = Annotated[str, doc.by(read_quantity)]
MemoryQuantity: TypeAlias = Annotated[str, doc.by(read_memory_quantity)]
Label: TypeAlias = Annotated[str, doc.by(read_label)]
ObjectName: TypeAlias = Annotated[str, doc.by(read_object_name)]
ResourceName: TypeAlias = Annotated[str, doc.by(read_resource_name)]
Labels: TypeAlias = Annotated[Mapping[str, str], doc.by(read_labels)]
Annotations: TypeAlias = Annotated[Mapping[str, str], doc.by(read_annotations)]
Environment: TypeAlias = Annotated[Mapping[str, str], doc.by(read_environment)]
AbsolutePath: TypeAlias = Annotated[str, doc.by(read_absolute)]
SubPath: TypeAlias = Annotated[str, doc.by(read_sub_path)]
Affinity: TypeAlias = Annotated[Mapping[str, Any], doc.by(read_affinity)]
Directory: TypeAlias = Annotated[str, doc.by(read_directory)]
Place: TypeAlias = Annotated[str, doc.by(read_place)]
Text: TypeAlias = Annotated[str, doc.by(doc.read_text)]
Switch: TypeAlias = Annotated[bool, doc.by(doc.read_switch)]
Count: TypeAlias = Annotated[int, doc.by(doc.between(0))]
Positive: TypeAlias = Annotated[int, doc.by(doc.between(1))]


_HOST = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\]"
_MOST_THREADS = 256
_MOST_WORKERS = 10_000


Device: TypeAlias = Literal["auto", "cpu", "cuda"]


class RunSettings(doc.MapEntry):
    """``run``: options of a submission. None is the command line's default."""

    workers: Annotated[int | None, doc.by(doc.between(1, _MOST_WORKERS))] = None
    """Number of workers; an autoscaling cluster is asked for missing ones."""
    threads: Annotated[int | None, doc.by(doc.between(1, _MOST_THREADS))] = None
    memory: Bytes | None = None
    """Bytes that a worker may use beyond an idle one."""
    device: Annotated[Device | None, doc.by(doc.choice_of(*get_args(Device)))] = None
    patience: Annotated[float | None, doc.by(doc.read_positive)] = None
    """Seconds without progress after which a worker is replaced."""
    scratch: Directory | None = None
    steps: Directory | None = None
    """Directory for intermediate results of stages and merges."""


class _Storage(doc.MapEntry):
    region: Text | None = None
    endpoint: Text | None = None
    anonymous: Switch = False
    profile: Text | None = None
    allow_http: Switch = False
    kms_key: Text | None = None
    requester_pays: Switch = False


_STORAGE = map_of(
    {name: SWITCH if field.default is False else TEXT for name, field in _Storage.model_fields.items()}
)


@accepts(_STORAGE)
def _store_options(value: object) -> StoreOptions:
    if isinstance(value, StoreOptions):
        return value
    try:
        fields = _Storage.model_validate(value)
    except ValidationError as error:
        raise doc.FaultError(doc.faults_of(error)) from None
    try:
        return StoreOptions(**fields.model_dump())
    except OptionError as error:
        # They say where by "storage: " and the name of the field.
        faults = (doc.Fault((each.where.split()[-1],), each.what, each.remedy) for each in error.problems)
        raise doc.FaultError(faults) from None


def _plain_options(options: StoreOptions) -> dict[str, object]:
    usual = asdict(NO_OPTIONS)
    return {name: value for name, value in asdict(options).items() if value != usual[name]}


Storage: TypeAlias = Annotated[StoreOptions, PlainValidator(_store_options), PlainSerializer(_plain_options)]


_read_head = matching(
    rf"auto|({_HOST}):[0-9]{{1,5}}",
    "is not the address of a Ray head.",
    "Write HOST:PORT, like 10.0.0.1:6379, or auto.",
)
_read_server = matching(
    rf"https?://({_HOST})(:[0-9]{{1,5}})?(/[A-Za-z0-9._~/-]*)?",
    "is not the address of a dashboard.",
    "Write it like http://head:8265.",
)


@accepts(declared(_read_server))
def _read_dashboard(value: object) -> str:
    return _read_server(value).rstrip("/")


@accepts(declared(_read_head))
def _gcs_address(value: object) -> str:
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise doc.refusal(
            f"{doc.show(value)} is the address of a dashboard.", "Write it below 'job', with target: job."
        )
    return _read_head(value)


class ClusterSection(doc.MapEntry):
    """``cluster``: a Ray cluster, from inside it."""

    address: Annotated[str | None, doc.by(_gcs_address)] = None
    """``HOST:PORT`` of the head, or ``auto`` for the cluster of this process."""
    autoscaling: Switch = False
    """Whether it adds nodes for waiting workers: those of ``run: {workers: N}`` without room join later."""


class JobSection(doc.MapEntry):
    """``job``: a Ray cluster by its Jobs API, from anywhere."""

    address: Annotated[str | None, doc.by(_read_dashboard)] = None
    num_cpus: Annotated[float, doc.by(doc.between(0))] = 0
    """CPU slots that the driver takes; it computes nothing."""
    working_dir: Directory | None = None
    """A directory sent with the job; None: recipe and profile only."""
    env: Environment = {}
    headers_from_env: Annotated[Mapping[str, str] | None, doc.by(read_header_sources)] = None
    """Request headers, each with the local environment variable that holds its value."""


_SOURCES = ("pvc", "empty_dir", "host_path", "secret", "config_map")


Operator: TypeAlias = Literal["Exists", "Equal"]
Effect: TypeAlias = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class Toleration(doc.MapEntry):
    key: Text | None = None
    operator: Annotated[Operator, doc.by(doc.choice_of(*get_args(Operator)))] = "Equal"
    """``Equal``: the value has to match."""
    value: Text | None = None
    effect: Annotated[Effect | None, doc.by(doc.choice_of(*get_args(Effect)))] = None

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[doc.Fault]:
        """Kubernetes refuses a value with ``Exists``, and ``Equal`` without a key."""
        is_exists = data.get("operator") == "Exists"
        if is_exists and data.get("value") is not None:
            yield doc.Fault(
                ("value",), "a value has no meaning with the operator Exists.", "Remove one of the two."
            )
        if not is_exists and data.get("key") is None:
            yield doc.Fault(
                (), "a toleration without a key holds for every taint.", "Write operator: Exists too."
            )


class EmptyDir(doc.MapEntry):
    size_limit: MemoryQuantity | None = None
    """Bytes; the pod is evicted above it."""
    medium: Annotated[Literal["Memory"] | None, doc.by(doc.choice_of("Memory"))] = None
    """``Memory``: in memory, counted as the pod's; None: on the node's disk."""


class Volume(doc.MapEntry):
    name: Label
    mount_path: AbsolutePath
    read_only: Switch = False
    pvc: ObjectName | None = None
    """A persistent volume claim; ReadWriteMany if pods are on several nodes."""
    sub_path: SubPath | None = None
    """The directory of the claim to mount; None: its root."""
    empty_dir: EmptyDir | None = None
    host_path: AbsolutePath | None = None
    """A directory of each node; of a shared filesystem if nodes have to see the same files."""
    secret: ObjectName | None = None
    config_map: ObjectName | None = None

    grammar: ClassVar[Grammar] = exactly_one(*_SOURCES)

    @property
    def is_shared(self) -> bool:
        return self.pvc is not None or self.host_path is not None

    @property
    def is_writable(self) -> bool:
        return not self.read_only and self.secret is None and self.config_map is None

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[doc.Fault]:
        given = [name for name in _SOURCES if data.get(name) is not None]
        if not given:
            yield doc.Fault((), "the volume has no source.", f"Write one of: {', '.join(_SOURCES)}.")
        if len(given) > 1:
            what = f"the volume has {len(given)} sources, {' and '.join(given)}."
            yield doc.Fault((given[1],), what, "Keep one of them.")
        if data.get("sub_path") is not None and data.get("pvc") is None:
            what = "only a volume with a claim has a sub_path."
            yield doc.Fault(("sub_path",), what, "Remove it, or write pvc.")


class Head(doc.MapEntry):
    """The pod of Ray's head and the driver; it computes nothing."""

    cpu: Quantity = "2"
    memory: MemoryQuantity = "8Gi"
    node_selector: Labels = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity | None = None
    runtime_class: ObjectName | None = None


class WorkerGroup(doc.MapEntry):
    name: Label
    replicas: Count = 1
    min_replicas: Count | None = None
    """With autoscaling; None: 0."""
    max_replicas: Annotated[int | None, doc.by(doc.between(1))] = None
    """With autoscaling; None: ``replicas``."""
    cpu: Quantity
    memory: MemoryQuantity
    gpus: Count = 0
    gpu_resource: ResourceName = "nvidia.com/gpu"
    labels: Labels = {}
    """Labels of Ray's nodes."""
    node_selector: Labels = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity | None = None
    runtime_class: ObjectName | None = None
    idle_timeout_seconds: Annotated[int | None, doc.by(doc.between(1))] = None
    """Seconds after which an idle pod is removed, with autoscaling; None: the cluster's."""
    volumes: tuple[Volume, ...] | None = None
    """Replaces the volumes of all pods, unless None."""


SubmissionMode: TypeAlias = Literal["HTTPMode", "K8sJobMode", "SidecarMode"]
Upscaling: TypeAlias = Literal["Default", "Conservative", "Aggressive"]
Pulling: TypeAlias = Literal["IfNotPresent", "Always", "Never"]


_read_image = matching(
    r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    "is not the name of an image.",
    "Write it like registry.example/raymerge:0.1.0.",
)
_version = matching(
    r"[0-9]+\.[0-9]+\.[0-9]+([A-Za-z0-9.]*)", "is not a version of Ray.", "Write it like '2.60.0'."
)


@accepts(declared(_read_image))
def _image(value: object) -> str:
    text = _read_image(value)
    if ":" not in text.rpartition("/")[2]:
        what = f"{doc.show(text)} names no version: workers that start later could be another."
        raise doc.refusal(what, "Add a tag, like :0.1.0, or a digest.")
    return text


class Autoscaling(doc.MapEntry):
    enabled: Switch = False
    idle_timeout_seconds: Positive = 60
    upscaling_mode: Annotated[Upscaling, doc.by(doc.choice_of(*get_args(Upscaling)))] = "Default"


class SecurityContext(doc.MapEntry):
    """User and groups of processes in containers; never root."""

    run_as_user: Annotated[int, doc.by(doc.between(1))] = 1000
    run_as_group: Annotated[int, doc.by(doc.between(1))] = 100
    fs_group: Annotated[int | None, doc.by(doc.between(1))] = 100
    """Group that owns mounted volumes; None: unchanged."""


class Kubernetes(doc.MapEntry):
    """``kubernetes``: a Ray cluster that KubeRay's operator creates for a run."""

    namespace: Label = "default"
    image: Annotated[str, doc.by(_image)]
    """Image with Ray, raymerge and its dependencies, with tag or digest."""
    image_pull_policy: Annotated[Pulling, doc.by(doc.choice_of(*get_args(Pulling)))] = "IfNotPresent"
    image_pull_secrets: tuple[ObjectName, ...] = ()
    service_account: ObjectName | None = None
    """Identity of pods in the cluster and, by workload identity, in object stores."""
    ray_version: Annotated[str, doc.by(_version)]
    submission_mode: Annotated[SubmissionMode, doc.by(doc.choice_of(*get_args(SubmissionMode)))] = "HTTPMode"
    token_auth: Switch = True
    token_secret: ObjectName | None = None
    """A secret with the token at ``auth_token``; None: the operator makes one."""
    head: Head = Head()
    workers: tuple[WorkerGroup, ...]
    autoscaling: Autoscaling = Autoscaling()
    volumes: tuple[Volume, ...] = ()
    env: Environment = {}
    env_from_secrets: tuple[ObjectName, ...] = ()
    """Secrets whose entries are environment variables of all containers."""
    queue: ObjectName | None = None
    priority_class: ObjectName | None = None
    ttl_seconds: Count = 300
    """Seconds that pods of a finished run are kept."""
    backoff_limit: Count = 2
    """Retries of a failed run; each resumes."""
    active_deadline_seconds: Annotated[int | None, doc.by(doc.between(1))] = None
    """Limit of a run in seconds; None: no limit."""
    termination_grace_seconds: Annotated[int, doc.by(doc.between(1))] = 60
    """Seconds from SIGTERM to SIGKILL of a pod."""
    labels: Labels = {}
    annotations: Annotations = {}
    security: SecurityContext = SecurityContext()

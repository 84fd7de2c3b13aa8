"""Profiles: loaded, for Kubernetes, and those of the repository."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from kits.kubernetes_profiles import SHARED, kubernetes_data, kubernetes_profile

from raymerge.deploy.profiles import Profile, load_profile, parse_profile, profile_from_mapping
from raymerge.deploy.profiles.sections import (
    Autoscaling,
    ClusterSection,
    EmptyDir,
    Head,
    JobSection,
    Kubernetes,
    RunSettings,
    SecurityContext,
    Toleration,
    Volume,
    WorkerGroup,
)
from raymerge.errors import ProfileError
from raymerge.storage.addresses import StoreOptions

FULL = """\
target: job
output: s3://b/merged
run: {workers: 8, threads: null, memory: 8GiB, device: cpu, patience: 900, scratch: /tmp/x, steps: /tmp/y}
storage: {region: us-east-1, endpoint: "http://minio:9000", anonymous: false, profile: null, allow_http: true,
  kms_key: alias/models, requester_pays: true}
cluster: {address: "10.0.0.1:6379"}
job:
  address: http://head:8265/
  num_cpus: 0
  working_dir: null
  env: {OMP_NUM_THREADS: "4"}
  headers_from_env: {Authorization: MY_TOKEN}
"""


def problems(text: str) -> list[str]:
    """What is said about a profile, by its lines."""
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "p.yml")
    return str(caught.value).splitlines()


def test_every_section_is_read() -> None:
    profile = parse_profile(FULL)
    assert (profile.target, profile.output) == ("job", "s3://b/merged")
    run = profile.run
    assert (run.workers, run.threads, run.memory, run.device) == (8, None, 8 * 2**30, "cpu")
    assert (run.patience, run.scratch, run.steps) == (900.0, "/tmp/x", "/tmp/y")
    assert profile.storage == StoreOptions(
        "us-east-1", "http://minio:9000", allow_http=True, kms_key="alias/models", requester_pays=True
    )
    assert profile.cluster.address == "10.0.0.1:6379"
    assert profile.job.address == "http://head:8265"
    assert profile.job.env == {"OMP_NUM_THREADS": "4"}
    assert profile.job.headers_from_env == {"Authorization": "MY_TOKEN"}
    assert profile.kubernetes is None


def test_a_profile_is_written_and_read_back_the_same() -> None:
    profile = parse_profile(FULL)
    assert parse_profile(profile.as_yaml()) == profile


def test_inside_the_cluster_it_is_the_same_run_on_the_cluster_that_is_there() -> None:
    profile = parse_profile(FULL)
    inside = profile.for_inside("s3://b/other")
    assert (inside.target, inside.output) == ("cluster", "s3://b/other")
    assert inside.cluster == ClusterSection(address="auto")
    assert (inside.run, inside.storage) == (profile.run, profile.storage)
    assert inside.job == Profile().job
    assert parse_profile(inside.as_yaml()) == inside
    growing = parse_profile("cluster: {autoscaling: true}").for_inside("s3://b/other")
    assert growing.cluster == ClusterSection(address="auto", autoscaling=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("targt: local", "p.yml:1:1: unknown key 'targt'. Did you mean 'target'?"),
        ("run: {worker: 2}", "p.yml:1:7: unknown key 'worker'. Did you mean 'workers'?"),
        ("target: kubernets", "p.yml:1:1: target: 'kubernets' is not known here. Did you mean 'kubernetes'?"),
        ("run: {workers: 0}", "p.yml:1:7: workers: 0 is out of range."),
        ("run: {workers: 10001}", "p.yml:1:7: workers: 10001 is out of range. Write a whole"),
        ("run: {memory: much}", "p.yml:1:7: memory: 'much' is not a size."),
        ("run: {device: gpu}", "p.yml:1:7: device: 'gpu' is not known here."),
        ("run: {patience: 0}", "p.yml:1:7: patience: 0 is not above 0."),
        ("run: [1]", "p.yml:1:1: run: [1] is a list where a map belongs."),
        ("storage: {endpont: x}", "p.yml:1:11: unknown key 'endpont'. Did you mean 'endpoint'?"),
        ("storage: {endpoint: 'http://x'}", "p.yml:1:11: endpoint: http://x is spoken to without TLS"),
        ("storage: {kms_key: ''}", "p.yml:1:11: kms_key: is empty, or holds spaces"),
        ("storage: {region: eu west}", "p.yml:1:11: region: is empty, or holds spaces"),
        ("storage: {anonymous: 1}", "p.yml:1:11: anonymous: 1 is a number; expected true or false."),
        ("cluster: {address: 'http://h:8265'}", "p.yml:1:11: address: 'http://h:8265' is the address of a"),
        ("cluster: {address: head}", "p.yml:1:11: address: 'head' is not the address of a Ray head."),
        ("job: {address: 'head:8265'}", "p.yml:1:7: address: 'head:8265' is not the address of a dashboard."),
        ("job: {env: {A: 1}}", "p.yml:1:13: A: 1 is a number; expected a text."),
        ("job: {env: {A-B: x}}", "p.yml:1:13: 'A-B' cannot be the name of a variable."),
        ('job: {env: {A: "\\0"}}', "p.yml:1:13: A: it holds the character U+0000."),
        ("run: {scratch: ''}", "p.yml:1:7: scratch: '' is no path of a directory. Write a path"),
        ("run: {scratch: 's3://b/x'}", "p.yml:1:7: scratch: 's3://b/x' is no path of a directory."),
        (
            "target: job\nrun: {steps: below}",
            "p.yml:2:7: steps: 'below' is relative to a directory of this machine, which the cluster",
        ),
        ("job: {working_dir: 's3:/b/x'}", "p.yml:1:7: working_dir: 's3:/b/x' is no path of a directory."),
        ("output: ''", "p.yml:1:1: output: an empty text is no place."),
        ("target: kubernetes", "p.yml:1:1: target: the target kubernetes needs the section 'kubernetes'"),
        ("- local", "p.yml:1:1: a profile is a map of keys to values. Start with 'target: ...'."),
        ("# nothing", "p.yml:1:1: the profile is empty. Start with 'target: ...'."),
        ("target: local\n---\ntarget: job", "p.yml:2:1: a second profile starts here, the file has 2"),
        ("target: local\ntarget: job", "p.yml:2:1: the key 'target' was given before, on line 1."),
        ("run: {workers: !!python/name:os.system x}", "p.yml:1:7: workers: the tag "),
        ("run: {a: 1", "p.yml:1:11: this is not YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_to_write(text: str, said: str) -> None:
    (line,) = problems(text)
    assert line.startswith(said)


def test_everything_that_is_wrong_is_told_in_the_order_of_the_text() -> None:
    lines = problems("run: {workers: 0, device: gpu}\njob: {addres: x}\n")
    assert [line.partition(": ")[0] for line in lines] == ["p.yml:1:7", "p.yml:1:19", "p.yml:2:7"]


SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCY"


@pytest.mark.parametrize(
    "text",
    [
        f"job: {{env: {{AWS_SECRET_ACCESS_KEY: {SECRET}}}}}",
        *(
            f"job: {{env: {{{name}: {SECRET}}}}}"
            for name in ("AZURE_STORAGE_SAS_KEY", "AWS_SSE_CUSTOMER_KEY", "DB_PASS", "HFTOKEN")
        ),
        f"job: {{env: {{X: hf_{SECRET}AAAAAAAAAA}}}}",
        f"job: {{address: 'http://me:{SECRET}@head:8265'}}",
        f"job: {{headers_from_env: {{Authorization: 'Bearer {SECRET}'}}}}",
        f"storage: {{endpoint: 'https://me:{SECRET}@s3.example'}}",
        f"output: s3://me:{SECRET}@bucket/x",
        f"# hf_{SECRET}AAAAAAAAAA\ntarget: local",
        f'output: "s3://me\\u003a{SECRET}@bucket/x"',
    ],
)
def test_secrets_are_refused_and_not_repeated(text: str) -> None:
    said = "\n".join(problems(text))
    assert SECRET not in said
    assert "p.yml:1:" in said


def test_a_profile_from_a_mapping_is_told_by_path() -> None:
    assert profile_from_mapping({"run": {"workers": 2}}).run.workers == 2
    with pytest.raises(ProfileError, match=r"^profile: run\.workers: 0 is out of range"):
        profile_from_mapping({"run": {"workers": 0}})


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"there is no such file\. Check the path of the profile\."):
        load_profile(tmp_path / "p.yml")
    (tmp_path / "q.yml").write_bytes(b"target: \xff")
    with pytest.raises(ProfileError, match=r"is not UTF-8\. Save the profile as UTF-8"):
        load_profile(tmp_path / "q.yml")
    with pytest.raises(ProfileError, match="the profile cannot be read"):
        load_profile(tmp_path)


def test_a_value_has_its_place_for_later_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.yml"
    path.write_text("target: local\nrun:\n  workers: 2\n")
    profile = load_profile(path)
    assert profile.where("run", "workers") == f"{path}:3:3"
    assert profile == parse_profile("target: local\nrun: {workers: 2}")


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "AWS_WEB_IDENTITY_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "HF_HOME"],
)
def test_variables_that_hold_no_secret_are_taken(name: str) -> None:
    profile = parse_profile(
        f"target: job\njob: {{address: 'http://head:8265', env: {{{name}: /mnt/x}}}}\n", "p.yml"
    )
    assert profile.job is not None
    assert profile.job.env == {name: "/mnt/x"}


SCALED = {"autoscaling": {"enabled": True}}
READ_ONLY = {"volumes": [{**SHARED, "read_only": True}]}
OWN = {"name": "a", "empty_dir": {}}
EIGHT = [{"name": f"g{n}", "cpu": 1, "memory": "4Gi"} for n in range(8)]


def said(change: dict[str, Any], group: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """What is said about a profile, by its lines."""
    with pytest.raises(ProfileError) as caught:
        profile_from_mapping(kubernetes_data(change, group, **sections))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("change", "group", "sections", "expected"),
    [
        # Bounds.
        (SCALED, {"replicas": 3, "max_replicas": 2}, {}, "workers[0].replicas: 3 replicas are not from 0"),
        (SCALED, {"min_replicas": 4, "max_replicas": 3, "replicas": 4}, {}, "are not from 4"),
        (SCALED, {"replicas": 0}, {}, "may never have a pod"),
        ({}, {"replicas": 0}, {}, "the group has no pods"),
        ({}, {"max_replicas": 4}, {}, "max_replicas has no meaning without autoscaling"),
        ({}, {"idle_timeout_seconds": 9}, {}, "idle_timeout_seconds has no meaning without autoscaling"),
        ({}, {"replicas": -1}, {}, "-1 is out of range"),
        ({"workers": []}, {}, {}, "there is no group of workers"),
        # Kueue.
        ({"queue": "q", **SCALED}, {}, {}, "Kueue reserves what a run needs"),
        ({"queue": "q", "workers": EIGHT}, {}, {}, "Kueue takes at most 7 groups of workers; there are 8"),
        # Names, images, versions.
        ({}, {"name": "CPU_1"}, {}, "'CPU_1' cannot be a name on Kubernetes"),
        ({"image": "raymerge"}, {}, {}, "names no version"),
        ({"image": "Ray merge:1"}, {}, {}, "is not the name of an image"),
        ({"ray_version": "latest"}, {}, {}, "'latest' is not a version of Ray"),
        ({"ray_version": "2.51.9"}, {}, {}, "knows no tokens; they came with 2.52"),
        ({"token_auth": False, "token_secret": "s"}, {}, {}, "but token_auth is false"),
        ({"submission_mode": "Foo"}, {}, {}, "'Foo' is not known here"),
        ({"labels": {"a b": "x"}}, {}, {}, "'a b' cannot be the key of a label"),
        ({"labels": {"team": "a b"}}, {}, {}, "'a b' cannot be the value of a label"),
        ({"labels": {"ray.io/cluster": "x"}}, {}, {}, "'ray.io/cluster' is set by raymerge or the operator"),
        ({"annotations": {"/x": "y"}}, {}, {}, "'/x' cannot be the key of an annotation"),
        # Amounts.
        ({}, {"cpu": 0}, {}, "0 is nothing"),
        ({}, {"cpu": "8 cores"}, {}, "'8 cores' is not an amount"),
        ({}, {"memory": 32}, {}, "32 means 32 bytes. Write it with its unit, like 32Gi."),
        ({}, {"memory": "32GiB"}, {}, "'32GiB' is not an amount"),
        ({}, {"gpus": 1, "gpu_resource": "gpu"}, {}, "'gpu' is not the name of a resource"),
        # Workers and devices.
        ({}, {}, {"run": {"device": "cuda"}}, "run.device: cuda is asked for, but no group of workers"),
        ({}, {}, {"run": {"workers": 17}}, "17 workers are asked for, but the pods hold at most 16"),
        ({}, {}, {"run": {"workers": 5, "threads": 4}}, "5 workers of 4 threads are asked for, but the pods"),
        ({}, {"gpus": 2}, {"run": {"workers": 5, "device": "cuda"}}, "5 workers are asked for, but the pods"),
        (SCALED, {"max_replicas": 3}, {"run": {"workers": 25}}, "the pods hold at most 24"),
        ({}, {}, {"run": {"threads": 9}}, "no pod has processors for a worker of 9 threads"),
        ({}, {}, {"run": {"memory": "32GiB"}}, "but no pod has more than"),
        # Volumes.
        ({"volumes": [SHARED, {**SHARED, "name": "b"}]}, {}, {}, "two volumes are mounted at /mnt/models"),
        ({"volumes": [SHARED, {**SHARED, "mount_path": "/b"}]}, {}, {}, "two volumes are named 'models'"),
        ({"volumes": [{**SHARED, "mount_path": "/dev"}]}, {}, {}, "would hide /dev/shm"),
        ({"volumes": [{**SHARED, "mount_path": "/etc/raymerge/x"}]}, {}, {}, "would hide /etc/raymerge"),
        ({"volumes": [{**SHARED, "mount_path": "mnt"}]}, {}, {}, "'mnt' is not an absolute path"),
        ({"volumes": [{**SHARED, "mount_path": "/a/../b"}]}, {}, {}, "is not an absolute path"),
        ({"volumes": [{**SHARED, "name": "shared-mem"}]}, {}, {}, "'shared-mem' is the name of a volume"),
        ({"volumes": [{**SHARED, "secret": "s"}]}, {}, {}, "the volume has 2 sources, pvc and secret"),
        ({"volumes": [{"name": "a", "mount_path": "/a"}]}, {}, {}, "the volume has no source"),
        ({"volumes": [{**SHARED, "sub_path": "/a"}]}, {}, {}, "'/a' is not a path within a volume"),
        ({"volumes": [{**SHARED, "sub_path": "a/../b"}]}, {}, {}, "is not a path within a volume"),
        (
            {"volumes": [{**OWN, "mount_path": "/a", "sub_path": "b"}]},
            {},
            {},
            "sub_path: only a volume with a claim",
        ),
        # Where pods run.
        ({}, {"runtime_class": "Nvidia"}, {}, "runtime_class: 'Nvidia' cannot be a name"),
        ({"head": {"affinity": []}}, {}, {}, "head.affinity: [] is no affinity; expected a map"),
        ({}, {"affinity": {"node_affinity": {}}}, {}, "'node_affinity' is no kind of affinity"),
        ({}, {"affinity": {"nodeAffinity": {"required": []}}}, {}, "are no rules of an affinity"),
        # Environment and tolerations.
        ({"env": {"RAY_ADDRESS": "x"}}, {}, {}, "'RAY_ADDRESS' is set by the operator"),
        ({"env": {"S3_SECRET_KEY": "x"}}, {}, {}, "'S3_SECRET_KEY' is a secret by its name"),
        ({}, {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, {}, "value has no meaning"),
        ({}, {"tolerations": [{"value": "b"}]}, {}, "a toleration without a key"),
        ({"security": {"run_as_user": 0}}, {}, {}, "0 is out of range"),
        # The output place.
        ({}, {}, {"output": "merged"}, "output: 'merged' is relative to a directory of this machine"),
        ({}, {}, {"output": "hf://org/name"}, "hf://org/name can be read from, and not written to"),
        ({}, {}, {"run": {"steps": "below"}}, "run.steps: 'below' is relative to a directory of"),
        (READ_ONLY, {}, {"run": {"steps": "/mnt/models/x"}}, "run.steps: /mnt/models/x is on no volume"),
        ({}, {}, {"output": "/mnt/models/x"}, "is on no volume that every pod mounts, shared and writable"),
        (READ_ONLY, {}, {"output": "/mnt/models/x"}, "is on no volume"),
        ({"volumes": [SHARED]}, {"volumes": []}, {"output": "/mnt/models/x"}, "is on no volume"),
        ({"volumes": [SHARED]}, {}, {"output": "/mnt/models"}, "is on no volume"),
        ({"volumes": [SHARED]}, {}, {"output": "file:///mnt/models2/x"}, "/mnt/models2/x is on no volume"),
        ({"volumes": [{**OWN, "mount_path": "/a"}]}, {}, {"output": "/a/x"}, "is on no volume"),
        (
            {"volumes": [SHARED, {**OWN, "mount_path": "/mnt/models/tmp"}]},
            {},
            {"output": "/mnt/models/tmp/x"},
            "no volume",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    change: dict[str, Any], group: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    lines = said(change, group, sections)
    assert len(lines) == 1, lines
    assert expected in lines[0]


def test_two_groups_of_one_name_are_refused_once() -> None:
    twice = [{"name": "a", "cpu": 1, "memory": "4Gi"}, {"name": "a", "cpu": 1, "memory": "4Gi"}]
    (line,) = said({"workers": twice}, {}, {})
    assert "two groups are named 'a'" in line


@pytest.mark.parametrize(
    "output", ["s3://b/x", "gs://b/x", "/mnt/models/x", "/mnt/models/a/b", "file:///mnt/models/x"]
)
def test_an_output_that_every_pod_reaches_is_taken(output: str) -> None:
    assert kubernetes_profile({"volumes": [SHARED]}, output=output).output == output


def test_a_node_directory_counts_as_shared_and_rounded_processors_hold_workers() -> None:
    volume = {"name": "nfs", "mount_path": "/nfs", "host_path": "/srv/nfs"}
    profile = kubernetes_profile(
        {"volumes": [volume]}, {"cpu": "7500m"}, output="/nfs/x", run={"workers": 16}
    )
    assert profile.run.workers == 16


def test_infeasible_sections_of_a_target_that_is_not_used_are_left_alone() -> None:
    """Workers and output are those of the target; what is wrong in itself is told all the same."""
    data = kubernetes_data({}, {}, run={"device": "cuda"}, output="merged")
    data["target"] = "local"
    assert profile_from_mapping(data).kubernetes is not None
    data["kubernetes"]["ray_version"] = "2.40.0"
    with pytest.raises(ProfileError, match="knows no tokens"):
        profile_from_mapping(data)


def test_a_full_profile_is_written_and_read_back_the_same() -> None:
    scratch = {"name": "s", "mount_path": "/s", "empty_dir": {"size_limit": "9Gi"}}
    spread = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
    whole = {
        "volumes": [{**SHARED, "sub_path": "a"}, scratch],
        "env": {"A": "b"},
        "security": {"fs_group": 5},
    }
    group = {
        "max_replicas": 5,
        "gpus": 2,
        "labels": {"disk": "nvme"},
        "affinity": {"podAntiAffinity": spread},
    }
    group |= {"tolerations": [{"operator": "Exists"}], "runtime_class": "nvidia"}
    profile = kubernetes_profile({**whole, **SCALED}, group, storage={"region": "x"})
    assert profile_from_mapping(profile.model_dump(mode="json", exclude_defaults=True)) == profile


SECTIONS = (
    Profile,
    RunSettings,
    ClusterSection,
    JobSection,
    Kubernetes,
    Head,
    WorkerGroup,
    Toleration,
    Autoscaling,
    Volume,
    EmptyDir,
    SecurityContext,
)

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "run"
TARGETS = {
    "laptop": "local",
    "node-8-gpus": "local",
    "ray-cluster": "cluster",
    "ray-job": "job",
    "kubernetes-gpu": "kubernetes",
    "kubernetes-cpu-s3": "kubernetes",
}


def test_every_target_has_a_profile() -> None:
    assert {path.stem for path in FOLDER.glob("*.yml")} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_a_profile_is_valid_and_says_how_it_is_used(name: str) -> None:
    path = FOLDER / f"{name}.yml"
    assert load_profile(path).target == TARGETS[name]
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"--profile configs/run/{name}.yml" in text


HINTS = {
    "ray-job": ["headers_from_env: {X-Proxy-Authorization: PROXY_TOKEN}"],
    "kubernetes-gpu": ["queue: merges", "node_selector: {nvidia.com/gpu.product: NVIDIA-H200}"],
    "kubernetes-cpu-s3": [
        "endpoint: https://minio.example:9000",
        "node_selector: {kubernetes.io/arch: amd64}",
        "volumes:",
        "  - {name: scratch, mount_path: /scratch, empty_dir: {size_limit: 200Gi}}",
        "  - {name: shared, mount_path: /shared, pvc: shared}",
        "env_from_secrets: [s3-credentials]",
    ],
}


@pytest.mark.parametrize("name", HINTS)
def test_what_a_profile_suggests_in_comments_is_valid_when_it_is_uncommented(name: str) -> None:
    text = (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
    before = parse_profile(text)
    for hint in HINTS[name]:
        assert f"# {hint}\n" in text
        text = text.replace(f"# {hint}\n", f"{hint}\n")
    assert parse_profile(text) != before


def test_the_page_on_profiles_names_every_key_and_every_file() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_0-9.-]+)`", page))
    keys = {name for section in SECTIONS for name in section.model_fields}
    keys |= {each.name for each in fields(StoreOptions)}
    assert keys - named == set()
    assert {f"{name}.yml" for name in TARGETS} <= named

"""Profiles are read with the place of every value, and all that is wrong with them is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.deploy.profiles import Profile, load_profile, parse_profile, profile_from_mapping
from raymerge.deploy.profiles.sections import ClusterSection
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
        (
            "cluster: {address: 'http://h:8265'}",
            "p.yml:1:11: address: 'http://h:8265' is the address of a dash",
        ),
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

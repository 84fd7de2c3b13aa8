"""Options: limits, profiles, clusters, remote places, and their help."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from kits.checkpoint_maker import tiny_llama
from kits.command_line import WIDE, Outcome, run_command
from kits.control_group import process_group
from kits.crd import schema_errors
from kits.kube_operator import broken_rules
from kits.kubernetes_profiles import RECIPE
from kits.merges import MEAN, make_models, write_recipe
from kits.recipe_maker import linear
from kits.s3_server import S3Server, s3_server

from raymerge import api
from raymerge.api import submit, verify_load
from raymerge.cli.options import given, options_from, planned_options, with_flags
from raymerge.deploy.profiles import load_profile, parse_profile
from raymerge.deploy.targets import kubernetes
from raymerge.deploy.targets.target import Submission
from raymerge.errors import OptionError, ProfileError, TransientError
from raymerge.options import USUAL_PATIENCE, RunOptions
from raymerge.storage import retry
from raymerge.storage.retry import KEPT
from raymerge.storage.temporary import OwnDirectory

_RECIPE = """
merge_method: linear
models: [{model: one}, {model: two}]
parameters: {weight: 0.5}
dtype: float32
"""
_DROP_BOUNDING, _PRIVILEGES = 24, (21, 24)
"""Of prctl; and the capabilities that the limit on processes does not hold for."""
_NOBODY_ELSE = 54_321
"""A user without any process, so that only those of the test count."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's limits are set by root alone")


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """Two models and their recipe, where every user may write."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_models(Path(name))
        write_recipe(folder, _RECIPE)
        folder.chmod(0o777)
        yield folder


def _run(
    folder: Path, *args: str, limit: Callable[[], object] | None = None, stdout: str | None = None
) -> tuple[int, str]:
    """Exit code and what was printed on standard error, of a command in a process of its own."""
    with open(stdout or os.devnull, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "raymerge.cli", *args],
            cwd=folder,
            env={**os.environ, **WIDE, "OMP_NUM_THREADS": "1"},
            preexec_fn=limit,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert "Traceback" not in done.stderr
    assert "bug in raymerge" not in done.stderr
    return done.returncode, done.stderr


def _file_limit(nbytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def _process_limit(count: int) -> Callable[[], None]:
    def limit() -> None:
        for each in _PRIVILEGES:
            ctypes.CDLL(None).prctl(_DROP_BOUNDING, each, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
        os.setresuid(_NOBODY_ELSE, 0, 0)

    return limit


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        pytest.param(["--version"], marks=pytest.mark.slow),
        pytest.param(["methods"], marks=pytest.mark.slow),
        pytest.param(["plan", "recipe.yml", "--json"], marks=pytest.mark.slow),
    ],
)
def test_a_full_standard_output(args: list[str], models: Path) -> None:
    code, said = _run(models, *args, stdout="/dev/full")
    assert code == 3
    assert "what is printed here cannot be written: No space left on device. Free space" in said


@pytest.mark.slow
def test_a_merge_whose_standard_output_is_full_goes_on_by_the_same_command(models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", "full", "--inline")
    code, said = _run(models, *args, stdout="/dev/full")
    assert (code, "cannot be written" in said) == (3, True)
    assert _run(models, *args)[0] == 0


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", "limited")
    code, said = _run(models, *args, "--inline", limit=_file_limit(50_000))
    assert code == 3
    assert "model.safetensors.part: is larger than a file may be here: this process may write 50000" in said
    assert "ulimit -f" in said
    assert "Free space" not in said
    code, said = _run(models, *args, "--workers", "1", limit=_file_limit(50_000))
    assert code == 2
    assert "ray: an embedded Ray writes a file of 209715200 bytes, and this process may write 50000" in said
    assert _run(models, *args, "--inline")[0] == 0


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_limit_on_processes(count: int, models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", f"threads-{count}", "--inline")
    code, said = _run(models, *args, limit=_process_limit(count))
    assert code == 3
    assert "no further thread or process may be started here: a limit of the user (ulimit -u)" in said
    assert "the same command goes on" in said.lower()


@pytest.mark.slow
@needs_root
def test_a_limit_on_processes_that_ray_cannot_start_within(models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", "none", "--workers", "1")
    code, said = _run(models, *args, limit=_process_limit(60))
    assert code == 2
    assert "ray: an embedded Ray starts more than 128 threads, and no more than" in said
    assert "give --inline" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "flags", "code", "expected"),
    [
        (2, ["--inline"], 3, "the same command goes on"),
        (4, ["--inline"], 3, "the same command goes on"),
        (60, ["--workers", "1"], 2, "ray: an embedded ray starts more than 128 threads, and no more than"),
    ],
)
def test_a_container_s_limit_on_processes(
    count: int, flags: list[str], code: int, expected: str, models: Path
) -> None:
    args = ("submit", "recipe.yml", "-o", f"group-{count}", *flags)
    with process_group(count) as group:
        if group is None:
            pytest.skip("a control group is made by root alone, and not in every container")
        found, said = _run(models, *args, limit=lambda: group.write_text(str(os.getpid())))
    assert found == code
    assert "of the container (pids.max)" in said
    assert expected in said.lower()


PROFILE = """\
run: {workers: 3, threads: 2, memory: 2GiB, device: cpu, patience: 30}
storage: {region: r}
"""


def test_the_profile_fills_what_no_flag_gives() -> None:
    options = options_from(parse_profile(PROFILE), given(replace=True), address="h:1")
    assert (options.workers, options.threads, options.memory) == (3, 2, 2 * 2**30)
    assert (options.device, options.patience, options.address) == ("cpu", 30.0, "h:1")
    assert options.storage.region == "r"
    assert options.replace


def test_only_merges_run_in_this_process_by_themselves(tmp_path: Path) -> None:
    helps = {verb: run_command(verb, "--help", cwd=tmp_path).text for verb in ("submit", "verify", "report")}
    assert all("--inline" in text for text in helps.values())
    assert ["small merge" in text for text in helps.values()] == [True, False, False]


def test_a_flag_wins_even_where_it_says_what_is_usual() -> None:
    flags = given(workers=5, device="auto", patience=USUAL_PATIENCE)
    options = options_from(parse_profile(PROFILE), flags, address=None)
    assert (options.workers, options.device, options.patience) == (5, "auto", USUAL_PATIENCE)
    assert options.threads == 2


def test_flags_are_sent_away_within_the_profile_and_its_rules_hold_for_them() -> None:
    profile = parse_profile(PROFILE)
    assert with_flags(profile, given()) is profile
    sent = with_flags(profile, given(workers=5, memory=2**30))
    assert (sent.run.workers, sent.run.memory, sent.run.threads) == (5, 2**30, 2)
    assert sent.storage == profile.storage
    with pytest.raises(ProfileError, match=r"^--workers: 0 is out of range"):
        with_flags(profile, given(workers=0))


def test_a_plan_is_made_with_the_profile(tmp_path: Path) -> None:
    make_models(tmp_path)
    recipe = write_recipe(tmp_path, MEAN)
    (tmp_path / "p.yml").write_text("run: {memory: 256MiB}\noutput: there\n")
    outcome = run_command("plan", recipe, "--profile", "p.yml", "--json", cwd=tmp_path)
    assert outcome.code == 0
    assert json.loads(outcome.text)["memory"]["budget"] == 2**28
    flag = run_command("plan", recipe, "--profile", "p.yml", "--memory", "1GiB", "--json", cwd=tmp_path)
    assert json.loads(flag.text)["memory"]["budget"] == 2**30
    (tmp_path / "p.yml").write_text("run: {memori: 256MiB}\n")
    refused = run_command("plan", recipe, "--profile", "p.yml", cwd=tmp_path)
    refused.check_refusal("p.yml:1:7: unknown key 'memori'")


def test_a_plan_for_a_cluster_takes_its_workers_for_those_of_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "p.yml"
    path.write_text("target: job\noutput: s3://b/x\njob: {address: 'http://h:8265'}\n")
    options, place = planned_options(str(path), None)
    assert (options.address, place) == ("auto", "s3://b/x")
    assert planned_options(None, 5) == (RunOptions(memory=5), None)


ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "cluster" / "kuberay"
RECIPE_FLAG = ("--recipe", "r.yml")
RENDERED = {
    "kubernetes-gpu": ("kubernetes-gpu", "--recipe", "cluster/kuberay/recipe-volume.yml"),
    "kubernetes-cpu-s3": ("kubernetes-cpu-s3", "--recipe", "cluster/kuberay/recipe-s3.yml"),
    "raycluster-gpu": ("kubernetes-gpu", "--kind", "raycluster"),
}
CLUSTER_PROFILE = """\
target: kubernetes
output: s3://models/merged
kubernetes:
  image: registry.example/raymerge:1
  ray_version: 2.60.0
  workers: [{name: cpu, cpu: 8, memory: 32Gi}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.yml").write_text(CLUSTER_PROFILE)
    (tmp_path / "r.yml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize("name", RENDERED)
def test_the_manifests_of_the_repository_are_the_output_for_its_profiles(name: str) -> None:
    """``UPDATE_GOLDEN=1`` writes them."""
    profile, *options = RENDERED[name]
    outcome = run_command("cluster", "render", f"configs/run/{profile}.yml", *options, cwd=ROOT)
    assert outcome.code == 0, outcome.text
    path = KUBERAY / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(outcome.text, encoding="utf-8")
    assert outcome.text == path.read_text(encoding="utf-8")
    manifests = list(yaml.safe_load_all(outcome.text))
    rays = [each for each in manifests if each["kind"] != "ConfigMap"]
    assert len(rays) == 1
    assert schema_errors(rays[0]) == []
    assert broken_rules(rays[0]) == []


def test_files_are_written_one_for_each_object(folder: Path) -> None:
    outcome = run_command("cluster", "render", "p.yml", "--recipe", "r.yml", "-o", "made/here", cwd=folder)
    assert (outcome.code, outcome.text) == (0, "")
    made = {path.name: yaml.safe_load(path.read_text()) for path in (folder / "made" / "here").iterdir()}
    assert {name: each["kind"] for name, each in made.items()} == {
        "configmap.yaml": "ConfigMap",
        "rayjob.yaml": "RayJob",
    }
    assert made["configmap.yaml"]["data"]["recipe.yml"] == RECIPE


def test_what_is_rendered_is_what_is_sent_and_its_name_follows_from_it(folder: Path) -> None:
    volume = "  volumes: [{name: models, mount_path: /mnt/models, pvc: models}]\n"
    (folder / "p.yml").write_text(
        CLUSTER_PROFILE.replace("s3://models/merged", "file:///mnt/models/merged/") + volume
    )
    command = ("cluster", "render", "p.yml", "--recipe", "r.yml")
    rendered = [run_command(*command, cwd=folder).text for _ in range(2)]
    # Applied again, it changes nothing.
    assert rendered[0] == rendered[1]
    config, job = yaml.safe_load_all(rendered[0])
    name, output = job["metadata"]["name"], "/mnt/models/merged"
    profile = load_profile(str(folder / "p.yml"))
    sent = kubernetes._manifests(Submission(RECIPE, "r.yml", output, profile, name))
    assert (config, job) == sent
    assert f"--run {name}" in job["spec"]["entrypoint"]
    (folder / "r.yml").write_text(RECIPE + "# another\n")
    other = list(yaml.safe_load_all(run_command(*command, cwd=folder).text))[1]["metadata"]["name"]
    assert other != name


def test_without_a_recipe_it_is_a_cluster_that_stands(folder: Path) -> None:
    outcome = run_command("cluster", "render", "p.yml", cwd=folder)
    assert outcome.code == 0
    assert yaml.safe_load(outcome.text)["kind"] == "RayCluster"


@pytest.mark.parametrize(
    ("profile", "recipe", "options", "said"),
    [
        (CLUSTER_PROFILE, RECIPE, ("--kind", "rayjob"), "--kind rayjob: a run needs a recipe."),
        (CLUSTER_PROFILE.replace("output", "# output"), RECIPE, RECIPE_FLAG, "does not say where the new"),
        ("target: local\noutput: s3://b/x", RECIPE, ("--recipe", "r.yml"), "has no section 'kubernetes'"),
        (CLUSTER_PROFILE, RECIPE.replace("s3://models/a", "./a"), RECIPE_FLAG, "r.yml:3:5: './a' is"),
        (CLUSTER_PROFILE, RECIPE, ("-o", "p.yml"), "nothing can be written there"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_words(
    folder: Path, profile: str, recipe: str, options: tuple[str, ...], said: str
) -> None:
    (folder / "p.yml").write_text(profile)
    (folder / "r.yml").write_text(recipe)
    outcome = run_command("cluster", "render", "p.yml", *options, cwd=folder)
    outcome.check_refusal(said)


OUT = "s3://models/out"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "a", 0, hidden=256)


@pytest.fixture(scope="module")
def s3(model: Path) -> Iterator[S3Server]:
    with s3_server() as server:
        submit(linear(model), server.place("out"), RunOptions(inline=True))
        yield server


@pytest.fixture
def profile(s3: S3Server, tmp_path: Path) -> str:
    (tmp_path / "run.yml").write_text(
        f"storage: {{region: us-east-1, endpoint: '{s3.endpoint}', allow_http: true}}\n"
    )
    return "run.yml"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("verify", OUT), f"{OUT} is sound"),
        (("verify", OUT, "--level", "audit", "--inline"), f"{OUT} is sound"),
        (("inspect", OUT), "attention"),
        (("diff", OUT, OUT), f"A = {OUT} and B = {OUT} are equal, byte by byte"),
    ],
)
def test_a_place_is_reached_by_a_profile_or_by_the_environment(
    s3: S3Server, profile: str, tmp_path: Path, command: tuple[str, ...], said: str
) -> None:
    done = run_command(*command, "--profile", profile, cwd=tmp_path)
    assert (done.code, said in done.text) == (0, True), done.text
    if command == ("verify", OUT):
        known = {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_ALLOW_HTTP": "true"}
        done = run_command(*command, cwd=tmp_path, env=known)
        assert (done.code, said in done.text) == (0, True), done.text


@pytest.mark.parametrize("verb", ["init", "inspect", "diff", "plan"])
def test_a_verb_that_only_reads_promises_nothing_that_is_kept(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransientError(f"s3://b: listing failed 8 times. {KEPT}")

    for name in ("suggest_recipe", "inspect", "diff", "plan_for"):
        monkeypatch.setattr(f"raymerge.api.{name}", fail)
    write_recipe(tmp_path, yaml.safe_dump(linear("a", "b")))
    arguments = {"init": ["a", "b", "-o", "-"], "inspect": ["a"], "diff": ["a", "b"], "plan": ["recipe.yml"]}[
        verb
    ]
    done = run_command(verb, *arguments, cwd=tmp_path, env={"COLUMNS": "1000"})
    assert done.code == 3
    assert done.text.startswith(
        "raymerge: s3://b: listing failed 8 times. The same command may work later, if"
    )


@pytest.mark.parametrize(
    "command",
    [
        ("submit", "recipe.yml", "-o", "PLACE"),
        ("submit", "recipe.yml", "PLACE", "--dry-run"),
        ("submit", "recipe.yml", "-o", "PLACE", "--target", "job", "--address", "http://127.0.0.1:9"),
        ("plan", "recipe.yml", "-o", "PLACE"),
        ("convert", "x", "--to", "bf16", "-o", "PLACE"),
        ("status", "PLACE"),
        ("logs", "PLACE"),
        ("stop", "PLACE"),
        ("verify", "PLACE"),
        ("verify", "out", "--replay", "--source", "a=PLACE"),
        ("inspect", "PLACE"),
        ("diff", "out", "PLACE"),
    ],
    ids=" ".join,
)
def test_how_a_store_is_reached_is_not_for_an_address_to_say(
    profile: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It would take the place of all that the profile says: the server, the key for what is written."""
    write_recipe(tmp_path, yaml.safe_dump(linear(OUT)))
    args = [each.replace("PLACE", f"{OUT}?region=eu") for each in command]
    reached = () if command[0] == "convert" else ("--profile", profile)
    done = run_command(*args, *reached, cwd=tmp_path)
    assert (done.code, f"{OUT}: has options behind it ('?')." in done.text) == (2, True), done.text
    assert "Its server and region belong to storage: in a profile." in done.text


def test_a_name_that_cannot_be_written_is_told_without_the_way_there(
    model: Path, profile: str, tmp_path: Path
) -> None:
    write_recipe(tmp_path, yaml.safe_dump(linear(model)))
    args = ("submit", "recipe.yml", "--inline", "--dry-run", "--profile", profile)
    done = run_command(*args, "-o", "s3://models/new\nline", cwd=tmp_path)
    assert (done.code, "'s3://models/new\\nline': the name holds characters" in done.text) == (2, True)


def test_where_there_is_nothing_no_record_is_missed(profile: str, tmp_path: Path) -> None:
    done = run_command("verify", "s3://models/no", "--replay", "--profile", profile, cwd=tmp_path)
    assert (done.code, "s3://models/no: there is nothing at this place" in done.text) == (2, True), done.text
    assert "provenance.json" not in done.text
    done = run_command("verify", "no", "--replay", cwd=tmp_path)
    assert (done.code, "there is no such directory" in done.text) == (2, True), done.text


def test_a_record_is_derived_anew(s3: S3Server, profile: str, tmp_path: Path) -> None:
    done = run_command("verify", OUT, "--replay", "--profile", profile, cwd=tmp_path)
    assert (done.code, f"{OUT} is what its record says" in done.text) == (0, True), done.text
    key = "out/model.safetensors"
    before = s3.objects(key)[key]
    s3.put(key, before[:-2] + b"xy")
    try:
        done = run_command("verify", OUT, "--replay", "--profile", profile, cwd=tmp_path)
    finally:
        s3.put(key, before)
    assert (done.code, f"{OUT} IS NOT WHAT ITS RECORD SAYS" in done.text) == (2, True)
    assert "their digest is not the ledger's" in done.text


@pytest.mark.parametrize("how", [("--replay",), ("--level", "audit", "--inline")])
def test_a_source_in_a_store_is_reached_by_the_profile_where_it_is_named(
    s3: S3Server, model: Path, profile: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    s3.upload(model, "models/a")
    there = s3.place("models/a")
    submit(linear(there.partition("?")[0]), tmp_path / "local", RunOptions(inline=True, storage=s3.options))
    named = f"s3://models/models/a={there.partition('?')[0]}"
    done = run_command("verify", "local", *how, "--source", named, "--profile", profile, cwd=tmp_path)
    assert done.code == 0, done.text
    s3.calm()
    silent = run_command("verify", "local", *how, "--profile", profile, cwd=tmp_path)
    assert (silent.code, "--source 's3://models/models/a=" in silent.text) == (2, True), silent.text
    assert s3.requests == []


def test_transformers_loads_a_copy(s3: S3Server, profile: str, tmp_path: Path) -> None:
    args = ("verify", OUT, "--level", "load", "--profile", profile, "--scratch", "scratch")
    done = run_command(*args, cwd=tmp_path)
    assert (done.code, f"{OUT} loads" in done.text) == (0, True), done.text
    assert "it was loaded and run" in done.text
    s3.calm()
    done = run_command(*args, "--memory", "1MiB", cwd=tmp_path)
    assert (done.code, f"{OUT} loads" in done.text) == (0, True), done.text
    assert "it was loaded and run" not in done.text
    assert list((tmp_path / "scratch").iterdir()) == []


def test_weights_that_do_not_fit_are_not_fetched(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched() -> int:
        return sum(each.sent for each in s3.asked("GET", "model.safetensors"))

    size = len(s3.objects("out/model.safetensors")["out/model.safetensors"])
    s3.calm()
    verdict = verify_load(s3.place("out"), memory=size - 1)
    assert (verdict.path, verdict.problems, verdict.ran) == (OUT, (), False)
    assert "only names and shapes were compared: its weights have" in verdict.note
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    verdict = verify_load(s3.place("out"))
    assert (verdict.problems, verdict.ran) == ((), False)
    assert "are free for it (--scratch)" in verdict.note
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"nothing can be written there: .*Choose another --scratch"):
        verify_load(s3.place("out"), scratch=str(tmp_path / "file" / "below"))
    assert fetched() < size


def test_a_copy_that_takes_the_memory_is_not_loaded(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one stay that a killed command left."""
    left = OwnDirectory(str(tmp_path))
    os.close(left._descriptor)
    free = iter([1 << 40, 1 << 10])
    monkeypatch.setattr(api, "free_memory", lambda: next(free))
    verdict = verify_load(s3.place("out"), scratch=str(tmp_path))
    assert (verdict.problems, verdict.ran) == ((), False)
    assert "of memory and may take 1" in verdict.note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["verify", "inspect", "submit"])
def test_a_server_without_tls_is_refused_at_once(
    s3: S3Server, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    noted = retry.RetryPolicy._note

    def note(self: retry.RetryPolicy, path: str, fault: OSError) -> None:
        waits.append(path)
        noted(self, path, fault)

    monkeypatch.setattr(retry.RetryPolicy, "_note", note)
    env = {"AWS_ENDPOINT_URL": s3.endpoint}

    def run(*args: str) -> Outcome:
        return run_command(*args, cwd=tmp_path, env=env)

    if verb == "submit":
        write_recipe(tmp_path, yaml.safe_dump(linear(OUT)))
        done = run("submit", "recipe.yml", "-o", "s3://models/other", "--inline")
    else:
        done = run(verb, OUT)
    assert (done.code, waits) == (2, [])
    assert "one without TLS" in done.text
    assert "AWS_ALLOW_HTTP=true" in done.text


VERBS = ("submit", "convert", "plan", "verify", "inspect", "methods", "extract-lora")
HEAVY = ("torch", "ray", "pyarrow", "numpy", "yaml", "transformers", "raymerge.api", "raymerge.recipes")
OF_TYPER = "pydantic"
"""typer reads the options of a single verb with it; the library's own models must not be what loads it."""
REPORT_HEAVY = """
import contextlib, json, sys
from raymerge.cli.main import main
heavy, calls = json.loads(sys.stdin.read())
for call in calls:
    sys.argv = ["raymerge", *call]
    with contextlib.suppress(SystemExit):
        main()
print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("heavy", "calls"),
    [((*HEAVY, OF_TYPER), [["--version"], ["--help"]]), (HEAVY, [[verb, "--help"] for verb in VERBS])],
)
def test_help_imports_nothing_heavy(heavy: tuple[str, ...], calls: list[list[str]]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY],
        input=json.dumps([heavy, calls]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stderr) == []
    assert ended.stdout.count("raymerge") >= len(calls)


def test_help_lists_every_verb(tmp_path: Path) -> None:
    outcome = run_command("--help", cwd=tmp_path)
    assert outcome.code == 0
    assert all(verb in outcome.text for verb in VERBS)
    assert "\x1b" not in outcome.text


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    outcome = run_command("--version", cwd=tmp_path)
    assert (outcome.code, outcome.text) == (0, f"raymerge {version('raymerge')}\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("submit",), "RECIPE"),
        (("submit", "recipe.yml", "--wrokers", "2"), "--wrokers"),
        (("sumbit", "recipe.yml"), "submit"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_sentence(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    outcome = run_command(*args, cwd=tmp_path)
    outcome.check_refusal(said)

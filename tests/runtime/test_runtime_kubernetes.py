"""The target kubernetes, against a strict API server and an operator that runs no driver."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.kube_api import TOKEN, KubeApi, kube_api
from kits.kube_cases import IMAGE, admits, claim, profile_of, submission
from kits.kube_operator import Operator, operator
from kits.kube_store import ACCOUNT, CLAIM, CONFIGMAP, QUEUE, RAYJOB, SECRET
from kits.marks import slow_but

from raymerge.deploy.manifests import rayjob
from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets import kubernetes_api
from raymerge.deploy.targets.kubernetes import KubernetesTarget, open_kubernetes
from raymerge.deploy.targets.target import RunReport, RunState, Submission, Where
from raymerge.errors import IncompleteError, OptionError

DATA = Path("/mnt/data")
RECIPE = {
    "merge_method": "linear",
    "models": [{"model": "/mnt/data/a", "parameters": {"weight": 1}}],
    "dtype": "float32",
}


def opened(profile: Profile) -> KubernetesTarget:
    return open_kubernetes(Where("kubernetes", None, profile), {})


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with kube_api(admits=admits()) as server:
        claim(server)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config")))
        monkeypatch.setattr(kubernetes_api, "_FIRST_PAUSE", 0.01)
        yield server


@pytest.fixture
def profile() -> Profile:
    return profile_of(DATA)


@pytest.fixture
def target(api: KubeApi, profile: Profile) -> KubernetesTarget:
    return replace(opened(profile), poll_seconds=0.2, ending_seconds=5)


@pytest.fixture
def keeper(api: KubeApi, tmp_path: Path) -> Iterator[Operator]:
    with operator(api, tmp_path / "mounts") as made:
        yield made


@pytest.fixture
def sent(profile: Profile) -> Submission:
    return submission(RECIPE, DATA / "merged", profile)


def _until(target: KubernetesTarget, run: str, said: str) -> RunReport:
    until = time.monotonic() + 10
    while said not in (report := target.report(run)).message:
        assert time.monotonic() < until, report
        time.sleep(0.05)
    return report


def test_a_run_is_a_rayjob_and_a_config_map_that_goes_with_it(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    target.check(sent)
    assert api.store.list(RAYJOB) == api.store.list(CONFIGMAP) == []
    assert target.submit(sent) == sent.run
    posts = [path.partition("?")[2] for method, path, _ in api.asked if method == "POST" and "dryRun" in path]
    assert posts == ["fieldValidation=Strict&dryRun=All"] * 2
    (job,), (config,) = api.store.list(RAYJOB), api.store.list(CONFIGMAP)
    assert config["data"]["recipe.yml"] == sent.recipe_text
    assert config["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert target.find(sent.output) == sent.run
    assert target.find("/mnt/data/other") is None
    target.stop(sent.run)
    assert api.store.list(RAYJOB) == api.store.list(CONFIGMAP) == []


def test_with_too_few_rights_for_owners_a_run_is_made_and_cleared_away_all_the_same(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    api.denied.add(("update", "configmaps"))
    target.check(sent)
    target.submit(sent)
    assert "ownerReferences" not in api.store.list(CONFIGMAP)[0]["metadata"]
    target.stop(sent.run)
    assert api.store.list(RAYJOB) == api.store.list(CONFIGMAP) == []


def test_no_secret_of_the_cluster_is_sent(target: KubernetesTarget, api: KubeApi, sent: Submission) -> None:
    target.check(sent)
    target.submit(sent)
    assert TOKEN not in str([body for _, _, body in api.asked])


def test_flags_of_the_command_line_are_the_drivers(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    target.submit(replace(sent, flags=("--replace",)))
    assert api.store.list(RAYJOB)[0]["spec"]["entrypoint"].endswith(f" --json --run {sent.run} --replace")


def test_a_second_submission_is_the_run_that_makes_it_already(
    target: KubernetesTarget, api: KubeApi, sent: Submission, profile: Profile
) -> None:
    target.submit(sent)
    again = replace(submission(RECIPE, sent.output, profile), run="raymerge-000000000000")
    assert target.submit(again) == sent.run
    assert len(api.store.list(RAYJOB)) == 1
    other = submission({**RECIPE, "dtype": "bfloat16"}, sent.output, profile)
    with pytest.raises(OptionError, match=rf"{sent.run} makes it now, of another recipe.*raymerge stop"):
        target.submit(other)
    # What is over is no obstacle, and what is asked for then is the newest.
    api.store.set_status(RAYJOB, "merges", sent.run, {"jobDeploymentStatus": "Failed"})
    assert target.submit(again) == again.run
    # The server tells moments apart by the second, and lists by name.
    for job in api.store.objects.values():
        job["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    assert api.store.list(RAYJOB)[0]["metadata"]["name"] == again.run
    assert target.find(sent.output) == again.run


def test_a_lost_answer_makes_no_second_rayjob(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    create = api.store.create

    def lost(resource: Any, namespace: str, given: Any, **how: Any) -> Any:
        made = create(resource, namespace, given, **how)
        if not how.get("dry"):
            api.store.create = create  # type: ignore[method-assign]
            raise ConnectionResetError
        return made

    api.store.create = lost  # type: ignore[method-assign]
    assert target.submit(sent) == sent.run
    assert len(api.store.list(RAYJOB)) == 1


def test_a_rayjob_that_is_refused_leaves_no_config_map(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    admit = api.store.admits["RayJob"]
    asked = []

    def quota(given: Any, strict: bool) -> Any:
        asked.append(given)
        made, wrong = admit(given, strict)
        return made, wrong if len(asked) == 1 else ["exceeded quota: gpus"]

    api.store.admits["RayJob"] = quota
    with pytest.raises(OptionError, match=r"refuses it: .*exceeded quota: gpus.*cluster render"):
        target.submit(sent)
    assert api.store.list(CONFIGMAP) == []


def test_all_that_stands_in_the_way_is_told_at_once(
    target: KubernetesTarget, api: KubeApi, profile: Profile
) -> None:
    api.store.delete(CLAIM, "merges", "data")
    api.denied |= {("create", "rayjobs"), ("create", "configmaps")}
    names = {"service_account": "merger", "queue": "night", "priority_class": "low", "token_secret": "token"}
    names |= {"head": {"runtime_class": "kata"}}
    wanting = profile_of(DATA, **names, image_pull_secrets=["registry"], env_from_secrets=["store"])
    with pytest.raises(OptionError) as failed:
        target.check(submission(RECIPE, DATA / "merged", wanting))
    said = [problem.what for problem in failed.value.problems]
    assert said == [
        "your credentials may not create rayjobs in the namespace merges.",
        "your credentials may not create configmaps in the namespace merges.",
        "the namespace merges has no Kueue queue night.",
        "the namespace merges has no persistent volume claim data.",
        "the namespace merges has no priority class low.",
        "the namespace merges has no runtime class kata.",
        "the namespace merges has no secret registry.",
        "the namespace merges has no secret store.",
        "the namespace merges has no secret token.",
        "the namespace merges has no service account merger.",
    ]
    api.store.create(ACCOUNT, "merges", ACCOUNT.body("merger"))
    # What may not be looked at may be there.
    api.denied |= {("get", "secrets")}
    with pytest.raises(OptionError) as failed:
        target.check(submission(RECIPE, DATA / "merged", wanting))
    assert not any("secret" in problem.what or "account" in problem.what for problem in failed.value.problems)


def test_a_cluster_without_kuberay_is_told_with_what_installs_it(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    api.store.absent.add("ray.io")
    with pytest.raises(OptionError, match=r"has no KubeRay.*helm install kuberay-operator"):
        target.check(sent)


def test_a_namespace_that_is_not_there_is_told(api: KubeApi, sent: Submission) -> None:
    elsewhere = profile_of(DATA, namespace="nowhere")
    with pytest.raises(OptionError, match=r"no namespace nowhere.*kubectl create namespace nowhere"):
        opened(elsewhere).check(submission(RECIPE, DATA / "merged", elsewhere))
    # Whoever may not look at namespaces may still use one.
    api.denied.add(("get", "namespaces"))
    opened(sent.profile).check(sent)


def test_what_pods_cannot_see_is_refused_before_the_cluster_is_asked(
    target: KubernetesTarget, api: KubeApi, profile: Profile
) -> None:
    near = {**RECIPE, "models": [{"model": "./a", "parameters": {"weight": 1}}]}
    with pytest.raises(OptionError, match="relative"):
        target.check(submission(near, DATA / "merged", profile))
    assert api.asked == []


@pytest.mark.parametrize(
    ("verb", "said"), [("create", "cannot create"), ("list", "cannot list")], ids=["create", "list"]
)
def test_a_right_that_is_lacking_is_told_when_it_is_needed(
    target: KubernetesTarget, api: KubeApi, sent: Submission, verb: str, said: str
) -> None:
    api.denied.add((verb, "rayjobs"))
    with pytest.raises(OptionError, match=f"does not allow it: .*{said}.*administrator"):
        target.submit(sent)


def test_an_image_that_no_node_can_pull_is_told(
    target: KubernetesTarget, keeper: Operator, sent: Submission
) -> None:
    keeper.unpullable.add(IMAGE)
    target.submit(sent)
    report = _until(target, sent.run, "ImagePullBackOff")
    assert report.state is RunState.QUEUED
    assert f'Back-off pulling image "{IMAGE}". See that the image exists' in report.message
    # Also to whoever follows it.
    lines = target.logs(sent.run, follow=True)
    assert "ImagePullBackOff" in next(line for line in lines if "pod " in line)
    assert target.stop(sent.run).state is RunState.STOPPED


def test_a_pod_that_no_node_takes_is_told(
    target: KubernetesTarget, keeper: Operator, sent: Submission
) -> None:
    keeper.unschedulable = "0/3 nodes are available: 3 Insufficient memory."
    target.submit(sent)
    assert "3 Insufficient memory. Ask for less" in _until(target, sent.run, "Unschedulable").message
    # Whoever may not look at pods still learns how the run is.
    keeper.api.denied |= {("list", "pods"), ("list", "events")}
    assert "Unschedulable" not in target.report(sent.run).message


def test_what_the_operator_refuses_is_told_with_its_words(
    target: KubernetesTarget, keeper: Operator, api: KubeApi, sent: Submission
) -> None:
    refused = replace(sent, run="raymerge-" + "a" * 12)
    config, job = rayjob(refused.profile, refused.recipe_text, refused.output, refused.run)
    # A rule of the operator's that no schema has.
    job["spec"]["submissionMode"] = "TelegraphMode"
    target.server.create(kubernetes_api.CONFIG_MAPS, config)
    target.server.create(kubernetes_api.RAY_JOBS, job)
    report = _until(target, refused.run, "the operator refuses the RayJob")
    assert "TelegraphMode" in report.message
    assert (report.state, report.details["exit_code"]) == (RunState.FAILED, "2")
    assert list(target.logs(refused.run, follow=True)) == []


def test_a_queued_run_waits_and_goes_on_when_it_is_admitted(
    target: KubernetesTarget, keeper: Operator, api: KubeApi
) -> None:
    api.store.create(QUEUE, "merges", QUEUE.body("night"))
    sent = submission(RECIPE, DATA / "merged", profile_of(DATA, queue="night"))
    target.check(sent)
    target.submit(sent)
    assert _until(target, sent.run, "the queue night").state is RunState.QUEUED
    keeper.admitted.set()
    _until(target, sent.run, "are being started")
    assert [state for _, state in keeper.seen] == [
        "Initializing",
        "Suspending",
        "Suspended",
        "",
        "Initializing",
    ]


def test_nobody_knows_a_run_that_was_never_sent(target: KubernetesTarget) -> None:
    report = target.report("raymerge-000000000000")
    assert (report.state, report.output) == (RunState.UNKNOWN, "")
    assert "the namespace merges has no RayJob raymerge-000000000000" in report.message
    assert target.stop("raymerge-000000000000").state is RunState.UNKNOWN
    with pytest.raises(OptionError, match="has no RayJob"):
        list(target.logs("raymerge-000000000000", follow=False))


def test_a_log_that_cannot_be_had_is_told(
    target: KubernetesTarget, keeper: Operator, sent: Submission
) -> None:
    target.submit(sent)
    with pytest.raises(OptionError, match=r"cannot be had: its Ray cluster does not run.*output place"):
        list(target.logs(sent.run, follow=False))


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("no secret", "the token of its Ray cluster cannot be read: the secret lost has no auth_token"),
        ("no right to secrets", "the token of its Ray cluster cannot be read: secrets is forbidden"),
        ("no right to the proxy", "its Jobs API answers 403: services/proxy is forbidden"),
        ("no head", "its Jobs API answers 503: no endpoints available"),
        ("no answer", "its Jobs API does not answer"),
        ("another token", "its Jobs API answers 401: Unauthorized"),
    ],
)
def test_why_a_log_cannot_be_had_is_told_and_the_run_is_reported_all_the_same(
    target: KubernetesTarget, api: KubeApi, sent: Submission, trouble: str, said: str
) -> None:
    target.submit(sent)
    running = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "jobId": "one"}
    cluster = {"rayClusterName": "lost", "dashboardURL": "lost-head-svc.merges.svc.cluster.local:8265"}
    api.store.set_status(RAYJOB, "merges", sent.run, running | cluster)
    if trouble != "no secret":
        api.store.create(SECRET, "merges", SECRET.body("lost", data={"auth_token": "dG9rZW4="}))
    if trouble == "no right to secrets":
        api.denied.add(("get", "secrets"))
    if trouble == "no right to the proxy":
        api.denied.add(("get", "services/proxy"))
    if trouble == "no answer":
        api.fail("drop", "/proxy/", times=99)
    if trouble == "another token":
        # The server itself plays the service, and wants a token of its own.
        api.proxied["lost-head-svc:8265"] = api.url
    with pytest.raises(OptionError, match=f"its log cannot be had: {said}"):
        list(target.logs(sent.run, follow=False))
    assert target.report(sent.run).state is RunState.RUNNING
    lines = target.logs(sent.run, follow=True)
    assert f"its log cannot be shown: {said}" in [next(lines), next(lines)][-1]


def test_why_a_driver_had_its_job_stopped_is_told_as_long_as_its_log_is_there(
    target: KubernetesTarget, api: KubeApi, sent: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.submit(sent)
    over = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED", "jobId": "one"}
    cluster = {"rayClusterName": "gone", "dashboardURL": "gone-head-svc.merges.svc.cluster.local:8265"}
    api.store.set_status(RAYJOB, "merges", sent.run, over | cluster)
    report = target.report(sent.run)
    assert report.state is RunState.STOPPED
    assert "by its driver because you must change something" in report.message
    error = json.dumps({"event": "error", "exit_code": 2, "message": "no such source."})
    answer = 200, json.dumps({"logs": f"Running entrypoint\n{error}\n"})
    monkeypatch.setattr(kubernetes_api.Server, "service", lambda *_, **__: answer)
    api.store.create(SECRET, "merges", SECRET.body("gone", data={"auth_token": "dA=="}))
    report = target.report(sent.run)
    assert (report.state, report.details["exit_code"]) == (RunState.FAILED, "2")
    assert report.message.endswith("is not begun again: no such source.")


def test_a_run_that_is_over_is_not_stopped(target: KubernetesTarget, api: KubeApi, sent: Submission) -> None:
    target.submit(sent)
    done = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
    api.store.set_status(RAYJOB, "merges", sent.run, done)
    assert target.stop(sent.run).state is RunState.SUCCEEDED
    assert len(api.store.list(RAYJOB)) == 1


def test_pods_that_take_long_to_end_are_not_waited_for_without_end(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    target.submit(sent)
    job = api.store.get(RAYJOB, "merges", sent.run)
    job["metadata"]["finalizers"] = ["somebody/holds-it"]
    api.store.update(RAYJOB, "merges", job)
    report = replace(target, ending_seconds=0.5).stop(sent.run)
    assert report.state is RunState.STOPPED
    assert "have not ended yet" in report.message
    # It is no longer a run that one could join.
    assert target.find(sent.output) is None


@pytest.mark.parametrize("how", slow_but(["drop", "500"], "drop"))
def test_a_run_is_followed_through_a_while_without_a_server(
    target: KubernetesTarget, api: KubeApi, sent: Submission, how: str
) -> None:
    target.submit(sent)
    lines = replace(target, poll_seconds=0.02, away_seconds=30).logs(sent.run, follow=True)
    assert "has not taken it up yet" in next(lines)
    api.fail(how, f"rayjobs/{sent.run}", times=30)
    done = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
    api.store.set_status(RAYJOB, "merges", sent.run, done)
    assert list(lines) == []
    assert target.report(sent.run).state is RunState.SUCCEEDED


def test_a_server_that_stays_away_ends_the_following_and_not_the_run(
    target: KubernetesTarget, api: KubeApi, sent: Submission
) -> None:
    target.submit(sent)
    lines = replace(target, poll_seconds=0.02, away_seconds=0.3).logs(sent.run, follow=True)
    next(lines)
    api.fail("drop", "/", times=10**6)
    with pytest.raises(IncompleteError, match=rf"does not answer.*raymerge status {sent.run}"):
        list(lines)

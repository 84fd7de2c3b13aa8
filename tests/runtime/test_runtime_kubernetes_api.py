"""The client of the API server, against a server that is strict, slow, faulty, or away."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.kube_api import KubeApi, kube_api
from kits.kube_store import CONFIGMAP, RAYJOB

from raymerge.deploy.targets import kubernetes_api
from raymerge.deploy.targets.kubernetes_api import CONFIG_MAPS, RAY_JOBS, AnswerError, Server, open_server
from raymerge.errors import OptionError


@pytest.fixture(scope="module")
def api() -> Iterator[KubeApi]:
    with kube_api() as server:
        yield server


@pytest.fixture
def server(api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
    monkeypatch.setattr(kubernetes_api, "_FIRST_PAUSE", 0.01)
    api.store.objects = {key: value for key, value in api.store.objects.items() if key[0] != "rayjobs"}
    api.faults.clear()
    api.denied.clear()
    return open_server(None)


def _job(name: str = "one", **labels: str) -> dict[str, Any]:
    return RAYJOB.body(name, labels=labels, spec={})


@pytest.mark.parametrize("how", ["500", "429", "drop"])
def test_what_fails_for_a_moment_is_asked_again(server: Server, api: KubeApi, how: str) -> None:
    api.fail(how, "rayjobs", times=3)
    assert server.select(RAY_JOBS) == []
    api.fail(how, "rayjobs", method="POST", times=2)
    assert server.create(RAY_JOBS, _job())["metadata"]["name"] == "one"


def test_a_server_that_goes_on_failing_is_given_up(server: Server, api: KubeApi) -> None:
    api.fail("500", "rayjobs", times=99)
    with pytest.raises(AnswerError, match=r"fails: .*bad day.* Try again later") as failed:
        server.select(RAY_JOBS)
    assert failed.value.code == 500
    api.faults.clear()
    api.fail("drop", "rayjobs", times=99)
    with pytest.raises(OptionError, match=rf"the API server at {api.url} does not answer"):
        server.select(RAY_JOBS)


def test_refusals_carry_the_words_of_the_server(server: Server, api: KubeApi) -> None:
    server.create(RAY_JOBS, _job())
    with pytest.raises(AnswerError, match="already exists") as taken:
        server.create(RAY_JOBS, _job())
    assert taken.value.code == 409
    made = server.create(CONFIG_MAPS, CONFIGMAP.body("c"))
    server.replace(CONFIG_MAPS, {**made, "data": {"a": "1"}})
    with pytest.raises(AnswerError, match="has been modified"):
        server.replace(CONFIG_MAPS, made)
    api.denied.add(("list", "rayjobs"))
    with pytest.raises(AnswerError, match="cannot list") as denied:
        server.select(RAY_JOBS)
    assert denied.value.code == 403


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "not found"),
        ("a: [", "while parsing"),
        ("{clusters: [], contexts: [], current-context: x}", "Context 'x' not found"),
        (
            "{clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [], "
            "contexts: [{name: x, context: {cluster: c}}], current-context: x}",
            "Missing user",
        ),
    ],
)
def test_a_configuration_that_leads_nowhere_is_told(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(OptionError, match="no configuration of a cluster can be used") as failed:
        open_server(None)
    assert said in str(failed.value)
    assert "Set KUBECONFIG" in str(failed.value)


def test_several_files_in_one_variable_are_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/a:/b")
    with pytest.raises(OptionError, match="kubectl config view --flatten"):
        open_server(None)


def test_without_lightkube_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("lightkube"):
            raise ImportError(name)
        return imports(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OptionError, match=r"pip install 'raymerge\[kubernetes\]'"):
        open_server(None)


def test_a_service_is_reached_through_the_server(server: Server, api: KubeApi) -> None:
    # The server itself plays the service: it answers what is asked of it without its own token.
    api.proxied["head:8265"] = api.url
    code, text = server.service("head:8265", "version", {"x-ray-authorization": "Bearer ray"})
    assert (code, json.loads(text)["reason"]) == (401, "Unauthorized")
    assert api.proxied_headers[-1]["x-ray-authorization"] == "Bearer ray"
    assert "authorization" not in {key.lower() for key in api.proxied_headers[-1]}
    assert server.service("nobody:8265", "version", {})[0] == 503

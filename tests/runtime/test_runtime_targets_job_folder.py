"""What is sent along with a job."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from raymerge.deploy.profiles import parse_profile
from raymerge.deploy.targets import job_server
from raymerge.deploy.targets.job_server import JobServer
from raymerge.deploy.targets.target import Submission
from raymerge.errors import OptionError
from raymerge.storage.temporary import OwnDirectory

RUN = "raymerge-0123456789ab"
RECIPE = "merge_method: linear\nmodels: [{model: /mnt/a, parameters: {weight: 1}}]\n"


class _Server:
    """A client that keeps what the working directory of a job had."""

    sent: Mapping[str, bytes] = MappingProxyType({})

    def get_version(self) -> str:
        return "1"

    def list_jobs(self) -> list[Any]:
        return []

    def submit_job(self, *, runtime_env: Mapping[str, Any], **_: Any) -> None:
        root = Path(runtime_env["working_dir"])
        self.sent = {str(each.relative_to(root)): each.read_bytes() for each in root.rglob("*.*")}


def _sent(along: Path) -> Mapping[str, bytes]:
    profile = parse_profile(f"{{target: job, job: {{working_dir: '{along}'}}}}")
    server = _Server()
    target = JobServer("http://head:8265", {}, connect=lambda *_: server)
    submission = Submission(RECIPE, "recipe.yml", "/mnt/out", profile, RUN)
    target.check(submission)
    target.submit(submission)
    return server.sent


def test_a_directory_goes_along_with_what_its_links_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    along = tmp_path / "along"
    (along / "deep").mkdir(parents=True)
    (along / "deep" / "a.txt").write_bytes(b"a")
    (along / "link.txt").symlink_to("deep/a.txt")
    (along / ".#edited.py").symlink_to("nowhere.1234")
    os.mkfifo(along / "pipe.fifo")
    # Links are relative to where they are, and not to where the command runs.
    monkeypatch.chdir(tmp_path)
    sent = _sent(along)
    assert set(sent) == {"deep/a.txt", "link.txt", "recipe.yml", "profile.yml"}
    assert sent["link.txt"] == b"a"


def test_what_a_killed_submission_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "along").mkdir()
    # As the system does where a process is killed.
    os.close(OwnDirectory()._descriptor)
    during: list[list[Path]] = []
    monkeypatch.setattr(
        _Server, "submit_job", lambda *_, **__: during.append([*(tmp_path / "temporary").glob("*/lock")])
    )
    _sent(tmp_path / "along")
    assert [len(each) for each in during] == [1]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_directory_that_is_too_large_is_refused_beforehand(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(OptionError, match=r"holds more than 100.* MB, and a job is sent no more\. Name a"):
        _sent(tmp_path)


def test_a_circle_of_links_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "_MOST_NBYTES", 100_000)
    for name in ("one", "other"):
        (tmp_path / name).symlink_to(tmp_path)
    with pytest.raises(OptionError, match="holds more than"):
        _sent(tmp_path)


def test_a_file_that_cannot_be_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").touch()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(OptionError, match=r"cannot be copied: .*/a\.txt: .*Permission denied\. See"):
        _sent(tmp_path)

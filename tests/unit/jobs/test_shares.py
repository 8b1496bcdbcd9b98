"""What `--share` takes, and what it refuses with a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from belljar.errors import BadOption, BadSetting
from belljar.jobs.shares import of_site, share
from belljar.model import Share


@pytest.mark.parametrize("text", ["nfs://server/home:/home:rw", "NFS://server/home", "nfs://a\x1b[2J:/home"])
def test_an_export_is_refused_and_the_page_is_named(text: str) -> None:
    with pytest.raises(BadOption, match="not a folder of this host") as caught:
        share(text)
    assert "docs/jobs/data.md" in caught.value.hint and caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "source", "target", "readonly"),
    [
        ("virtiofs:/data", "/data", "/data", True),
        ("virtiofs:/data:rw", "/data", "/data", False),
        ("virtiofs:/data:/in:ro", "/data", "/in", True),
        ("virtiofs:/data/virtiofs:/in/virtiofs:rw", "/data/virtiofs", "/in/virtiofs", False),
    ],
)
def test_the_forms_of_a_folder_by_virtiofs(text: str, source: str, target: str, readonly: bool) -> None:
    assert share(text) == Share(source, target, readonly, "virtiofs")


def test_a_folder_that_is_named_virtiofs_can_still_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.path.realpath(tmp_path)
    assert share("./virtiofs:/in") == Share(f"{here}/virtiofs", "/in", True, "")
    assert share("virtiofs") == Share(f"{here}/virtiofs", f"{tmp_path}/virtiofs", True, "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("virtiofs:", "virtiofs:]SRC[:DST]"),
        ("virtiofs::/in", "virtiofs:]SRC[:DST]"),
        ("virtiofs:/a:b", "virtiofs:]SRC[:DST]"),
        ("virtiofs:/a:/b:/c", "virtiofs:]SRC[:DST]"),
        ("virtiofs:/a:/proc", "--share virtiofs:/a:/proc: /proc is the guest's own"),
    ],
)
def test_a_folder_by_virtiofs_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadOption) as caught:
        share(text)
    assert says in caught.value.message


def test_a_site_may_share_by_virtiofs(tmp_path: Path) -> None:
    found = of_site((f"virtiofs:{tmp_path}:/there:rw", f"virtiofs:{tmp_path}/gone:/gone"))
    assert [(one.target, one.kind, one.readonly) for one in found] == [("/there", "virtiofs", False)]


def test_a_sites_missing_folders_are_left_out(tmp_path: Path) -> None:
    left_out: list[str] = []
    folders = of_site((f"{tmp_path}:/there", f"{tmp_path}/gone:/gone"), left_out.append)
    assert left_out == [f"{tmp_path}/gone"]
    assert [(folder.target, folder.kind) for folder in folders] == [("/there", "")]


def test_a_sites_mistakes_name_the_setting() -> None:
    for texts in (("nfs://server:/home",), ("/a:/home", "/b:/home")):
        with pytest.raises(BadSetting) as caught:
            of_site(texts)
        assert caught.value.message.startswith("batch.shares: ")

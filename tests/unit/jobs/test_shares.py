"""What `--share` takes, and what it refuses with a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from belljar.errors import BadOption, BadSetting
from belljar.jobs.shares import of_site, share
from belljar.model import Share, ShareKind


@pytest.mark.parametrize(
    ("text", "source", "target", "readonly"),
    [
        ("nfs://server/home:/home:rw", "nfs://server:2049/home", "/home", False),
        ("nfs://server/home:/home", "nfs://server:2049/home", "/home", True),
        ("nfs://10.1.2.3:20490/a/b_c-d/:/x/:ro", "nfs://10.1.2.3:20490/a/b_c-d", "/x", True),
        ("nfs://[fd00::1]:99/data:/data", "nfs://[fd00::1]:99/data", "/data", True),
        ("nfs://nas.example.org/:/all", "nfs://nas.example.org:2049/", "/all", True),
        ("nfs://nas/größe:/d", "nfs://nas:2049/größe", "/d", True),
    ],
)
def test_the_forms_of_an_export(text: str, source: str, target: str, readonly: bool) -> None:
    assert share(text) == Share(source, target, readonly, ShareKind.NFS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nfs://server/home", "not of the form"),
        ("nfs://server/home:home", "not of the form"),
        ("nfs://server/home:/home:wo", "not of the form"),
        ("nfs://server:/home", "path of the export is missing"),
        ("nfs:///home:/home", "no name or address"),
        ("nfs://-o/home:/home", "no name or address"),
        ("nfs://user@server/home:/home", "no name or address"),
        ("nfs://a,b/home:/home", "no name or address"),
        ("nfs://fd00::1/data:/data", "stands in brackets"),
        ("nfs://[fd00::1/data:/data", "no IPv6 address"),
        ("nfs://[fe80::1%eth0]/data:/data", "no IPv6 address"),
        ("nfs://[::1]99/data:/data", "no port"),
        ("nfs://server:0/home:/home", "no port"),
        ("nfs://server:65536/home:/home", "no port"),
        ("nfs://server:٣/home:/home", "no port"),
        ("nfs://server:/home:/home", "no port"),
        ("nfs://server/a,sec=none:/home", "must not hold ','"),
        ("nfs://server/a b:/home", "must not hold ' '"),
        ("nfs://server/a\nb:/home", "must not hold '\\n'"),
        ("nfs://server/a\x1b[2J:/home", "must not hold '\\x1b'"),
        ("nfs://server/a?version=3:/home", "must not hold '?'"),
        ("nfs://server/a%2e%2e:/home", "must not hold '%'"),
        ("nfs://server/../etc:/home", "`..`"),
        ("nfs://server/a/./b:/home", "`.`"),
        ("nfs://server//a:/home", "empty part"),
        ("nfs://server/" + "a" * 1024 + ":/home", "longer"),
        ("NFS://server/home:/home", "is written nfs://"),
        ("nfs://server/home:/proc", "the guest's own"),
        ("nfs://server/home:/a/..", "the guest's own"),
        ("nfs://server/home://", "not of the form"),
        ("nfs://server/home:/a\x07", "cannot be printed"),
    ],
)
def test_an_export_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadOption) as caught:
        share(text)
    assert says in caught.value.message and caught.value.message.isprintable()


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
    assert share(text) == Share(source, target, readonly, ShareKind.VIRTIOFS)


def test_a_folder_that_is_named_virtiofs_can_still_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.path.realpath(tmp_path)
    assert share("./virtiofs:/in") == Share(f"{here}/virtiofs", "/in", True, ShareKind.NINEP)
    assert share("virtiofs") == Share(f"{here}/virtiofs", f"{tmp_path}/virtiofs", True, ShareKind.NINEP)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("virtiofs:", "virtiofs:SRC[:DST]"),
        ("virtiofs::/in", "virtiofs:SRC[:DST]"),
        ("virtiofs:/a:b", "virtiofs:SRC[:DST]"),
        ("virtiofs:/a:/b:/c", "virtiofs:SRC[:DST]"),
        ("virtiofs:/a:/proc", "--share virtiofs:/a:/proc: /proc is the guest's own"),
    ],
)
def test_a_folder_by_virtiofs_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadOption) as caught:
        share(text)
    assert says in caught.value.message


def test_a_site_may_share_by_virtiofs(tmp_path: Path) -> None:
    found = of_site((f"virtiofs:{tmp_path}:/there:rw", f"virtiofs:{tmp_path}/gone:/gone"))
    assert [(one.target, one.kind, one.readonly) for one in found] == [("/there", ShareKind.VIRTIOFS, False)]


def test_a_sites_exports_stay_and_its_missing_folders_do_not(tmp_path: Path) -> None:
    there, gone = f"{tmp_path}:/there", f"{tmp_path}/gone:/gone"
    left_out: list[str] = []
    found = of_site((there, gone, "nfs://server/home:/home:rw"), left_out.append)
    assert left_out == [f"{tmp_path}/gone"]
    assert [(one.target, one.kind) for one in found] == [("/there", ShareKind.NINEP), ("/home", ShareKind.NFS)]


def test_a_sites_mistakes_name_the_setting() -> None:
    for texts in (("nfs://server:/home",), ("nfs://a/x:/home", "nfs://b/x:/home")):
        with pytest.raises(BadSetting) as caught:
            of_site(texts)
        assert caught.value.message.startswith("batch.shares: ")

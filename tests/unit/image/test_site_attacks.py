"""Attacks on a repository, as TUF lists them, and a node that refuses each: it says which repository, which role, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.site import Site, nothing_left, refused
from tuf.api.metadata import TargetFile

from belljar.errors import (
    BadSetting,
    DownloadFailed,
    ImageCorrupt,
    ImageMismatch,
    ImageTooLarge,
    NotPermitted,
    RepositoryRefused,
)
from belljar.image.intake import intake
from belljar.image.progress import Progress
from belljar.image.site import publish, source_of, sync
from belljar.image.store import manifest

DAY = 86400.0


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def rows(site: Site, *names: str) -> list[tuple[str, str]]:
    return [(row.name, row.what) for row in sync.sync(site.node, names, site.node.settings.sources)]


def forgery(site: Site, role: str, *keys: Path) -> None:
    """Give `base` the disk of `other`, in the metadata of a role."""

    def change(signed: object) -> None:
        targets = signed.targets  # type: ignore[attr-defined]
        targets["base/disk.qcow2.zst"] = replaced(targets["other/disk.qcow2.zst"])

    site.forge(role, change, *keys)


def replaced(target: TargetFile, path: str = "base/disk.qcow2.zst") -> TargetFile:
    return TargetFile(target.length, target.hashes, path, target.unrecognized_fields)


# -- expiry, rollback, freeze, mix-and-match, endless data -------------------------------------------------------------


def test_an_expired_timestamp_is_refused(site: Site) -> None:
    site.moment = -15 * DAY
    site.put("base", b"1")
    site.trusting()
    error = refused(site, RepositoryRefused, f"{site.folder}: timestamp.json is expired")
    assert "`belljar image publish --refresh`" in error.hint
    site.moment = 0
    site.change()
    site.node.ensure("base")


def test_a_server_that_freezes_what_it_has_is_refused_when_that_expires(site: Site, server: Server) -> None:
    """Nodes are kept from an update by an old state that was good when they saw it."""
    site.put("base", b"1")
    node = site.trusting(site.serve(server))
    node.ensure("base")
    cached = next((node.folder / "sources").glob("*/timestamp.json"))
    site.forge("timestamp", lambda signed: setattr(signed, "expires", signed.expires.replace(year=2020)), site.keys)
    cached.write_bytes(site.metadata("timestamp").read_bytes())  # as if the time had passed
    site.serve(server)
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.FAILED and "timestamp.json is expired" in row.why
    assert node.resolve("base")  # what is here goes on


@pytest.mark.parametrize("role", ["timestamp", "snapshot"])
def test_a_state_that_goes_back_is_refused(site: Site, role: str) -> None:
    site.put("base", b"1")
    before = {name: site.metadata(name).read_bytes() for name in ("timestamp", "snapshot", "targets")}
    site.put("base", b"2")
    node = site.trusting()
    node.ensure("base")
    if role == "timestamp":
        site.metadata("timestamp").write_bytes(before["timestamp"])
    else:  # by somebody with the online key: a new timestamp and snapshot, of the former images
        version = json.loads(before["targets"])["signed"]["version"]
        with publish.opened(site.line, publish.load_keys([site.keys / "online.pem"])) as repository:
            repository.snapshot.signed.meta["targets.json"].version = version
            repository.roles.clear()
            repository.save = lambda: None  # type: ignore[method-assign]
            signed_again(site, repository)
    (row,) = sync.sync(node, (), node.settings.sources)
    assert (row.what, row.error) == (sync.FAILED, "RepositoryRefused") and str(site.folder) in row.why
    assert f"{role} version" in row.why if role == "timestamp" else "targets.json" in row.why
    assert "A mirror may be behind" in row.why


def signed_again(site: Site, repository: publish.Repository) -> None:
    """New snapshot and timestamp, whatever they say."""
    root = repository.root.signed
    repository.now += 5
    repository._write("snapshot", repository.snapshot, root)

    def point(signed: object) -> None:
        signed.snapshot_meta.version = repository.snapshot.signed.version  # type: ignore[attr-defined]
        signed.version += 10  # type: ignore[attr-defined]

    site.forge("timestamp", point, site.keys / "online.pem")


def test_parts_of_several_states_are_not_put_together(site: Site) -> None:
    site.put("base", b"1")
    before = site.metadata("targets").read_bytes()
    site.put("base", b"2")
    site.metadata("targets").write_bytes(before)
    site.trusting()
    refused(site, RepositoryRefused, "targets")


def test_metadata_without_an_end_is_refused(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(site.serve(server))
    server.files["/images/metadata/timestamp.json"].endless = True
    refused(site, RepositoryRefused, r"timestamp\.json: more than the limit of 16384")


def test_a_file_without_an_end_is_not_taken(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(site.serve(server))
    for path in site.files():
        server.files[f"/images/targets/base/{path.name}"].endless = True
    refused(site, ImageTooLarge, "more than")


def test_metadata_that_comes_byte_by_byte_is_given_up(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(site.serve(server), stall_timeout=2.0)
    server.files["/images/metadata/timestamp.json"].drip = 0.05
    refused(site, DownloadFailed, r"timestamp\.json: .*timed out")


# -- signatures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["timestamp", "targets", "snapshot"])
def test_metadata_that_was_changed_is_refused(site: Site, role: str) -> None:
    site.put("base", b"1")
    site.forge(role, lambda signed: setattr(signed, "expires", signed.expires.replace(year=2099)))
    site.trusting()
    refused(site, RepositoryRefused, f"{role} was signed by 0/1 keys")


def test_a_root_that_its_former_keys_did_not_sign_is_refused(site: Site, tmp_path: Path) -> None:
    site.put("base", b"1")
    stranger = replace(site, folder=tmp_path / "strange", keys=tmp_path / "strange-keys").begin()
    stranger.change(lambda repository: repository.rotate("root", stranger.keys))
    (site.folder / "metadata/2.root.json").write_bytes((stranger.folder / "metadata/2.root.json").read_bytes())
    site.trusting()
    refused(site, RepositoryRefused, "root was signed by 0/1 keys")


def test_another_repository_in_its_place_is_refused(site: Site, tmp_path: Path) -> None:
    other = replace(site, folder=tmp_path / "other", keys=tmp_path / "other-keys").begin()
    other.put("base", b"1")
    site.trusting(f"{other.folder}#{site.line.partition('#')[2]}")
    error = refused(site, RepositoryRefused, "no version of its root has the digest")
    assert "`image.sources`" in error.hint


def test_a_role_below_its_threshold_is_refused_and_harms_no_other(site: Site) -> None:
    site.put("base", b"1")
    site.delegate("alice", "alice-*", "alice", "anna", threshold=2)
    with pytest.raises(NotPermitted, match="no key that was given may publish 'alice-1'"):
        site.put("alice-1", b"2", by="alice")
    site.delegate("alice", "alice-*", "alice", "anna")
    site.put("alice-1", b"2", by="alice")
    site.delegate("alice", "alice-*", "alice", "anna", threshold=2)
    node = site.trusting()
    node.ensure("base")
    with pytest.raises(
        RepositoryRefused, match=f"{site.folder}: the role alice: alice was signed by 1/2 keys"
    ) as caught:
        node.ensure("alice-1")
    assert "has to do it again" in caught.value.hint


# -- who may publish what ----------------------------------------------------------------------------------------------


def test_a_delegate_publishes_its_names_and_no_others(site: Site) -> None:
    site.delegate("alice", "alice-*|a")
    site.put("alice-1", b"1", by="alice")
    with pytest.raises(NotPermitted, match="'base'"):
        site.put("base", b"2", by="alice")
    site.put("other", b"3")
    site.make("base", b"2", to=site.publisher)
    forged = site.put("alice-2", b"4", by="alice")

    def widen(signed: object) -> None:
        for name in ("base", "alice-3"):
            for part in ("disk.qcow2", "kernel", "initrd"):
                path = f"{name}/{part}.zst"
                signed.targets[path] = replaced(signed.targets[f"alice-2/{part}.zst"], path)  # type: ignore[attr-defined]

    site.forge("alice", widen, site.key("alice"))
    node = site.trusting()
    what = rf"{site.folder}: the role alice \(for alice-\*, a\) offers 'base': outside of its delegation"
    error = refused(site, RepositoryRefused, what)
    assert "`belljar image publish`" in error.hint
    node.ensure("alice-1")
    assert node.resolve("alice-1").facts["signer"] == "role alice"
    site.put("base", b"5")  # the site's own goes before whatever a delegate says
    node.ensure("base")
    assert node.resolve("base").digest != forged.digest and node.resolve("base").facts["signer"] == "role targets"


def test_a_delegate_cannot_have_the_site_sign_for_it(site: Site) -> None:
    """It can write to the folder: the site's next publication must not put its own name to that."""
    site.put("base", b"1")
    site.put("other", b"2")
    node = site.trusting()
    forgery(site, "targets", site.key("alice"))
    with pytest.raises(RepositoryRefused, match="targets"):
        for path in (site.folder / "metadata").glob("*.targets.json"):
            if path != site.metadata("targets"):
                path.unlink()
        site.put("third", b"3")
    assert nothing_left(node)


def test_a_former_state_under_a_new_number_is_not_signed_anew(site: Site) -> None:
    """By somebody who can write to the folder, and would have a revoked image back; or an online key used for the wrong role."""
    site.put("bad", b"1")
    former = site.metadata("targets").read_bytes()
    site.change(lambda repository: repository.remove("bad"))
    for name, data in (("targets", former), ("snapshot", site.metadata("timestamp").read_bytes())):
        (site.folder / f"metadata/99999999999.{name}.json").write_bytes(data)
    site.put("base", b"2")
    assert sorted(row.name for row in sync.sync(site.trusting(), (), (site.line,), dry_run=True)) == ["base"]
    (site.folder / "metadata/2.root.json").write_bytes((site.folder / "metadata/1.root.json").read_bytes())
    with pytest.raises(RepositoryRefused, match=r"2\.root\.json is version 1"):
        site.put("base", b"3")


def test_a_role_that_expired_costs_no_other_its_images_nor_its_own_nodes_theirs(site: Site) -> None:
    site.put("base", b"1")
    site.delegate("alice", "alice-*")
    site.put("alice-1", b"2", by="alice")
    node = site.trusting()
    node.ensure("alice-1")
    site.forge("alice", lambda signed: setattr(signed, "expires", signed.expires.replace(year=2020)), site.key("alice"))
    next((node.folder / "sources").glob("*/alice.json")).unlink()
    assert rows(site) == [("alice-1", sync.FAILED)] and node.resolve("alice-1")
    assert rows(site, "base") == [("base", sync.NEW)]


# -- files that are not what was signed --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["folder", "http"])
@pytest.mark.parametrize("part", ["disk.qcow2", "kernel", "initrd"])
@pytest.mark.parametrize("how", ["changed", "cut"])
def test_a_file_that_is_not_what_was_signed_is_refused(
    site: Site, server: Server, part: str, way: str, how: str
) -> None:
    site.put("base", b"1")
    (path,) = (site.folder / "targets/base").glob(f"*.{part}.zst")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "changed" else data[:-2])
    site.trusting(*[site.serve(server)] if way == "http" else [])
    refused(site, ImageMismatch, "Observed")
    assert not list(site.node.work_folder("downloads").glob("*.part")) or part != "disk.qcow2"


def test_a_signed_bomb_ends_at_the_size_it_states(site: Site) -> None:
    """Its publisher is trusted, and was wrong about the size."""
    site.put("base", b"1")

    def shrink(signed: object) -> None:
        custom = signed.targets["base/disk.qcow2.zst"].custom  # type: ignore[attr-defined]
        custom["sizes"]["disk.qcow2"] = 1000

    site.forge("targets", shrink, site.keys / "targets.pem")
    site.trusting()
    refused(site, ImageMismatch, r"larger than the limit|1000")


def test_a_signed_disk_that_opens_other_files_is_refused_all_the_same(site: Site) -> None:
    from tests.unit.image.test_qcow2 import HOSTILE, image

    with intake.draft(site.publisher, "evil") as folder:
        image(folder / manifest.DISK, HOSTILE["it has a backing file"], size=16 << 20)
        made = site.publisher.publish(folder, manifest.Facts("x", "", 1.0, "", 16 << 20, {}), None)
    site.change(lambda repository: repository.put(site.publisher, "base", made, Progress()))
    site.trusting()
    refused(site, ImageCorrupt, "backing file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"virtual_size": -1}, {"virtual_size": "16"}, {"sizes": {"disk.qcow2": -1}}, {"sizes": {"disk.qcow2": "16"}}, {"digest": "base"}, {"append": "a\nb"}, {"append": 1}, {"os": None}, {"sizes": {}}, {"sizes": []},
        {"facts": {"context": "root"}}, {"facts": {"use_firmware": "x"}}, {"facts": {"firmware": ["x"]}}, {"facts": {"x": {"y": 1}}}, {"facts": {"least_memory": "x"}},
        {"facts": []}, {"more": 1},
    ],
)  # fmt: skip
def test_a_signed_statement_of_another_form_is_refused(site: Site, wrong: dict[str, object]) -> None:
    site.put("base", b"1")
    site.put("other", b"2")
    site.forge(
        "targets", lambda signed: signed.targets["base/disk.qcow2.zst"].custom.update(wrong), site.keys / "targets.pem"
    )
    node = site.trusting()
    refused(site, RepositoryRefused, r"the role targets \(for \*\) offers 'base'")
    node.ensure("other")


@pytest.mark.parametrize(
    "line", ["/a/b", "/a#sha256=12", "a/b#sha256=", "ftp://x/y#sha256=", "http://#sha256=", "http://x/y?z#sha256=", "http://[::1#sha256=",
             "http://x:y/#sha256=", "file://host/x#sha256="],
)  # fmt: skip
def test_a_source_that_cannot_be_is_refused(line: str) -> None:
    with pytest.raises(BadSetting, match=r"image\.sources"):
        source_of(f"{line}{'a' * 64}" if line.endswith("=") else line)

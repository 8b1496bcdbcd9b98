"""What the site decides in a batch job, whatever its user has in files, variables and options."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.slurm_fixtures import SETTINGS, VM, Cluster
from tests.live.conftest import STORE

RAN = "echo ran; cat /proc/sys/kernel/hostname"


@pytest.fixture
def own(cluster: Cluster) -> Iterator[Path]:
    """The user's settings file."""
    folder = cluster.site.home("bjalice") / ".config"
    (folder / "belljar").mkdir(parents=True)
    for path in (folder, folder / "belljar"):
        os.chown(path, cluster.site.home("bjalice").stat().st_uid, -1)
    yield folder / "belljar/belljar.toml"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("section", "line", "key"),
    [
        ("network", "egress = 'open'", "network.egress"),
        ("qemu", "binary = '/bin/true'", "qemu.binary"),
        ("site", "lock = []", "site.lock"),
    ],
)
def test_a_file_of_the_users_changes_nothing_and_is_named(
    cluster: Cluster, own: Path, section: str, line: str, key: str
) -> None:
    own.write_text(f"[{section}]\n{line}\n")
    refused, native = cluster.run(RAN, VM), cluster.run("echo native")
    assert (refused.exit, refused.out) == ("125:0", b"")
    assert f"{own}:2, {key}: is for the site to set".encode() in refused.err, refused.err
    assert (native.state, native.out) == ("COMPLETED", b"native\n")


def test_a_variable_changes_nothing_and_is_named(cluster: Cluster) -> None:
    refused = cluster.run(RAN, VM, "--export=ALL,BELLJAR_NETWORK_EGRESS=open,BELLJAR_BATCH_ALLOW=* *")
    assert (refused.exit, refused.out) == ("125:0", b"")
    for word in ("BELLJAR_NETWORK_EGRESS, network.egress", "BELLJAR_BATCH_ALLOW, batch.allow"):
        assert f"environment {word}: is for the site to set".encode() in refused.err, refused.err


def test_a_file_named_by_the_job_is_only_its_own_word(cluster: Cluster) -> None:
    mine = cluster.script("[batch]\ndefault_image = ''\n", "mine.toml")
    end = cluster.run('echo "$@"', VM, args=("--config", str(mine), "-v"))
    assert end.out == f"--config {mine} -v\n".encode(), end.err


def test_a_private_image_of_a_name_the_site_gives_does_not_pass(cluster: Cluster) -> None:
    """The user's own, in the user's folder of the node, with the name of the site's; and one that the site does not have."""
    user = cluster.site.home("bjalice").stat().st_uid
    assert cluster.run(RAN, VM).out.startswith(b"ran\n")  # the node's folder of this user is there now
    names = cluster.site.node / str(user) / "store/images/names"
    names.mkdir(parents=True, exist_ok=True)
    (target,) = {os.readlink(path) for path in (STORE / "images/names").iterdir() if path.name == "debian12"}
    image = names.parent / Path(target).name
    try:
        shutil.copytree(STORE / "images" / Path(target).name, image, symlinks=True)
        for name in ("debian12", "debian12-mine"):
            (names / name).symlink_to(target)
        with open(image / "disk.qcow2", "r+b") as disk:
            disk.write(b"no disk at all")
        with cluster.other_settings(f'{SETTINGS}allow = ["* debian*"]\n'):
            sites = cluster.run(RAN, VM)
            mine = cluster.sbatch(RAN, "--comment=vm=debian12-mine")
            assert sites.out.startswith(b"ran\n"), sites.err
            if mine.returncode == 0:  # where the plugin cannot see which images there are
                refused = cluster.end(mine.stdout.decode().strip())
                assert refused.exit == "125:0" and b"your own of this name is not meant" in refused.err, refused.err
    finally:
        shutil.rmtree(image, ignore_errors=True)
        for name in ("debian12", "debian12-mine"):
            (names / name).unlink(missing_ok=True)

"""Builds: what mmdebstrap is told, where packages come from, what is said when it fails."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests.unit.image.image_parts import system

from belljar.errors import BadOption, CommandMissing, ImageError, NoSpace, OverLimit
from belljar.host import commands
from belljar.image import USUAL, Image
from belljar.image.build import debian as build
from belljar.image.build.debian import Recipe
from belljar.image.store.store import Store

SOURCES = ["deb http://mirror/debian bookworm main"]


@pytest.fixture(autouse=True)
def mirror(store: Store) -> None:
    """Nobody asks apt on this host, which takes its time."""
    store.settings = replace(store.settings, mirror="http://mirror/debian")


def fake_program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of this name before all others."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    (folder / "apt-config").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_mmdebstrap_is_told_everything_in_single_words() -> None:
    recipe = Recipe(
        "bookworm", packages=("gcc", "python3"), commands=("echo 'it is' > /etc/motd; true", 'touch "$HOME/x"')
    )
    argv = build.command_line(recipe, Path("/store/root.tar"), SOURCES)
    assert argv[0] == "mmdebstrap" and argv[-3:] == ["bookworm", "/store/root.tar", *SOURCES]
    assert "--include=linux-image-amd64,python3,ca-certificates,busybox-static,e2fsprogs,procps,gcc" in argv
    assert "--customize-hook=chroot \"$1\" /bin/sh -ec 'echo '\"'\"'it is'\"'\"' > /etc/motd; true'" in argv
    assert argv.index("--customize-hook=" + build.CLEAN) > max(
        index for index, word in enumerate(argv) if "motd" in word or "HOME" in word
    )


def test_a_machine_gets_no_identity_from_its_image() -> None:
    for trace in ("/etc/machine-id", "/etc/ssh/ssh_host_", "random-seed", "/etc/hostname", "/etc/resolv.conf"):
        assert trace in build.CLEAN


@pytest.mark.parametrize(
    ("words", "does"),
    [
        (("poweroff",), "poweroff -f"), (("halt",), "poweroff -f"), (("reboot",), "reboot -f"), (("shutdown", "-h", "now"), "poweroff -f"),
        (("shutdown", "-r", "now"), "reboot -f"), (("shutdown",), "poweroff -f"), (("shutdown", "+5"), ""), (("shutdown", "-r", "23:00"), ""),
    ],
)  # fmt: skip
def test_an_image_has_the_usual_commands_to_end_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], does: str
) -> None:
    for folder in ("etc/ssh", "usr/sbin", "var/lib/dbus", "var/lib/systemd"):
        (tmp_path / folder).mkdir(parents=True)
    subprocess.run(["sh", "-c", build.CLEAN, "clean", str(tmp_path)], check=True)
    fake_program(tmp_path / "bin", "busybox", 'echo "$@"', monkeypatch)
    done = subprocess.run([tmp_path / "usr/sbin" / words[0], *words[1:]], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == does and (does or "not at a later time" in done.stderr)


def test_the_mode_follows_from_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for uid, mode in ((0, "--mode=root"), (1000, "--mode=unshare")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert mode in build.command_line(Recipe("bookworm"), Path("/x"), SOURCES)


def test_the_drivers_a_guest_needs_are_kept_and_those_of_hardware_are_not() -> None:
    options = [
        word.removeprefix("--dpkgopt=path-") for word in build.command_line(Recipe("bookworm"), Path("/x"), SOURCES)
    ]
    rules = [word.partition("=")[::2] for word in options if word.startswith(("exclude=", "include="))]

    def is_kept(driver: str, root: str) -> bool:  # dpkg(1): the last rule that fits decides
        path = f"{root}/6.1.0-1-amd64/kernel/drivers/{driver}"
        return [what for what, pattern in rules if fnmatchcase(path, pattern)][-1] == "include"

    needed = (
        "virtio_net",
        "net_failover",
        "veth",
        "tun",
        "macvlan",
        "vxlan/vxlan",
        "wireguard/wireguard",
        "bonding/bonding",
    )
    others = (
        "block/virtio_blk",
        "virtio/virtio_pci",
        "char/virtio_console",
        "char/hw_random/virtio-rng",
        "misc/pvpanic/pvpanic",
    )
    for root in ("/lib/modules", "/usr/lib/modules"):
        assert all(is_kept(f"{driver}.ko", root) for driver in (*others, *(f"net/{name}" for name in needed)))
        for driver in ("net/ethernet/intel/e1000/e1000.ko", "net/wireless/ath/ath.ko.xz", "gpu/drm/drm.ko"):
            assert not is_kept(driver, root)


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        (Recipe("bookworm", "../x"), BadOption),
        (Recipe("bookworm", disk_size=1), OverLimit),
        (Recipe("bookworm", disk_size=1 << 60), OverLimit),
    ],
)
def test_a_recipe_that_cannot_be_built_is_refused_at_once(store: Store, recipe: Recipe, error: type[Exception]) -> None:
    with pytest.raises(error):
        build.build(store, recipe)
    assert not store.folder.exists()


@pytest.mark.parametrize(
    ("says", "hint"),
    [
        ("E: Unable to locate package nonsense", "--packages"),
        ("E: Failed to fetch http://mirror/x  Temporary failure resolving", "image.mirror"),
        ("E: failed to run newuidmap", "uidmap"),
        ("E: something else", "Correct"),
    ],
)
def test_a_failed_build_shows_the_last_lines_and_where_the_log_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, hint: str
) -> None:
    fake_program(tmp_path / "bin", "mmdebstrap", f"echo first; echo '{says}' >&2; exit 25", monkeypatch)
    with pytest.raises(ImageError) as caught:
        build.build(store, Recipe("bookworm"))
    log = store.folder / "logs/build-debian12.log"
    assert says in caught.value.message and "25" in caught.value.message and str(log) in caught.value.message
    assert hint in caught.value.hint
    assert says in log.read_text() and "first" in log.read_text()
    assert store.images() == [] and list((store.folder / "drafts").iterdir()) == []


def test_a_build_that_hangs_is_stopped(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(tmp_path / "bin", "mmdebstrap", "trap 'exit 9' TERM; echo 'I: begun'; sleep 600 & wait", monkeypatch)
    monkeypatch.setattr(build, "PATIENCE", 0.2)
    with pytest.raises(ImageError, match="ended with"):
        build.build(store, Recipe("bookworm"))


def test_what_mmdebstrap_packs_becomes_the_image(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = system(tmp_path / "root")
    script = (
        f'for word; do case $word in *.tar) out=$word;; esac; done; echo "I: unpacking"; tar -C {root} -cf "$out" .'
    )
    fake_program(tmp_path / "bin", "mmdebstrap", script, monkeypatch)
    store.settings = replace(store.settings, max_size=2 << 30)
    image = build.build(store, Recipe("trixie", disk_size=1 << 30))
    assert image.names == ("debian13",) and image.source == "build debian trixie" and image.virtual_size == 1 << 30
    assert image.os == "Small Linux 1" and image.kernel and image.facts["suite"] == "trixie"
    again = build.build(store, Recipe("trixie"), only_if_missing=True)
    assert again.digest == image.digest


def test_two_who_need_the_default_image_build_it_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, built = system(tmp_path / "root"), tmp_path / "built"
    script = (
        f'for word; do case $word in *.tar) out=$word;; esac; done; echo once >> {built}; tar -C {root} -cf "$out" .'
    )
    fake_program(tmp_path / "bin", "mmdebstrap", script, monkeypatch)
    store.settings = replace(store.settings, max_size=16 << 30)
    images: list[Image] = []
    both = [
        threading.Thread(target=lambda: (store.ensure(USUAL), images.append(store.resolve(USUAL)))) for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert len(images) == 2 and images[0].digest == images[1].digest and built.read_text() == "once\n"


def test_a_host_without_mmdebstrap_is_told_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "which", lambda name: None)
    with pytest.raises(CommandMissing) as caught:
        build.build(store, Recipe("bookworm"))
    assert "mmdebstrap" in caught.value.hint


def test_a_build_does_not_begin_without_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda path: 1 << 20)
    with pytest.raises(NoSpace, match="a build needs"):
        build.build(store, Recipe("bookworm"))


def test_the_mirror_of_the_settings_goes_first() -> None:
    assert build.sources("trixie", "http://local/debian/") == [
        "deb http://local/debian trixie main",
        "deb http://local/debian trixie-updates main",
        "deb http://local/debian-security trixie-security main",
    ]
    assert f"{build.DEFAULT}-security" in build.sources("bookworm", "http://local/archive")[-1]

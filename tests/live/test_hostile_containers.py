# ruff: noqa: F811 - fixtures
"""Container images that want to do harm, and registries that lie: refused in one line, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.live import container_lab as lab
from tests.live.conftest import Belljar
from tests.live.container_fixtures import (  # noqa: F401
    Importer,
    belljar,
    bring,
    drafts_of,
    importer,
    layout,
    refused,
    server,
    site,
    store,
    until_asked,
)
from tests.live.container_lab import Layout, device, file, folder, hard_link, layer, link, mirrored
from tests.unit.image.http_server import Server, serving

pytestmark = pytest.mark.timeout(900)
ZEROS = 256 << 20  # bytes of a layer that packs to a thousandth


def everything(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """What is below a folder, to be compared later."""
    paths = sorted(folder.rglob("*"))
    return {str(path): (it.st_mode, it.st_uid, it.st_size, it.st_mtime_ns) for path in paths for it in (path.lstat(),)}


# -- hostile layers -------------------------------------------------------------------------------------------------------

HOSTILE: dict[str, Sequence[Sequence[lab.Member]]] = {
    "an absolute link, then a file below it": ([link("out", "OUTSIDE")], [file("out/written", "x")]),
    "a relative link, then a file below it": ([link("a/out", "../../../../../../../../OUTSIDE")], [file("a/out/written", "x")]),
    "a link in the place of a folder": ([folder("etc")], [link("etc", "OUTSIDE"), file("etc/written", "x")]),
    "a name with dots": ([file("../../../../../../../../../OUTSIDE/written", "x")],),
    "an absolute name": ([file("OUTSIDE/written", "x")],),
    "a hard link out": ([hard_link("shadow", "../../../../../../../../OUTSIDE/secret"), file("shadow", "x")],),
    "an absolute hard link out": ([hard_link("secret", "OUTSIDE/secret")],),
    "a hard link by a link": ([link("out", "OUTSIDE"), hard_link("secret", "out/secret")],),
    "a whiteout by a link": ([link("out", "OUTSIDE")], [file("out/.wh.secret")]),
    "a whiteout with dots": ([file("x")], [file(".wh...")], [file("a/.wh..")]),
    "an opaque whiteout by a link": ([link("out", "OUTSIDE")], [file("out/.wh..wh..opq")]),
    "device nodes": ([folder("dev"), device("dev/mem", 1, 1), device("disk", 8, 0, tarfile.BLKTYPE), device("kmsg", 1, 11)],),
    "a setuid program of root's": ([file("su", "#!/bin/sh\n", mode=0o6755)],),
    "an extended attribute of a namespace's own": ([file("x", xattrs={"trusted.overlay.opaque": "y", "user.a": "b"})],),
    "a socket's and an unknown type": ([lab.member("odd", b"S")], [lab.member("odder", b"Z")]),
    "the same name as folder and file": ([folder("x"), file("x/y", "1")], [file("x", "2")], [folder("x"), file("x/y", "3")]),
}  # fmt: skip


def hostile(what: str, outside: Path) -> list[bytes]:
    place = str(outside).lstrip("/")
    made = []
    for members in HOSTILE[what]:
        for info, _ in members:
            dots = "/" if info.issym() and info.linkname == "OUTSIDE" else ""
            info.name, info.linkname = (
                info.name.replace("OUTSIDE", place),
                info.linkname.replace("OUTSIDE", dots + place),
            )
        made.append(layer(*members))
    return made


@pytest.mark.parametrize(
    "what", [*list(HOSTILE)[:1], *(pytest.param(it, marks=pytest.mark.slow) for it in list(HOSTILE)[1:])]
)
def test_a_hostile_layer_is_harmless_or_refused_in_one_line(importer: Importer, what: str) -> None:
    outside = importer.place / "outside"
    outside.mkdir()
    (outside / "secret").write_text("of the host")
    for path in (outside, outside / "secret"):
        os.chown(path, importer.place.stat().st_uid, -1)
    before = everything(outside)
    done = importer.bring([lab.busybox("sh"), *hostile(what, outside)])
    if done.returncode:
        refused(done)
    assert everything(outside) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_bomb_is_refused_and_leaves_nothing(importer: Importer, how: str) -> None:
    done = importer.bring([layer(file("zeros", bytes(ZEROS)))], how=how, BELLJAR_IMAGE_MAX_SIZE="64M")
    refused(done, "image.max_size")


@pytest.mark.slow
def test_a_layer_that_is_not_what_the_configuration_says_is_refused(belljar: Belljar, layout: Layout) -> None:
    layout.image("x", [lab.busybox("sh")], diff_ids=[f"sha256:{'0' * 64}"])
    refused(bring(belljar, f"oci:{layout.path}:x"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"User": "nobody"},
        {"User": "9" * 30},
        {"User": "-5"},
        {"User": "a\0b"},
        {"User": "0:nogroup"},
        {"User": f"0:{'9' * 12}"},
        {"Cmd": "/bin/id"},
        {"Env": ["A", 7]},
        {"WorkingDir": 7},
    ],
)
def test_a_configuration_that_no_machine_can_have_is_refused_in_one_line(
    belljar: Belljar, layout: Layout, config: dict[str, Any]
) -> None:
    layout.image("x", [layer(file("x"))], config)
    refused(bring(belljar, f"oci:{layout.path}:x"))


@pytest.mark.slow
def test_too_many_files_are_refused_or_fit(belljar: Belljar, layout: Layout) -> None:
    layout.image("x", [layer(*(file(f"d{number % 100}/{number}") for number in range(100_000)))])
    done = bring(belljar, f"oci:{layout.path}:x")
    assert done.returncode == 0 or refused(done)


# -- registries that lie --------------------------------------------------------------------------------------------------

SHORT = {"BELLJAR_IMAGE_STALL_TIMEOUT": "3", "BELLJAR_IMAGE_MAX_SIZE": "64M"}
TRICKS: dict[str, tuple[dict[str, Any], str]] = {
    "other bytes than the digest says": ({"data": b"\x1f\x8b\x08 not what was ordered"}, "not what"),
    "half a layer": ({"cut_after": [1000] * 9}, ""),
    "silence in the middle": ({"stall_after": 1000}, "3 s"),
    "a layer without an end": ({"endless": True, "data": b"x" * 4096}, ""),
    "a layer that is not there": ({"status": 404}, ""),
    "a server that fails": ({"status": 503}, ""),
    "a redirect to the metadata service": ({"redirect": "http://169.254.169.254/latest/meta-data/"}, ""),
    "a redirect in a circle": ({"redirect": "/v2/a/blobs/there"}, ""),
    "a redirect to a file": ({"redirect": "file:///etc/passwd"}, ""),
}  # fmt: skip

QUICK = ("other bytes than the digest says", "silence in the middle")


@pytest.mark.parametrize(
    "what", [*QUICK, *(pytest.param(it, marks=pytest.mark.slow) for it in TRICKS if it not in QUICK)]
)
def test_a_registry_that_lies_is_refused_in_one_line(
    belljar: Belljar, tmp_path: Path, layout: Layout, server: Server, what: str
) -> None:
    tricks, words = TRICKS[what]
    layout.image("x", [layer(file("x", os.urandom(2000)))])
    source = mirrored(server, layout, "x", "a", **tricks)
    env = lab.environment(tmp_path / "home", server.address.partition("//")[2])
    done = bring(belljar, source, **SHORT, HOME=env["HOME"])
    assert "127.0.0.1" in refused(done, words)


@pytest.mark.slow
def test_where_a_registry_sends_skopeo_no_login_goes_and_nothing_comes_from(
    belljar: Belljar, tmp_path: Path, layout: Layout, server: Server
) -> None:
    layout.image("x", [layer(file("x", os.urandom(2000)))])
    with serving("localhost") as inside:
        inside.put("/internal", b"of the site alone")
        source = mirrored(server, layout, "x", "a", redirect=f"{inside.address}/internal")
        server.put("/v2/", b"{}", login=f"{lab.USER}:{lab.PASSWORD}")
        address = server.address.partition("//")[2]
        env = lab.environment(tmp_path / "home", address)
        login = lab.write_login(tmp_path, address)
        refused(bring(belljar, source, **SHORT, HOME=env["HOME"], REGISTRY_AUTH_FILE=str(login)), "not what")
        assert any(server.logins) and inside.logins and not any(inside.logins)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tricks", "words"),
    [
        ({"login": "alice:secret"}, "skopeo login"),
        ({"status": 404}, "Correct the"),
        ({"data": b"<html>moved</html>", "content_type": "text/html"}, ""),
        ({"data": b"[" * 100_000, "content_type": lab.MANIFEST}, ""),
        ({"data": b"{}", "content_type": lab.MANIFEST}, ""),
        ({"stall_after": 3, "data": b"{}  "}, "3 s"),
        ({"redirect": "http://169.254.169.254/latest/meta-data/"}, ""),
    ],
)  # fmt: skip
def test_a_registry_without_the_manifest_is_refused_in_one_line(
    belljar: Belljar, tmp_path: Path, layout: Layout, server: Server, tricks: dict[str, Any], words: str
) -> None:
    layout.image("x", [lab.busybox("sh")])
    source = mirrored(server, layout, "x", "a")
    server.put("/v2/a/manifests/x", **tricks)
    env = lab.environment(tmp_path / "home", server.address.partition("//")[2])
    refused(bring(belljar, source, **SHORT, HOME=env["HOME"]), words)


@pytest.mark.slow
def test_another_manifest_than_the_pinned_one_is_refused(
    belljar: Belljar, tmp_path: Path, layout: Layout, server: Server
) -> None:
    manifest = layout.image("x", [lab.busybox("sh")])
    source = mirrored(server, layout, "x", "a").replace(":x", f"@{manifest['digest']}")
    server.files[f"/v2/a/manifests/{manifest['digest']}"].data += b" "
    env = lab.environment(tmp_path / "home", server.address.partition("//")[2])
    refused(bring(belljar, source, **SHORT, HOME=env["HOME"]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_import_that_is_ended_leaves_nothing(
    belljar: Belljar, tmp_path: Path, store: Path, layout: Layout, server: Server, number: int
) -> None:
    """Of one that was killed the next one removes the rest."""
    layout.image("x", [layer(file("x", os.urandom(1 << 20)))])
    source = mirrored(server, layout, "x", "a", stall_after=1000)
    env = lab.environment(tmp_path / "home", server.address.partition("//")[2])
    blob = json.loads(layout.read(layout.tags["x"]))["layers"][0]["digest"]
    started = belljar.popen("image", "import", source, "--name", "made", env={"HOME": env["HOME"]})
    until_asked(server, blob, started)
    started.send_signal(number)
    started.communicate(timeout=30)
    assert started.returncode == (143 if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        assert drafts_of(store) != []
        layout.image("y", [layer(file("y"))])
        assert bring(belljar, f"oci:{layout.path}:y").returncode == 0
    assert drafts_of(store) == []

"""Container images as machines: real registries, images made by hand, hostile ones among them.

A quick run makes one machine. What boots more, or takes longer, is slow.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests import roots
from tests.batch.lab.pulls import drafts
from tests.batch.lab.site import Site
from tests.live import container_lab as lab
from tests.live.conftest import STORE, Belljar, Completed
from tests.live.container_lab import Hub, Layout, device, file, folder, hard_link, layer, link, mirrored
from tests.unit.image.http_server import Server, serving

pytestmark = pytest.mark.timeout(900)
ZEROS = 256 << 20  # bytes of a layer that packs to a thousandth
CLASSIC = {"trixie": (), "sid": ("--use-signing-config=false",)}  # of `cosign sign`: by the key alone
SHELL = {"Entrypoint": ["/bin/sh", "-c"], "Env": ["PATH=/bin"]}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with lab.registry(tmp_path_factory.mktemp("hub"), login=True) as hub:
        yield hub


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this module: what its images leave is gone with it. The kernel's image is that of the other tests."""
    return tmp_path_factory.mktemp("containers") / "store"


@pytest.fixture
def belljar(tmp_path: Path, store: Path) -> Iterator[Belljar]:
    command = Belljar(tmp_path, store, {"BELLJAR_PATHS_SITE_STORE": str(STORE)})
    yield command
    command.close()
    assert [str(path) for path in drafts_of(store)] == []


def drafts_of(store: Path) -> list[Path]:
    """Drafts and downloads that are still there."""
    places = [store / "images" / name for name in ("drafts", "downloads")]
    return [path for place in places if place.is_dir() for path in place.iterdir() if path.suffix != ".lock"]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def bring(belljar: Belljar, source: str, **env: str) -> Completed:
    return belljar("image", "import", source, "--name", "made", env=env)


def refused(done: Completed, *words: str) -> str:
    """It failed by one line, which is returned, and a hint; before that it told only how far it was."""
    text = done.stderr.decode()
    *steps, line, hint = text.splitlines() or ["", ""]
    assert done.returncode == 125 and line.startswith("belljar: ") and hint.startswith("hint: "), text
    assert all(step.startswith("belljar: ") for step in steps) and len(line) < 1000, text
    assert all(word in f"{line} {hint}" for word in words), text
    return line


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


class Importer(NamedTuple):
    """Somebody who imports. *place*: a folder of theirs, where images may lie."""

    run: Callable[..., Completed]
    place: Path

    def bring(
        self, layers: Sequence[bytes], config: Mapping[str, Any] | None = None, *, how: str = "gzip", **env: str
    ) -> Completed:
        layout = Layout(self.place / "layout")
        layout.image("x", layers, config, how=how)
        return self.run("image", "import", f"oci:{layout.path}:x", "--name", "made", env=env)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """With ordinary users, who have subordinate ids."""
    site = Site("containers")
    yield site
    site.close()


@pytest.fixture(params=["root", pytest.param("bjalice", marks=pytest.mark.slow)])
def importer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Importer]:
    if request.param == "root":
        yield Importer(request.getfixturevalue("belljar"), tmp_path)
        return
    site: Site = request.getfixturevalue("site")
    place = site.home(request.param) / "place"
    place.mkdir()
    os.chown(place, site.home(request.param).stat().st_uid, -1)
    yield Importer(lambda *words, **more: site.command(*words, user=request.param, check=False, **more), place)
    shutil.rmtree(place)
    assert drafts(site.node) == [] and site.leftovers() == []


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


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.put("/v2/a/blobs/there", redirect="/v2/a/blobs/there")
        yield server


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


def until_asked(server: Server, blob: str, process: subprocess.Popen[bytes]) -> None:
    while not any(blob in path for path, *_ in server.requests):
        assert server.asked.wait(60) and process.poll() is None
        server.asked.clear()


# -- images that run ------------------------------------------------------------------------------------------------------


def test_an_image_behind_a_login_runs_its_own_command(
    belljar: Belljar, tmp_path: Path, layout: Layout, hub: Hub
) -> None:
    layout.image("x", [lab.busybox("sh", "id")], {"Cmd": ["/bin/id"]})
    hub.push(layout, "x", "scratch:1")
    source, home = hub.reference("scratch:1"), {"HOME": hub.env["HOME"]}
    refused(belljar.run("--image", source, env=home), "skopeo login")
    done = belljar.run("--image", source, env={**home, "REGISTRY_AUTH_FILE": str(hub.login)})
    assert (done.returncode, done.stdout) == (0, b"uid=0 gid=0 groups=0\n"), done.stderr.decode()
    pulls = len(hub.log)
    assert belljar.run("--image", source, "--", "/bin/sh", "-c", "exit 7", env=home).returncode == 7
    assert len(hub.log) == pulls and belljar.leftovers() == []


@pytest.fixture
def from_layout(belljar: Belljar, tmp_path: Path, layout: Layout) -> Any:
    """Make an image of these layers and run a command in it: what it printed."""

    def run(layers: Sequence[bytes], *words: str, config: dict[str, Any] | None = None, **how: Any) -> str:
        tag = f"t{len(layout.tags)}"
        layout.image(tag, layers, config, **how)
        done = belljar.run("--image", f"oci:{layout.path}:{tag}", *(["--", *words] if words else []))
        assert done.returncode == 0, done.stderr.decode()
        assert belljar.leftovers() == []
        return done.stdout.decode()

    return run


@pytest.mark.slow
def test_a_root_with_musl_and_its_user(from_layout: Any, tmp_path: Path) -> None:
    root = lab.musl_root(tmp_path / "musl")
    config = {
        **SHELL,
        "User": "worker",
        "WorkingDir": "/home",
        "Cmd": ["hello; id; pwd; echo $A"],
        "Env": ["PATH=/bin", "A=b c"],
    }
    printed = from_layout([root], config=config)
    assert printed.splitlines() == [
        "hello by musl",
        "uid=1234(worker) gid=5678(worker) groups=99(extra),5678(worker)",
        "/home",
        "b c",
    ]


@pytest.mark.slow
def test_a_hundred_layers_with_whiteouts(from_layout: Any) -> None:
    layers = [lab.busybox("sh", "ls", "cat"), layer(folder("d"), *(file(f"d/{it}", str(it)) for it in range(100)))]
    layers += [layer(file(f"d/.wh.{it}"), file(f"n/{it}", str(it))) for it in range(97)]
    layers += [layer(file("n/.wh..wh..opq"), file("n/last"))]
    assert from_layout(layers, "/bin/sh", "-c", "ls /d /n").split() == ["/d:", "97", "98", "99", "/n:", "last"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zstd", ""])
def test_layers_packed_otherwise(from_layout: Any, how: str) -> None:
    assert from_layout([lab.busybox("sh", "echo"), layer(file("x", "1"))], "/bin/busybox", "cat", "/x", how=how) == "1"


@pytest.mark.slow
def test_owners_modes_attributes_and_capabilities_are_kept(from_layout: Any) -> None:
    raw = "\1\0\0\2\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"  # cap_net_raw+ep
    made = layer(
        file("suid", "x", mode=0o4755, uid=7, gid=8), folder("sticky", mode=0o1777, mtime=1_000_000_000), file("far", uid=3_000_000_000),
        file("cap", "x", xattrs={"security.capability": raw, "user.note": "kept"}), device("null2", 1, 3), hard_link("same", "suid"),
    )  # fmt: skip
    words = "stat -c '%n %a %u %g %h' suid sticky far same; stat -c %Y sticky; stat -c '%F %t %T' null2"
    printed = from_layout([lab.busybox("sh", "stat"), made], "/bin/sh", "-c", f"cd /; {words}")
    assert printed.splitlines() == [
        "suid 4755 7 8 2", "sticky 1777 0 0 2", "far 644 3000000000 0 1", "same 4755 7 8 2", "1000000000", "character special file 1 3",
    ]  # fmt: skip


@pytest.mark.slow
def test_capabilities_attributes_and_setuid_count_in_the_machine(importer: Importer) -> None:
    cat, caps = Path("/bin/cat"), "\1\0\0\2\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"  # cap_net_raw+ep
    made = layer(
        file("capable", cat, mode=0o755, xattrs={"security.capability": caps, "user.note": "kept"}), file("su", cat, mode=0o4755),
    )  # fmt: skip
    done = importer.bring(
        [lab.debian_root("libcap2-bin", "attr").read_bytes(), made],
        {"User": "1234", "Env": ["PATH=/usr/sbin:/sbin:/bin"]},
    )
    assert done.returncode == 0, done.stderr.decode()
    words = (
        "getcap /capable; getfattr --only-values -n user.note /capable; echo; /capable /proc/self/status | grep CapEff"
    )
    done = importer.run("run", "--image", "made", "--", "sh", "-c", f"{words}; /su /proc/self/status | grep Uid")
    assert [line.split() for line in done.stdout.decode().splitlines()] == [
        ["/capable", "cap_net_raw=ep"], ["kept"], ["CapEff:", "0000000000002000"], ["Uid:", "1234", "0", "0", "0"],
    ], done.stderr.decode()  # fmt: skip


@pytest.mark.slow
def test_of_a_list_the_one_for_this_architecture_is_taken(belljar: Belljar, layout: Layout, hub: Hub) -> None:
    images = [
        layout.image("", [lab.busybox("sh"), layer(file("which", name))], SHELL, architecture=name)
        for name in ("arm64", "amd64", "riscv64")
    ]
    layout.index("all", images)
    layout.index("foreign", images[::2])
    env = {"HOME": hub.env["HOME"], "REGISTRY_AUTH_FILE": str(hub.login)}
    digest = hub.push(layout, "all", "list:1")
    hub.push(layout, "foreign", "list:2")
    for source in (hub.reference("list:1"), hub.reference(f"list@{digest}"), f"oci:{layout.path}:all"):
        done = belljar.run("--image", source, "--", "/bin/busybox", "cat", "/which", env=env)
        assert done.stdout == b"amd64", done.stderr.decode()
    for source in (hub.reference("list:2"), f"oci:{layout.path}:foreign"):
        refused(belljar.run("--image", source, "--", "x", env=env), "arm64")


@pytest.mark.slow
def test_a_small_debian_in_all_forms(belljar: Belljar, tmp_path: Path, layout: Layout) -> None:
    tar = lab.debian_root("libcap2-bin")
    layout.image(
        "d", [tar.read_bytes()], {"Cmd": ["cat", "/etc/debian_version"], "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    )
    archive = tmp_path / "d.tar"
    subprocess.run(
        ["skopeo", "copy", "--quiet", "--insecure-policy", f"oci:{layout.path}:d", f"docker-archive:{archive}:d:1"],
        check=True,
    )
    (tmp_path / "tree").mkdir()
    subprocess.run(["tar", "-xpf", str(tar), "-C", str(tmp_path / "tree"), "--exclude=./dev/*"], check=True)
    for source in (f"oci:{layout.path}:d", f"docker-archive:{archive}", f"dir:{tmp_path}/tree"):
        done = belljar.run("--image", source, "--", "cat", "/etc/debian_version")
        assert done.stdout.startswith(b"12."), done.stderr.decode()
    with open(archive, "rb") as stdin:
        done = belljar("image", "import", "-", "--name", "piped", stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    assert belljar.run("--image", "piped").stdout.startswith(b"12.")


@pytest.mark.slow
def test_jobs_that_ask_at_once_pull_once(belljar: Belljar, layout: Layout, hub: Hub) -> None:
    layout.image("x", [lab.busybox("sh"), layer(file("x", os.urandom(1 << 20)))], SHELL)
    hub.push(layout, "x", "once:1")
    env = {"HOME": hub.env["HOME"], "REGISTRY_AUTH_FILE": str(hub.login)}
    jobs = [
        belljar.popen("run", "--image", hub.reference("once:1"), "--", "/bin/sh", "-c", "exit 3", env=env)
        for _ in range(3)
    ]
    ended = [job.communicate(timeout=240) for job in jobs]
    assert [job.returncode for job in jobs] == [3] * 3, ended
    assert list(hub.fetched("once").values()) == [1, 1, 1]  # two layers and the configuration


# -- batch jobs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(belljar: Belljar, tmp_path: Path, hub: Hub) -> Any:
    """How to start a job of Slurm that names this image: words for `Popen`."""
    home = tmp_path / "home"
    shutil.copytree(hub.env["HOME"], home)
    (home / ".docker").mkdir()
    assert hub.login is not None
    shutil.copy(hub.login, home / ".docker/config.json")
    facts = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_JOB_PARTITION": "night", "SLURM_CPUS_ON_NODE": "1",
        "SLURM_MEM_PER_NODE": "600", "HOME": str(home),
    }  # fmt: skip

    def start(source: str, **settings: str) -> subprocess.Popen[bytes]:
        line = f"--array=no --time=9 --image={source}"
        script = tmp_path / "job"
        script.write_text(f"#!/opt/belljar/wrap-slurm {line}\n#!/bin/sh\ncat /which; exit 5\n")
        return belljar.popen("internal", "wrap", "slurm", line[:90], str(script), env={**facts, **settings})

    return start


@pytest.mark.slow
def test_a_batch_job_pulls_only_where_the_site_allows_it(belljar: Belljar, job: Any, layout: Layout, hub: Hub) -> None:
    layout.image("x", [lab.busybox("sh", "cat"), layer(file("which", "pulled\n"))])
    digest = hub.push(layout, "x", "team/job:1")
    source = hub.reference(f"team/job@{digest}")
    for settings, words in (
        ({}, b"from no registry"),
        ({"BELLJAR_BATCH_PULL": "site-registries", "BELLJAR_BATCH_REGISTRIES": f"{hub.address}/other"}, b"only from"),
    ):
        refusal = job(source, **settings)
        _, err = refusal.communicate(timeout=60)
        assert (refusal.returncode, err.count(b"\n")) == (125, 2) and words in err and b"batch.pull" in err, err
    allowed = {"BELLJAR_BATCH_PULL": "site-registries", "BELLJAR_BATCH_REGISTRIES": f"{hub.address}/team"}
    done = job(source, **allowed)
    out, err = done.communicate(timeout=240)
    assert (done.returncode, out) == (5, b"pulled\n"), err
    (outcome,) = [
        machine["outcome"]
        for machine in belljar.json("ps", "-a")
        if machine["requester"] == "slurm:7" and machine.get("outcome", {}).get("exit_code") == 5
    ]
    assert outcome["image_manifest"] == digest and belljar.leftovers() == []


@pytest.mark.slow
def test_a_job_that_ends_while_it_pulls_leaves_nothing(
    belljar: Belljar, job: Any, store: Path, layout: Layout, server: Server, tmp_path: Path
) -> None:
    layout.image("x", [layer(file("x", os.urandom(1 << 20)))])
    source = mirrored(server, layout, "x", "a", stall_after=1000)
    blob = json.loads(layout.read(layout.tags["x"]))["layers"][0]["digest"]
    lab.environment(tmp_path / "home", server.address.partition("//")[2])
    running = job(source, BELLJAR_BATCH_PULL="any")
    until_asked(server, blob, running)
    running.send_signal(signal.SIGTERM)
    running.wait(30)
    assert drafts_of(store) == [] and belljar.leftovers() == []


@pytest.mark.slow
def test_sync_moves_a_name_with_its_tag(belljar: Belljar, layout: Layout, hub: Hub) -> None:
    env = {"HOME": hub.env["HOME"], "REGISTRY_AUTH_FILE": str(hub.login)}
    layout.image("x", [layer(file("x", "1"))])
    first = hub.push(layout, "x", "moving:latest")
    done = belljar("image", "import", hub.reference("moving:latest"), "--name", "moving", env=env)
    assert done.returncode == 0, done.stderr.decode()
    assert sync(belljar, env) == ("up to date", f"{hub.reference('moving:latest')}@{first}")
    layout.image("x", [layer(file("x", "2"))])
    second = hub.push(layout, "x", "moving:latest")
    assert sync(belljar, env) == ("updated", f"{hub.reference('moving:latest')}@{second}")
    assert sync(belljar, env)[0] == "up to date"


def sync(belljar: Belljar, env: dict[str, str]) -> tuple[str, str]:
    done = belljar("image", "sync", "moving", "--format", "json", env=env)
    assert done.returncode == 0, done.stderr.decode()
    (row,) = json.loads(done.stdout)
    return row["what"], row["source"]


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["trixie", "sid"])
def test_an_image_is_taken_with_the_signature_that_the_site_asks_for(
    belljar: Belljar, layout: Layout, hub: Hub, tmp_path: Path, suite: str
) -> None:
    """By the cosign of Debian's, without the transparency log, which is not here."""
    layout.image("x", [layer(file("x", f"signed by that of {suite}"))])
    image = f"{hub.address}/{suite}@{hub.push(layout, 'x', f'{suite}:1')}"
    program = roots.root(suite, ["cosign"]) / "usr/bin/cosign"
    path, config = f"{program.parent}:{os.environ['PATH']}", tmp_path / "docker"
    config.mkdir()
    assert hub.login is not None
    shutil.copy(hub.login, config / "config.json")
    env = {
        "HOME": hub.env["HOME"], "DOCKER_CONFIG": str(config), "SSL_CERT_FILE": str(hub.certificate), "COSIGN_PASSWORD": "",
    }  # fmt: skip

    def cosign(*words: str) -> None:
        subprocess.run([program, *words], env={**os.environ, **env}, cwd=tmp_path, check=True, timeout=60)

    cosign("generate-key-pair")
    env["BELLJAR_IMAGE_TRUST"] = f"{hub.address} cosign --key={tmp_path}/cosign.pub --insecure-ignore-tlog=true"
    refused(bring(belljar, f"docker://{image}", **env, PATH=path), "cosign: Error: no signatures found")
    cosign("sign", "--yes", "--key=cosign.key", "--tlog-upload=false", *CLASSIC[suite], image)
    done = bring(belljar, f"docker://{image}", **env, PATH=path)
    assert done.returncode == 0, done.stderr.decode()
    cosign("generate-key-pair", "--output-key-prefix=other")
    env["BELLJAR_IMAGE_TRUST"] = env["BELLJAR_IMAGE_TRUST"].replace("cosign.pub", "other.pub")
    refused(bring(belljar, f"docker://{image}", **env, PATH=path), "not signed as `image.trust` asks")


@pytest.mark.slow
def test_an_image_that_is_not_signed_as_the_site_asks_is_refused(
    belljar: Belljar, layout: Layout, hub: Hub, tmp_path: Path
) -> None:
    """By a stand-in for cosign: how it is called."""
    layout.image("x", [layer(file("x", "signed"))])
    digest = hub.push(layout, "x", "signed:1")
    cosign = tmp_path / "bin/cosign"
    cosign.parent.mkdir()
    env = {
        "HOME": hub.env["HOME"], "REGISTRY_AUTH_FILE": str(hub.login), "BELLJAR_IMAGE_TRUST": f"{hub.address} cosign --key=/k",
    }  # fmt: skip
    refused(bring(belljar, hub.reference("signed:1"), **env), "cosign", "image.trust")
    for code in (1, 0):
        cosign.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/words; echo "Error: no signature" >&2; exit {code}\n')
        cosign.chmod(0o755)
        done = bring(belljar, hub.reference("signed:1"), **env, PATH=f"{cosign.parent}:{os.environ['PATH']}")
        assert (tmp_path / "words").read_text() == f"verify --key=/k {hub.address}/signed@{digest}\n"
        assert done.returncode == 0 if code == 0 else refused(done, "no signature")

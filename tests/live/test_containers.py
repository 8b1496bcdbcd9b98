# ruff: noqa: F811 - fixtures
"""Container images as machines: real registries, images made by hand.

A quick run makes one machine. What boots more, or takes longer, is slow. Hostile ones: test_hostile_containers.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import roots
from tests.live import container_lab as lab
from tests.live.conftest import Belljar
from tests.live.container_fixtures import (  # noqa: F401
    SHELL,
    Importer,
    belljar,
    bring,
    drafts_of,
    hub,
    importer,
    layout,
    refused,
    server,
    site,
    store,
    until_asked,
)
from tests.live.container_lab import Hub, Layout, device, file, folder, hard_link, layer, mirrored
from tests.unit.image.http_server import Server

pytestmark = pytest.mark.timeout(900)
CLASSIC = {"trixie": (), "sid": ("--use-signing-config=false",)}  # of `cosign sign`: by the key alone


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
    program, config = tmp_path / "bin/cosign", tmp_path / "docker"
    for place in (program.parent, config):
        place.mkdir()
    program.symlink_to(roots.root(suite, ["cosign"]) / "usr/bin/cosign")
    path = f"{program.parent}:{os.environ['PATH']}"
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

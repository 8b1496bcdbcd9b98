"""Container images: from where they come, what is refused, what the disk has at the end, and how it says it is to be started."""

from __future__ import annotations

import json
import os
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.container_parts import Container, digest_of, folder, layer, link, packed
from tests.unit.image.http_server import Server, serving
from tests.unit.image.image_parts import ext4, surveyor, system

from belljar.errors import (
    BadOption,
    BelljarError,
    CommandMissing,
    DownloadFailed,
    ImageCorrupt,
    ImageMismatch,
    ImageTooLarge,
    ImageUnfit,
    ImageUnknown,
    InputMissing,
    NotPermitted,
)
from belljar.host import commands
from belljar.image import Image, is_source
from belljar.image.container import disk as disks
from belljar.image.container import sources as from_where
from belljar.image.images import Images
from belljar.image.intake import intake, sources
from belljar.image.intake.sources import Order
from belljar.image.progress import Progress
from belljar.image.store.store import Store
from belljar.model import GIB, MIB, Account
from belljar.model import Container as Said

RELEASE = "6.1.0-9-amd64"
HELLO = layer(("bin/", folder()), ("bin/hello", b"#!/bin/sh\necho hello\n"))


@pytest.fixture
def store(store: Store, tmp_path: Path) -> Store:
    """With the image whose kernel container images get."""
    root = system(tmp_path / "kernel-root")
    with intake.draft(store, "debian12") as draft:
        ext4(draft / intake.RAW, root)
        surveyor(root)(draft / intake.RAW, 4 * MIB, draft / intake.ARCHIVE)
        intake.take(store, draft, intake.Origin("build debian bookworm", "debian12"), Progress())
    return store


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A registry without TLS, and nobody's logins."""
    with serving() as server:
        location = server.address.removeprefix("http://")
        settings = tmp_path / ".config/containers"
        settings.mkdir(parents=True)
        (settings / "registries.conf").write_text(f'[[registry]]\nlocation = "{location}"\ninsecure = true\n')
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        yield server


def bring(store: Store, source: str, name: str = "mine") -> Image:
    return sources.bring(store, Order(source, name))


def nothing_left(store: Store) -> bool:
    drafts = list((store.folder / "drafts").iterdir())
    return [image.names for image in store.images()] == [("debian12",)] and drafts == []


def refused(store: Store, source: str, kind: type[BelljarError], match: str = ".") -> BelljarError:
    with pytest.raises(kind, match=match) as caught:
        bring(store, source)
    assert "\n" not in caught.value.message and nothing_left(store)
    return caught.value


class Disk:
    """What is in an image's disk, by debugfs."""

    def __init__(self, image: Image, folder: Path) -> None:
        self.raw = folder / "look.raw"
        argv = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(image.disk), str(self.raw)]
        commands.run(argv, timeout=60)

    def ask(self, words: str) -> str:
        return commands.run(["debugfs", "-R", words, str(self.raw)], timeout=30).out.decode(errors="replace")

    def read(self, path: str) -> str:
        return self.ask(f"cat {path}")

    def stat(self, path: str) -> str:
        return self.ask(f"stat {path}")


def test_what_is_a_source_of_container_images() -> None:
    assert all(map(is_source, ("docker://example.org/a/b:1", "oci:/x", "docker-archive:/x", "sif:/x", "dir:/x")))
    assert not is_source("-") and not is_source("docker")


def test_an_image_of_a_registry_becomes_a_machine(store: Store, server: Server, tmp_path: Path) -> None:
    passwd = b"root:x:0:0::/root:/bin/sh\nweb:x:33:44::/srv:/bin/ash\n"
    groups = b"root:x:0:\nweb:x:44:\nlogs:x:50:web,x\n"
    container = Container(
        [HELLO, layer(("etc/passwd", passwd), ("etc/group", groups), ("usr/lib/os-release", b"PRETTY_NAME=Lab\n"))],
        {
            "Env": ["A=1=2", "PATH=/x", "bad"],
            "User": "web",
            "WorkingDir": "/srv",
            "Entrypoint": ["/e"],
            "Cmd": ["c", "d e"],
        },
    )
    image = bring(store, container.serve(server))
    assert image.names == ("mine",) and image.os == "Lab" and image.virtual_size == 8 * GIB
    assert image.facts["manifest"] == container.manifest()["digest"] and image.facts["layers"] == 2
    account = Account("web", 33, 44, "web", ((50, "logs"),), "/srv", "/bin/ash")
    assert image.container == Said(("/e",), ("c", "d e"), (("A", "1=2"), ("PATH", "/x")), "/srv", account)
    kernel = store.resolve("debian12")
    assert image.kernel and kernel.kernel and os.path.samefile(image.kernel, kernel.kernel)
    assert "belljar.bare" in image.append and f"belljar.sectors={8 * GIB // 512}" in image.append
    disk = Disk(image, tmp_path)
    assert disk.read("/bin/hello") == "#!/bin/sh\necho hello\n"
    assert disk.read(f"/lib/modules/{RELEASE}/modules.dep").startswith("kernel/virtio_blk.ko")
    assert "Mode:  01777" in disk.stat("/tmp")


def test_the_same_manifest_is_stored_once(store: Store, server: Server, tmp_path: Path) -> None:
    container = Container([HELLO])
    first = bring(store, container.serve(server), "first")
    again = bring(store, container.serve(server, tag="other"), "second")
    assert again.digest == first.digest and again.names == ("first", "second")
    assert bring(store, container.oci(tmp_path / "oci"), "third").digest == first.digest


def test_a_script_of_docker_save_is_read_from_a_file_or_standard_input(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Container([HELLO]).docker_archive(tmp_path / "saved.tar")
    image = bring(store, source)
    assert Disk(image, tmp_path).read("/bin/hello").endswith("hello\n") and image.source == source
    with open(tmp_path / "saved.tar") as stdin:
        monkeypatch.setattr(from_where.sys, "stdin", stdin)
        assert bring(store, from_where.STDIN, "other").digest == image.digest
    with open(os.devnull) as stdin:
        monkeypatch.setattr(from_where.sys, "stdin", stdin)
        with pytest.raises(InputMissing, match="nothing came"):
            bring(store, from_where.STDIN, "none")


def test_a_folder_becomes_a_machine(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree/opt").mkdir(parents=True)
    (tmp_path / "tree/opt/run").write_text("x")
    (tmp_path / "tree/dev").mkdir()
    (tmp_path / "tree/dev/left-out").touch()
    image = bring(store, f"dir:{tmp_path}/tree")
    disk = Disk(image, tmp_path)
    assert disk.read("/opt/run") == "x" and "left-out" not in disk.ask("ls /dev")
    assert image.facts["layers"] == 1 and image.container == Said()


def test_apptainers_file_becomes_a_machine(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree/.singularity.d").mkdir(parents=True)
    (tmp_path / "tree/.singularity.d/runscript").write_text("#!/bin/sh\n")
    argv = ["mksquashfs", f"{tmp_path}/tree", f"{tmp_path}/part", "-quiet", "-no-progress", "-all-root"]
    commands.run(argv, timeout=60)
    part = (tmp_path / "part").read_bytes()
    path = tmp_path / "image.sif"
    path.write_bytes(sif(part))
    image = bring(store, f"sif:{path}")
    assert image.container and image.container.command == ("/.singularity.d/runscript",)
    assert Disk(image, tmp_path).read("/.singularity.d/runscript") == "#!/bin/sh\n"
    for data, kind, words in (
        (sif(part, arch=b"04\0"), ImageUnfit, "another architecture"),
        (sif(part, filesystem=4), ImageUnfit, "encrypted"),
        (sif(part, size=1 << 60), ImageCorrupt, "a partition of"),
        (sif(part)[:200], ImageCorrupt, "not a container image"),
        (b"x" * 4096, ImageCorrupt, "not an image of Apptainer's"),
    ):
        path.write_bytes(data)
        with pytest.raises(kind, match=words):
            bring(store, f"sif:{path}", "other")


def sif(part: bytes, *, arch: bytes = b"02\0", filesystem: int = 1, size: int = 0) -> bytes:
    """One primary partition in Apptainer's file."""
    head = struct.pack(
        "<32s10s3s3s16s8q", b"#!/run", b"SIF_MAGIC\0", b"01\0", arch, b"", 0, 0, 0, 1, 128, 585, 1024, len(part)
    )
    extra = struct.pack("<ii", filesystem, 2) + arch
    entry = struct.pack(
        "<i?IIIqqqqqqq128s384s", 0x4004, True, 1, 1, 0, 1024, size or len(part), 0, 0, 0, 0, 0, b"", extra
    )
    return (head.ljust(128, b"\0") + entry).ljust(1024, b"\0") + part


def test_modules_for_hardware_are_left_out_unless_a_useful_one_needs_them(tmp_path: Path) -> None:
    lines = {
        "kernel/drivers/net/ethernet/big.ko": "", "kernel/drivers/net/tun.ko": "", "kernel/lib/test_bpf.ko": "",
        "kernel/fs/ext4/ext4.ko": "kernel/lib/crc16.ko", "kernel/lib/crc16.ko": "", "/etc/passwd": "", "kernel/fs/gone.ko": "",
    }  # fmt: skip
    (tmp_path / "modules.dep").write_text("".join(f"{path}: {needs}\n" for path, needs in lines.items()))
    for path in [*lines, "extra/unlisted.ko.xz"]:
        if path.endswith("o") and "gone" not in path:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
    disks._thin_out(tmp_path)
    assert {path.name for path in tmp_path.rglob("*.ko*")} == {"tun.ko", "ext4.ko", "crc16.ko"}


def test_an_ordinary_users_images_share_one_copy_of_the_sites_kernel(store: Store, tmp_path: Path) -> None:
    own, site = Images(tmp_path / "own", store.folder.parent, store.settings), store.resolve("debian12")
    first, second = (
        bring(own, Container([HELLO, layer((name, b"x"))]).oci(tmp_path / name), name) for name in ("a", "b")
    )
    assert first.kernel and second.kernel and site.kernel and first.kernel.samefile(second.kernel)
    assert not first.kernel.samefile(site.kernel) and first.kernel.read_bytes() == site.kernel.read_bytes()


def test_links_that_lead_elsewhere_stay_in_the_image(store: Store, tmp_path: Path) -> None:
    """The kernel's modules and the folders of a machine are laid over whatever is there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    hostile = layer(
        ("lib", link(str(outside))), ("etc", link(str(outside))), ("run", link("../../../../../../etc")),
        ("there", link("/etc")), ("there/passwd", b"root::0:0:::\n"), ("../../escaped", b"x"), ("/absolute", b"y"),
        ("dot", link("../" * 20 + str(outside))), ("dot/planted", b"z"),
    )  # fmt: skip
    image = bring(store, Container([hostile]).oci(tmp_path / "oci"))
    assert list(outside.iterdir()) == [] and not (tmp_path / "escaped").exists() and not Path("/absolute").exists()
    disk = Disk(image, tmp_path)
    assert "Type: directory" in disk.stat("/run") and "Type: directory" in disk.stat("/etc")
    assert disk.read("/absolute") == "y" and disk.read("/escaped") == "x"


def test_owners_modes_and_capabilities_are_kept(store: Store, tmp_path: Path) -> None:
    caps = {"SCHILY.xattr.security.capability": struct.pack("<5I", 0x2000001, 1 << 10, 0, 0, 0).decode("latin-1")}
    files = layer(
        ("su", {"mode": 0o4755, "uid": 0}), ("mine", {"uid": 1234, "gid": 4321, "mode": 0o640}),
        ("ping", {"mode": 0o755, "pax_headers": caps}), ("gone", b"x"), ("disk", {"type": tarfile.BLKTYPE, "devmajor": 8}),
        ("same", {"type": tarfile.LNKTYPE, "linkname": "mine"}),
    )  # fmt: skip
    image = bring(store, Container([files, layer((".wh.gone", b""))]).oci(tmp_path / "oci"))
    disk = Disk(image, tmp_path)
    assert "Mode:  04755" in disk.stat("/su") and "User:  1234   Group:  4321" in disk.stat("/mine")
    assert "Links: 2" in disk.stat("/same") and "not found" in commands.run(
        ["debugfs", "-R", "stat /gone", str(disk.raw)], timeout=30
    ).err.decode()  # fmt: skip
    assert "01 00 00 02 00 04" in disk.ask("ea_get -x /ping security.capability")  # for every user namespace's root


def test_layers_of_zstd_and_a_hundred_of_them(store: Store, tmp_path: Path) -> None:
    def zstd(data: bytes) -> bytes:
        return commands.run(["zstd", "-q", "-c"], timeout=10, stdin=data).out

    layers = [layer((f"file{number}", b"%d" % number)) for number in range(100)]
    image = bring(store, Container(layers, pack=zstd, packing="+zstd").oci(tmp_path / "oci"))
    disk = Disk(image, tmp_path)
    assert image.facts["layers"] == 100 and disk.read("/file0") == "0" and disk.read("/file99") == "99"


def test_of_a_list_the_one_for_this_architecture_is_taken(store: Store, server: Server, tmp_path: Path) -> None:
    arm = Container([layer(("arm", b"x"))], architecture="arm64")
    both = Container([layer(("ours", b"x"))], others=[arm])
    source = both.serve(server)
    image = bring(store, source)
    assert Disk(image, tmp_path).read("/ours") == "x"
    assert image.facts["manifest"] == both.manifest()["digest"] == sources.version(Order(source, "mine"), store)


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "manifest"])
def test_another_architecture_is_refused(store: Store, server: Server, is_list: bool) -> None:
    arm = Container([HELLO], architecture="arm64")
    arm.others = [Container([HELLO], architecture="riscv64")] if is_list else []
    refused(store, arm.serve(server), ImageUnfit, "is for .*arm64.*, not for .*amd64")


def test_what_a_registry_does_not_have(store: Store, server: Server) -> None:
    source = Container([HELLO]).serve(server)
    error = refused(store, source.replace(":latest", ":nosuch"), ImageUnknown, "nosuch")
    assert "tag" in error.hint
    other = f"{source.removesuffix(':latest')}@sha256:{'0' * 64}"
    refused(store, other, BelljarError)


def test_a_registry_that_lies_about_a_digest(store: Store, server: Server) -> None:
    container = Container([HELLO])
    source = container.serve(server)
    path = f"/v2/lab/image/blobs/{digest_of(packed(HELLO))}"
    server.files[path].data = packed(HELLO + bytes(512))
    refused(store, source, ImageMismatch)
    pinned = f"{source.removesuffix(':latest')}@{container.manifest()['digest']}"
    kind = "application/vnd.oci.image.manifest.v1+json"
    name = f"/v2/lab/image/manifests/{container.manifest()['digest']}"
    server.put(
        name,
        Container([layer(("x", b"x"))]).serve(server, "other") and server.files[name].data + b" ",
        content_type=kind,
    )
    refused(store, pinned, ImageMismatch)


def test_a_registry_that_wants_a_login(
    store: Store, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Container([HELLO]).serve(server)
    for served in server.files.values():
        served.login = "user:secret"
    error = refused(store, source, NotPermitted)
    assert "skopeo login" in error.hint and "secret" not in error.message
    host = server.address.removeprefix("http://")
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {host: {"auth": "dXNlcjpzZWNyZXQ="}}}))
    assert bring(store, source).facts["layers"] == 1


def test_a_registry_that_stalls(store: Store, server: Server) -> None:
    store.settings = replace(store.settings, stall_timeout=1.0)
    source = Container([HELLO]).serve(server, stall_after=10)
    refused(store, source, DownloadFailed, "1 KiB")


def test_a_bomb_is_stopped(store: Store, tmp_path: Path) -> None:
    bomb = layer(("zeros", bytes(48 * MIB)))
    store.settings = replace(store.settings, max_size=16 * MIB)
    refused(store, Container([bomb]).oci(tmp_path / "one"), ImageTooLarge)
    many = [layer((f"zeros{number}", bytes(8 * MIB))) for number in range(5)]
    refused(store, Container(many).oci(tmp_path / "many"), ImageTooLarge)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("docker://", BadOption, "not of the form"),
        ("docker://a b/c", BadOption, "not of the form"),
        ("docker://-x/y", BadOption, "not of the form"),
        ("oci:/nosuch", InputMissing, "no readable folder /nosuch"),
        ("oci:", InputMissing, "no readable folder"),
        ("docker-archive:/etc", InputMissing, "no readable file"),
        ("docker-archive:/etc/hostname", ImageCorrupt, "."),
        ("sif:/nosuch.sif", InputMissing, "no readable file"),
        ("dir:/etc/hostname", InputMissing, "no readable folder"),
    ],
)
def test_bad_sources(store: Store, source: str, kind: type[BelljarError], words: str) -> None:
    refused(store, source, kind, words)


def test_options_of_disks_and_strangers_are_refused(store: Store) -> None:
    for order in (Order("oci:/x", "mine", sha256="0" * 64), Order("oci:/x", "mine", kernel=Path("/x"))):
        with pytest.raises(BadOption, match="mean nothing"):
            sources.bring(store, order)
    with pytest.raises(BadOption, match="strangers"):
        sources.bring(store, Order("docker://example.org/x", "mine", public_only=True))


def test_a_user_that_the_image_does_not_have(store: Store, tmp_path: Path) -> None:
    source = Container([HELLO], {"User": "nosuch"}).oci(tmp_path / "oci")
    refused(store, source, ImageUnfit, "'nosuch' is not in its /etc/passwd")
    number = bring(store, Container([HELLO], {"User": "1000:7"}).oci(tmp_path / "number"))
    assert number.container and number.container.account == Account("user1000", 1000, 7, "group7")


def test_malformed_layouts(store: Store, tmp_path: Path) -> None:
    (tmp_path / "oci/blobs/sha256").mkdir(parents=True)
    (tmp_path / "oci/oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    for text in ("", "[]", "{}", '{"manifests": [{"digest": "sha256:../../x"}]}'):
        (tmp_path / "oci/index.json").write_text(text)
        refused(store, f"oci:{tmp_path}/oci", BelljarError)


def test_hosts_without_the_programs_are_told_what_to_install(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, which = Container([HELLO]).oci(tmp_path / "oci"), commands.which
    for name in ("skopeo", "umoci"):

        def missing(program: str, name: str = name) -> str | None:
            return None if program == name else which(program)

        monkeypatch.setattr("belljar.host.commands.which", missing)
        error = refused(store, source, CommandMissing, f"{name}: no such program")
        assert f"install --no-install-recommends {name}" in error.hint


def test_a_job_imports_once_and_again_when_the_tag_moves(store: Images, server: Server) -> None:
    first = Container([HELLO])
    source = first.serve(server)
    store.ensure(source, now=1000.0)
    image = store.resolve(source)
    assert image.facts["manifest"] == first.manifest()["digest"] and image.called.startswith("from-image-latest-")
    asked = len(server.requests)
    store.ensure(source, now=1001.0)
    assert len(server.requests) == asked
    second = Container([layer(("new", b"x"))])
    second.serve(server)
    store.ensure(source, now=2000.0)
    assert store.resolve(source).facts["manifest"] == second.manifest()["digest"]
    with pytest.raises(BadOption, match="not an absolute path"):
        store.ensure("oci:here")


def test_gc_removes_what_an_import_left(store: Store) -> None:
    left = store.work_folder("drafts") / "mine-1/work/tree"
    left.mkdir(parents=True)
    (left / "x").touch()
    assert list(Images.gc(store)) and nothing_left(store)  # type: ignore[arg-type]

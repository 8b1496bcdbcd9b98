"""Imports: what a file is, how it is unpacked, what is refused, and who waits for whom."""

from __future__ import annotations

import gzip
import lzma
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.image_parts import ext4

from belljar.errors import (
    BadOption,
    DownloadFailed,
    ImageCorrupt,
    ImageMismatch,
    ImageTooLarge,
    InputMissing,
    NoSpace,
)
from belljar.host import commands
from belljar.host.files import sha256_of
from belljar.image import Image
from belljar.image.intake import sandbox, sources
from belljar.image.intake.sources import Order
from belljar.image.store import qcow2
from belljar.image.store.store import Store
from belljar.model import MIB


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    return ext4(folder / "disk", size=2 * MIB)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def bring(store: Store, source: object, **order: object) -> Image:
    return sources.bring(store, Order(str(source), "mine", **order))  # type: ignore[arg-type]


def nothing_left(store: Store) -> bool:
    drafts = store.folder / "drafts"
    return store.images() == [] and (not drafts.exists() or list(drafts.iterdir()) == [])


def as_qcow2(raw: Path, out: Path, *options: str) -> Path:
    commands.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, str(raw), str(out)], timeout=30)
    return out


def zstd(data: bytes) -> bytes:
    return commands.run(["zstd", "-q", "-c"], timeout=10, stdin=data).out


def test_a_raw_disk_becomes_an_image_and_stays_where_it_was(store: Store, raw: Path) -> None:
    before = sha256_of(raw)
    image = bring(store, raw)
    assert image.source == raw.as_uri() and image.names == ("mine",)
    assert qcow2.virtual_size(image.disk) == raw.stat().st_size and sha256_of(raw) == before


@pytest.mark.parametrize("written", ["", "write -P 0 0 1M"])
def test_a_disk_of_zeros_is_refused(store: Store, tmp_path: Path, written: str) -> None:
    """Nothing was ever written, or zeros were."""
    empty = tmp_path / "empty.qcow2"
    commands.run(["qemu-img", "create", "-q", "-f", "qcow2", str(empty), "4M"], timeout=30)
    if written:
        commands.run(["qemu-io", "-f", "qcow2", "-c", written, str(empty)], timeout=30)
    with pytest.raises(ImageCorrupt, match=r"no partition table and no file system"):
        bring(store, empty)
    assert store.images() == []


@pytest.mark.parametrize(
    "options", [(), ("-c",), ("-o", "compat=0.10"), ("-o", "cluster_size=512"), ("-o", "compression_type=zstd", "-c")]
)
def test_every_qcow2_of_qemu_becomes_the_same_image(
    store: Store, raw: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert bring(store, as_qcow2(raw, tmp_path / "disk.img", *options)).digest == bring(store, raw).digest


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress, zstd], ids=["xz", "gzip", "zstd"])
@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_packed_files_are_unpacked(
    store: Store, raw: Path, tmp_path: Path, pack: Callable[[bytes], bytes], form: str
) -> None:
    disk = raw if form == "raw" else as_qcow2(raw, tmp_path / "disk")
    (tmp_path / "packed").write_bytes(pack(disk.read_bytes()))
    assert bring(store, tmp_path / "packed").digest == bring(store, raw).digest


def test_a_file_packed_twice_is_refused(store: Store, raw: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(gzip.compress(raw.read_bytes())))
    with pytest.raises(ImageCorrupt, match="neither") as refused:
        bring(store, tmp_path / "packed")
    assert "packed once" in refused.value.hint


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress, zstd], ids=["xz", "gzip", "zstd"])
def test_a_bomb_is_stopped_at_the_limit(store: Store, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "bomb").write_bytes(pack(bytes(6 * MIB)))
    store.settings = replace(store.settings, max_size=3 * MIB)
    with pytest.raises(ImageTooLarge):
        bring(store, tmp_path / "bomb")
    assert nothing_left(store)


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress, zstd], ids=["xz", "gzip", "zstd"])
def test_a_packed_file_that_is_cut_off_is_refused(
    store: Store, raw: Path, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "packed").write_bytes(pack(raw.read_bytes())[:-50])
    with pytest.raises(ImageCorrupt) as refused:
        bring(store, tmp_path / "packed")
    assert "image remove" not in refused.value.hint
    assert nothing_left(store)


FOREIGN = {
    "web page": b"<!DOCTYPE html><html>404</html>",
    "VMware disk": b"KDMV" + bytes(600),
    "tar archive": bytes(257) + b"ustar" + bytes(600),
    "encrypted disk": b"LUKS\xba\xbe" + bytes(600),
    "text": b"some text\n" * 100,
    "nothing": b"",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=list(FOREIGN))
def test_what_is_not_a_disk_is_refused(store: Store, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ImageCorrupt, match="neither a qcow2 file nor a disk") as refused:
        bring(store, tmp_path / "file")
    assert "qemu-img convert" in refused.value.hint
    assert nothing_left(store)


def test_a_qcow2_with_a_backing_file_never_reads_it(store: Store, raw: Path, tmp_path: Path) -> None:
    qcow2.write_overlay(tmp_path / "overlay", Path("/etc/passwd"), 64 * MIB)
    with pytest.raises(ImageCorrupt, match="backing file"):
        bring(store, tmp_path / "overlay")
    assert nothing_left(store)


def test_a_damaged_qcow2_is_refused(store: Store, raw: Path, tmp_path: Path) -> None:
    disk = as_qcow2(raw, tmp_path / "disk")
    with open(disk, "r+b") as file:
        file.seek(40)
        file.seek(int.from_bytes(file.read(8), "big"))  # its L1 table
        file.write(b"\x80" + b"\x00" * 3 + b"\x7f\xff\x02\x00")
    with pytest.raises(ImageCorrupt, match="qemu-img"):
        bring(store, disk)
    assert nothing_left(store)


def test_a_huge_virtual_disk_is_refused_before_it_is_written(store: Store, tmp_path: Path) -> None:
    commands.run(["qemu-img", "create", "-q", "-f", "qcow2", str(tmp_path / "disk"), "8T"], timeout=30)
    with pytest.raises(ImageTooLarge):
        bring(store, tmp_path / "disk")


def test_the_digest_decides_before_the_name_is_given(store: Store, raw: Path) -> None:
    assert bring(store, raw, sha256=sha256_of(raw)).facts["source_sha256"] == sha256_of(raw)
    store.drop("mine", force=True)
    with pytest.raises(ImageMismatch, match="ordered sha256 0000"):
        bring(store, raw, sha256="0" * 64)
    assert nothing_left(store)


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (Order("/missing", "mine"), InputMissing),
        (Order("/", "mine"), InputMissing),
        (Order("file:///missing", "mine"), InputMissing),
        (Order("/dev/null", "mine"), InputMissing),
        (Order("/etc/passwd", "mine", kernel=Path("/missing")), InputMissing),
        (Order("/etc/passwd", "mine", initrd=Path("/etc/passwd")), BadOption),
        (Order("/etc/passwd", "mine", sha256="xyz"), BadOption),
        (Order("/etc/passwd", "../mine"), BadOption),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused_at_once(
    store: Store, order: Order, error: type[Exception]
) -> None:
    with pytest.raises(error):
        sources.bring(store, order)
    assert not store.folder.exists()


@pytest.mark.parametrize("address", ["ftp://host/disk", "http://[::1/disk", "http://host:port/disk"])
def test_an_address_that_leads_nowhere_is_refused(store: Store, address: str) -> None:
    with pytest.raises(DownloadFailed):
        sources.bring(store, Order(address, "mine"))


def test_a_file_address_with_odd_characters(store: Store, raw: Path, tmp_path: Path) -> None:
    path = tmp_path / "a disk%25#1.img"
    commands.run(["cp", str(raw), str(path)], timeout=10)
    assert bring(store, path.as_uri()).source == bring(store, path).source == path.as_uri()


FULL = """\
import sys
from pathlib import Path
from belljar.image import Settings
from belljar.image.images import Images
from belljar.image.intake.sources import Order, bring
bring(Images(Path(sys.argv[2]), None, Settings()), Order(sys.argv[1], "mine"))
"""


@pytest.mark.parametrize("size", ["64k", "2m"])
def test_a_full_disk_is_called_full(tmp_path: Path, size: str) -> None:
    """While the file is copied, and while its disk is written."""
    (tmp_path / "raw").write_bytes(bytes(510) + b"\x55\xaa" + os.urandom(MIB + 510))
    mount = f'mount -t tmpfs -o size={size} none "$4" && exec "$1" -c "$2" "$3" "$4"'
    (tmp_path / "store").mkdir()
    argv = [
        "unshare",
        "-m",
        "sh",
        "-c",
        mount,
        "sh",
        sys.executable,
        FULL,
        str(tmp_path / "raw"),
        str(tmp_path / "store"),
    ]
    died = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "NoSpace" in died.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("complaint", "error"),
    [("x: No space left on device", NoSpace), ("File too large", ImageTooLarge), ("bad", ImageCorrupt)],
)
def test_a_programs_last_words_are_understood(complaint: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        sandbox.run(["sh", "-c", 'echo "$0" >&2; exit 1', complaint], [], 10, 1000)


def test_an_image_comes_over_http_and_leaves_no_download(
    store: Store, raw: Path, server: Server, tmp_path: Path
) -> None:
    url = server.put("/disk.xz", lzma.compress(raw.read_bytes()), cut_after=[1000])
    image = bring(store, url)
    assert image.source == url and image.digest == bring(store, raw).digest
    assert [path.suffix for path in (store.folder / "downloads").iterdir()] == [".lock", ".lock"]


def test_a_password_is_used_but_not_stored(store: Store, raw: Path, server: Server) -> None:
    url = server.put("/disk.xz", lzma.compress(raw.read_bytes()))
    image = bring(store, url.replace("http://", "http://user:secret@"))
    assert image.source == url and "secret" not in (image.disk.parent / "manifest.json").read_text()


def test_a_download_with_the_wrong_digest_is_fetched_anew_next_time(store: Store, raw: Path, server: Server) -> None:
    good = lzma.compress(raw.read_bytes())
    (store.folder.parent).mkdir(exist_ok=True)
    url = server.put("/disk.xz", b"\xfd7zXZ\0 something else")
    import hashlib

    wanted = hashlib.sha256(good).hexdigest()
    with pytest.raises(ImageMismatch):
        bring(store, url, sha256=wanted)
    assert nothing_left(store)
    server.put("/disk.xz", good)
    assert bring(store, url, sha256=wanted)


def test_two_imports_of_one_source_download_it_once(store: Store, raw: Path, server: Server) -> None:
    url = server.put("/disk.xz", lzma.compress(raw.read_bytes()))
    server.gate = threading.Event()
    images: list[Image] = []
    waiting = threading.Event()

    first = threading.Thread(target=lambda: images.append(bring(store, url)))
    first.start()
    assert server.asked.wait(10)
    second = threading.Thread(target=lambda: (waiting.set(), images.append(bring(store, url))))
    second.start()
    assert waiting.wait(10)
    server.gate.set()
    first.join(30)
    second.join(30)
    assert len(images) == 2 and images[0].digest == images[1].digest
    assert len(server.requests) <= 2


DYING = """\
import os, signal, sys
from pathlib import Path
from belljar.image import Settings
from belljar.image.intake import fetch
class Witness:
    def step(self, text): ...
    def amount(self, done, total):
        if done == 50_000:
            os.kill(os.getpid(), signal.SIGKILL)
fetch.download(sys.argv[1], Path(sys.argv[2]), Settings(), Witness())
"""


def test_a_download_goes_on_after_the_death_of_its_process(store: Store, server: Server) -> None:
    url = server.put("/disk.xz", lzma.compress(os.urandom(100_000)), stall_after=50_000)
    died = subprocess.run(
        [sys.executable, "-c", DYING, url, str(store.work_folder("downloads"))], timeout=30, check=False
    )
    assert died.returncode == -signal.SIGKILL
    server.files["/disk.xz"].stall_after = None
    with pytest.raises(ImageCorrupt, match="neither"):  # it came whole, though it is no disk
        bring(store, url)
    assert server.ranges() == ["", "bytes=50000-"]


def test_a_stalled_download_is_kept_for_the_next_attempt(store: Store, raw: Path, server: Server) -> None:
    data = lzma.compress(raw.read_bytes())
    url = server.put("/disk.xz", data, stall_after=100)
    store.settings = replace(store.settings, stall_timeout=0.2)
    with pytest.raises(DownloadFailed):
        bring(store, url)
    server.files["/disk.xz"].stall_after = None
    assert bring(store, url)
    assert server.ranges() == ["", "bytes=100-"]


def test_a_program_that_takes_too_long_ends(tmp_path: Path) -> None:
    with pytest.raises(ImageCorrupt, match="not finished after 0 s"):
        sandbox.run(["sleep", "100"], [], 0, 1 << 20)

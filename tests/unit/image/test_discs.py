"""Discs (ISO 9660) as images: what is taken in, what is refused, and that nothing looks into them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from belljar.errors import BadOption, ImageCorrupt
from belljar.image.intake.sources import Order, bring
from belljar.image.store.store import Store
from belljar.model import Context


def disc(path: Path, *, bootable: bool = True) -> Path:
    import pycdlib

    made = pycdlib.PyCdlib()
    made.new()
    made.add_fp(io.BytesIO(b"\xfa" * 4096), 4096, "/BOOT.;1")
    if bootable:
        made.add_eltorito("/BOOT.;1", boot_load_size=4)
    made.write(str(path))
    made.close()
    return path


def test_a_disc_is_taken_in_as_it_is(store: Store, tmp_path: Path) -> None:
    path = disc(tmp_path / "a.iso")
    image = bring(store, Order(str(path), "cernvm"))
    assert image.is_disc and image.kernel is None and image.virtual_size == path.stat().st_size
    files = store.boot_files(image, Context.NONE)
    assert (files.kernel, files.initrd, files.append) == (None, None, "")
    assert store.verify(image) == []


def test_a_disc_without_a_boot_loader_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ImageCorrupt, match="no boot loader"):
        bring(store, Order(str(disc(tmp_path / "a.iso", bootable=False)), "cernvm"))
    assert store.images() == []


@pytest.mark.parametrize("data", [b"", b"<html>", b"QFI\xfb" + bytes(0x9000), bytes(0x9000), b"\0" * 0x8001 + b"CD001"])
def test_what_is_no_disc_is_refused(store: Store, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.iso").write_bytes(data)
    with pytest.raises(ImageCorrupt):
        bring(store, Order(str(tmp_path / "a.iso"), "cernvm"))


@pytest.mark.parametrize("more", [{"firmware": "uefi"}, {"context": Context.INJECT}, {"kernel": Path("/etc/hosts")}])
def test_a_disc_has_its_own_kernel_and_context(store: Store, tmp_path: Path, more: dict[str, object]) -> None:
    with pytest.raises(BadOption, match="a boot disc with"):
        bring(store, Order(str(disc(tmp_path / "a.iso")), "cernvm", **more))  # type: ignore[arg-type]

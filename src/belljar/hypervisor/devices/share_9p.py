"""Folders by 9p: QEMU itself opens their files, as its user. A device of the hardware, in a template too."""

from __future__ import annotations

from belljar.hypervisor.devices import MODERN, ShareKind
from belljar.model import FileSystem, Share


class NineP(ShareKind):
    is_usual = True
    device = "virtio-9p-pci"
    # cache=mmap: what the host changes is seen at once, and shared mappings work.
    options = "trans=virtio,version=9p2000.L,msize=512000,cache=mmap,access=client"
    filesystem = FileSystem("9p", "9pnet_virtio 9p", options)
    # Root stays root only for root's own shares, with what that needs to act for any user of the guest.
    capabilities = ("chown", "dac_override", "dac_read_search", "fowner", "fsetid")

    def words(self, tag: str, share: Share) -> list[str]:
        """`none`: files the guest makes are QEMU's user's."""
        path = share.source.replace(",", ",,")
        export = f"local,id={tag},path={path},security_model=none,multidevs=remap"
        return [
            *("-fsdev", export + (",readonly=on" if share.readonly else "")),
            *("-device", f"{self.device}-non-transitional,fsdev={tag},mount_tag={tag}"),
        ]

    def xml(self, tag: str, share: Share, place: str) -> str:
        """`squash`: files the guest makes are the process's user's."""
        from xml.sax.saxutils import quoteattr

        ends = f"<source dir={quoteattr(share.source)}/><target dir={quoteattr(tag)}/>"
        words = f'<driver type="path"/>{ends}{"<readonly/>" if share.readonly else ""}{place}'
        return f'<filesystem type="mount" accessmode="squash" multidevs="remap" model="{MODERN}">{words}</filesystem>'


KIND = NineP()

"""Container images as the tests make them: layers, manifests, and where they lie."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.unit.image.http_server import Server

KINDS = "application/vnd.oci.image."
Files = Iterable[tuple[str, bytes | tarfile.TarInfo]]


def layer(*files: tuple[str, bytes | dict[str, Any]]) -> bytes:
    """A plain tar: (path, content), or (path, what its header says)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, what in files:
            head = tarfile.TarInfo(name)
            head.mode = 0o755
            if isinstance(what, bytes):
                head.size = len(what)
                tar.addfile(head, io.BytesIO(what))
                continue
            for key, value in what.items():
                setattr(head, key, value)
            tar.addfile(head)
    return out.getvalue()


def folder(**more: Any) -> dict[str, Any]:
    return {"type": tarfile.DIRTYPE, "mode": 0o755, **more}


def link(target: str, **more: Any) -> dict[str, Any]:
    return {"type": tarfile.SYMTYPE, "linkname": target, **more}


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def digest_of(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


@dataclass
class Container:
    """One image, or a list of images for several architectures."""

    layers: list[bytes] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = "amd64"
    pack: Any = packed
    packing: str = "+gzip"
    others: list[Container] = field(default_factory=list)  # then the manifest is a list with these, too
    blobs: dict[str, bytes] = field(default_factory=dict)

    def put(self, data: bytes, kind: str) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"mediaType": KINDS + kind, "digest": digest_of(data), "size": len(data)}

    def manifest(self) -> dict[str, Any]:
        """Its descriptor; the blobs are there then."""
        packed = [self.put(self.pack(data), f"layer.v1.tar{self.packing}") for data in self.layers]
        diffs = [digest_of(data) for data in self.layers]
        config = {
            "architecture": self.architecture, "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": diffs},
        }  # fmt: skip
        value = {
            "schemaVersion": 2, "mediaType": f"{KINDS}manifest.v1+json", "layers": packed,
            "config": self.put(json.dumps(config).encode(), "config.v1+json"),
        }  # fmt: skip
        entry = self.put(json.dumps(value).encode(), "manifest.v1+json")
        if not self.others:
            return entry
        entries = []
        for image in (self, *self.others):
            other = entry if image is self else image.manifest()
            self.blobs |= image.blobs
            entries.append({**other, "platform": {"os": "linux", "architecture": image.architecture}})
        index = {"schemaVersion": 2, "mediaType": f"{KINDS}index.v1+json", "manifests": entries}
        return self.put(json.dumps(index).encode(), "index.v1+json")

    def oci(self, place: Path, tag: str = "latest") -> str:
        """The image as a folder; its source."""
        entry = {**self.manifest(), "annotations": {"org.opencontainers.image.ref.name": tag}}
        (place / "blobs/sha256").mkdir(parents=True)
        for digest, data in self.blobs.items():
            (place / "blobs/sha256" / digest[7:]).write_bytes(data)
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        return f"oci:{place}"

    def serve(self, server: Server, name: str = "lab/image", tag: str = "latest", **tricks: Any) -> str:
        """The image in a registry; its source. *tricks*: of its layers."""
        entry = self.manifest()
        server.put("/v2/", b"{}")
        layers = {digest_of(self.pack(data)) for data in self.layers}
        for digest, data in self.blobs.items():
            server.put(f"/v2/{name}/blobs/{digest}", data, **(tricks if digest in layers else {}))
            if data.startswith(b'{"schemaVersion"'):
                kind = json.loads(data)["mediaType"]
                server.put(f"/v2/{name}/manifests/{digest}", data, content_type=kind)
                if digest == entry["digest"]:
                    server.put(f"/v2/{name}/manifests/{tag}", data, content_type=kind)
        return f"docker://{server.address.removeprefix('http://')}/{name}:{tag}"

    def docker_archive(self, path: Path, name: str = "lab/image:latest") -> str:
        """As `docker save` writes it."""
        diffs = [digest_of(data)[7:] for data in self.layers]
        config = json.dumps({
            "architecture": self.architecture, "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{each}" for each in diffs]},
        }).encode()  # fmt: skip
        name_of_config = f"{sha256(config).hexdigest()}.json"
        names = [f"{digest}/layer.tar" for digest in diffs]
        listed = [{"Config": name_of_config, "RepoTags": [name], "Layers": names}]
        files = [*zip(names, self.layers, strict=True), (name_of_config, config)]
        path.write_bytes(layer(*files, ("manifest.json", json.dumps(listed).encode())))
        return f"docker-archive:{path}"

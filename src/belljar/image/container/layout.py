"""An OCI layout with one image in it: a folder of blobs that are named by their digests.
https://github.com/opencontainers/image-spec/blob/main/image-layout.md"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, ImageCorrupt, ImageUnfit
from belljar.host.files import sha256_of

Json = dict[str, Any]
NAME = "image"  # of the only one
ARCHITECTURE = "amd64"
FOREIGN = "Name an image for x86_64: belljar emulates no other architecture."
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
LARGEST = 4 << 20
KINDS = "application/vnd.oci.image."
REF = "org.opencontainers.image.ref.name"


def read(layout: Path) -> tuple[Json, Json]:
    """Its manifest and its configuration. Raises ImageCorrupt."""
    with malformed("the image"):
        (entry,) = parsed((layout / "index.json").read_bytes(), "index.json")["manifests"]
        manifest = parsed(_blob(layout, entry["digest"]).read_bytes(), "the manifest")
        config = parsed(_blob(layout, manifest["config"]["digest"]).read_bytes(), "the configuration")
        layers = [str(layer["digest"]) for layer in manifest["layers"]]
        if len(layers) != len(config["rootfs"]["diff_ids"]):
            raise ImageCorrupt("the image's configuration has another number of layers than its manifest")
        return manifest, config


def check(source: str, config: Json) -> None:
    """Raise ImageUnfit for another architecture or system than ours."""
    kinds = str(config.get("os", "linux")), str(config.get("architecture", ARCHITECTURE))
    if kinds != ("linux", ARCHITECTURE):
        raise ImageUnfit(f"{source}: is for {' '.join(kinds)}, not for linux {ARCHITECTURE}", hint=FOREIGN)


def write(layout: Path, layers: Sequence[Path], config: Json) -> None:
    """A new layout of these plain tar files, which are moved into it."""
    (layout / "blobs/sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    entries = [_put_file(layout, layer) for layer in layers]
    diffs = {"type": "layers", "diff_ids": [entry["digest"] for entry in entries]}
    _write(layout, {"architecture": ARCHITECTURE, "os": "linux", "config": config, "rootfs": diffs}, entries)


def add(layout: Path, layer: Path) -> None:
    """Put one more layer, a plain tar file, on top of it."""
    manifest, config = read(layout)
    entry = _put_file(layout, layer)
    config["rootfs"]["diff_ids"].append(entry["digest"])
    config.pop("history", None)  # which tells of each layer, and need not be there
    _write(layout, config, [*manifest["layers"], entry])


def parsed(data: bytes, what: str) -> Json:
    """An object of JSON. Raises ImageCorrupt."""
    try:
        value = json.loads(data) if len(data) <= LARGEST else None
    except (ValueError, RecursionError) as exc:
        raise ImageCorrupt(f"{what}: not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ImageCorrupt(f"{what}: not an object of JSON, or too large")
    return value


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Raises ImageCorrupt for JSON that is not of the form it should have."""
    try:
        yield
    except BelljarError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, struct.error) as exc:
        raise ImageCorrupt(f"{what}: not a container image of a known form ({type(exc).__name__}: {exc})") from exc


def _write(layout: Path, config: Json, layers: Sequence[Json]) -> None:
    manifest = {
        "schemaVersion": 2, "mediaType": f"{KINDS}manifest.v1+json", "layers": list(layers),
        "config": _put(layout, config, "config.v1+json"),
    }  # fmt: skip
    entry = {**_put(layout, manifest, "manifest.v1+json"), "annotations": {REF: NAME}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))


def _put(layout: Path, value: Json, kind: str) -> Json:
    data = json.dumps(value).encode()
    digest = sha256(data).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": KINDS + kind, "digest": f"sha256:{digest}", "size": len(data)}


def _put_file(layout: Path, tar: Path) -> Json:
    digest, size = sha256_of(tar), tar.stat().st_size
    target = layout / "blobs/sha256" / digest
    target.unlink(missing_ok=True)
    os.link(tar, target)
    return {"mediaType": f"{KINDS}layer.v1.tar", "digest": f"sha256:{digest}", "size": size}


def _blob(layout: Path, digest: Any) -> Path:
    if not (match := DIGEST.fullmatch(digest)):
        raise ImageCorrupt(f"{digest!r} is not a sha256 digest")
    return layout / "blobs/sha256" / match[1]

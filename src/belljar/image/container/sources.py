"""From where container images come: registries and local forms, all brought into an OCI layout. skopeo speaks to registries, by the
user's own standard files for logins (`skopeo login`, `docker login`), certificates, mirrors and signatures."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

from belljar import errors
from belljar.host import commands
from belljar.host.commands import SEARCH_PATH
from belljar.host.files import sha256_of
from belljar.image import Settings
from belljar.image.build.debian import NO_USERS
from belljar.image.container import ARCHITECTURE, FOREIGN, IMAGE, LAYOUT, malformed, trees, trust
from belljar.image.intake import sandbox
from belljar.image.progress import Progress
from belljar.records import dataclass

STDIN = "docker-archive:-"
LONGEST = 86400  # seconds for one image
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
REFERENCE = re.compile(r"docker://[A-Za-z0-9][A-Za-z0-9._:/@-]{0,400}")
SAID = re.compile(r'level=fatal msg="((?:[^"\\]|\\.)*)"')
# What programs for containers read of a user: logins, certificates, registries, proxies.
THEIRS = (
    "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "CONTAINERS_REGISTRIES_CONF",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
LOGIN = "Log in with `skopeo login HOST`, or correct the name."
# Words in skopeo's or umoci's last message -> what that is here.
REFUSALS: tuple[tuple[tuple[str, ...], type[errors.BelljarError], str], ...] = (
    (("newuidmap", "subuid", "unshare:"), errors.CommandFailed, NO_USERS),
    (("no space left",), errors.NoSpace, errors.NoSpace.hint),
    (("file too large", "file size limit"), errors.ImageTooLarge, errors.ImageTooLarge.hint),
    (("did not match", "does not match", "digest mismatch"), errors.ImageMismatch, "Nothing was stored: what came is not what its digests say."),
    (("unauthorized", "authentication required", "denied", "invalid username"), errors.NotPermitted, LOGIN),
    (("manifest unknown", "name unknown", "statuscode: 404", "not found", "no descriptor found"), errors.ImageUnknown, "Correct the image's name or tag."),
    (("policy", "signature"), errors.NotPermitted, "/etc/containers/policy.json has what this host asks of container images."),
)  # fmt: skip


@dataclass(frozen=True)
class Fetched:
    """A container image in an OCI layout of ours."""

    manifest: str  # digest of its manifest, or of the list of manifests for several architectures, as the source has it
    layers: int
    config: dict[str, Any]


def check(source: str) -> None:
    """Raise BadOption or InputMissing for what cannot be a container image."""
    kind, _, place = source.partition(":")
    if kind == "docker" and not REFERENCE.fullmatch(source):
        raise errors.BadOption(f"{source}: not of the form docker://HOST/NAME[:TAG|@sha256:DIGEST]")
    if kind == "docker" or source == STDIN:
        return
    path, is_folder = path_of(source), kind in ("oci", "dir")
    exists = path.is_dir() if is_folder else path.is_file()
    if not (place and exists and os.access(path, os.R_OK)):
        what = "folder" if is_folder else "file"
        raise errors.InputMissing(f"{source}: no readable {what} {path}", hint="Correct the path.")


def path_of(source: str) -> Path:
    """The file or folder of a local source: `oci:` and the archives may have a tag behind it."""
    kind, _, place = source.partition(":")
    if kind in ("oci", "oci-archive", "docker-archive") and not os.path.exists(place):
        place = place.partition(":")[0]
    return Path(place).absolute()


def shown(source: str) -> str:
    """As it is stored: with the whole path."""
    if source.startswith("docker:"):
        return source
    kind, _, place = source.partition(":")
    return source if source == STDIN else f"{kind}:{os.path.abspath(place)}"


def version(source: str, settings: Settings, folder: Path) -> str:
    """What the source has now: the digest of a registry's manifest, time and size of a file; "" where it does not say."""
    check(source)
    if pinned := DIGEST.search(source):
        return pinned[0][1:]
    if source.startswith("docker:"):
        return _digest(_inspect(source, settings, folder))
    path = path_of(source)
    if source.startswith("dir:"):
        return ""
    file = (path / "index.json" if path.is_dir() else path).stat()
    return f"{file.st_size} {file.st_mtime_ns}"


def fetch(source: str, folder: Path, settings: Settings, progress: Progress) -> Fetched:
    """Make the layout in *folder* of an image. Raises ImageUnknown, ImageMismatch, ImageUnfit, ImageTooLarge, DownloadFailed, ..."""
    kind = source.partition(":")[0]
    if kind in ("dir", "sif"):
        tar, config = trees.packed(source, folder, settings.max_size, progress)
        with refusals(source):
            for words in (["init", "--layout", LAYOUT], ["new", "--image", IMAGE]):
                sandbox.run_in(folder, ["umoci", *words], sandbox.UNPACKING, settings.max_size)
            add_layer(folder, tar, settings.max_size)
        return Fetched(f"sha256:{sha256_of(tar)}", 1, {"config": config})
    if source == STDIN:
        progress.step("Reading standard input")
        source = f"docker-archive:{_spooled(folder / 'stdin', settings.max_size)}"
    top = _inspect(source, settings, folder)
    digest, ours, exact = _digest(top), _for_us(source, top), source
    if kind == "docker":
        if (pinned := DIGEST.search(source)) and pinned[0][1:] != digest:
            raise errors.ImageMismatch(f"{source}: got the manifest {digest}")
        trust.check(f"{_name(source)}@{digest}".removeprefix("docker://"), settings, folder, _environment())
        exact = f"{_name(source)}@{ours or digest}"
    progress.step(f"Fetching {source}")
    # skopeo checks each blob against its digest. umoci unpacks no zstd: such layers are packed anew.
    words = ["copy", "--quiet", "--retry-times=2", "--dest-compress-format=gzip", exact, f"oci:{IMAGE}"]
    seconds = _longest(source, _inspect(exact, settings, folder) if ours and exact != source else top, settings)
    _skopeo(words, source, folder, settings, seconds, _growth(source, folder / LAYOUT, settings, progress))
    with malformed(source):
        layers = json.loads(_inspect(f"oci:{IMAGE}", settings, folder))["layers"]
        config = json.loads(_inspect(f"oci:{IMAGE}", settings, folder, "--config"))
        if len(layers) != len(config["rootfs"]["diff_ids"]):
            raise errors.ImageCorrupt(f"{source}: its configuration has another number of layers than its manifest")
        system = f"{config.get('os', 'linux')} {config.get('architecture', ARCHITECTURE)}"
    if system != f"linux {ARCHITECTURE}":
        raise errors.ImageUnfit(f"{source}: is for {system}, not for linux {ARCHITECTURE}", hint=FOREIGN)
    return Fetched(digest, len(layers), config)


def add_layer(folder: Path, tar: Path, largest: int) -> None:
    """Put a plain tar file on top of the layers of the layout in *folder*."""
    words = ["raw", "add-layer", "--no-history", "--image", IMAGE, str(tar)]
    sandbox.run_in(folder, ["umoci", *words], sandbox.CONVERSION, largest)


def _longest(source: str, manifest: bytes, settings: Settings) -> float:
    """Seconds for all layers of a manifest, at 1 KiB a second: skopeo itself reads on for as long as a registry sends."""
    with malformed(source):
        size = sum(max(int(layer["size"]), 0) for layer in json.loads(manifest).get("layers") or ())
        return min(size / 1024 + 2 * settings.stall_timeout, LONGEST) if size else LONGEST


def _inspect(source: str, settings: Settings, folder: Path, *options: str) -> bytes:
    """The bytes of its manifest, or of a list of manifests."""
    words = ["inspect", "--raw", "--retry-times=2", *options, source]
    return _skopeo(words, source, folder, settings, settings.stall_timeout)


def _skopeo(
    words: list[str], source: str, folder: Path, settings: Settings, seconds: float, watch: sandbox.Watch | None = None
) -> bytes:
    with refusals(source):
        argv = ["skopeo", *words]
        return sandbox.run_in(folder, argv, ceil(seconds), settings.max_size, env=_environment(), watch=watch)


def _environment() -> dict[str, str]:
    """What programs for containers may see of the user's, with the user's helpers for logins."""
    env = {name: value for name in THEIRS if (value := os.environ.get(name))}
    return env | {"PATH": f"{os.environ.get('PATH', '')}:{SEARCH_PATH}"}


@contextmanager
def refusals(source: str) -> Iterator[None]:
    """What skopeo and umoci refuse, as errors of ours, in one line."""
    try:
        yield
    except errors.CommandMissing as exc:
        hint = f"Container images need it. As root: {commands.remedy()}"
        raise errors.CommandMissing(exc.message, hint=hint) from exc
    except errors.CommandFailed as exc:
        fatal = SAID.search(exc.message)
        text = fatal[1].replace('\\"', '"') if fatal else exc.message.strip().rpartition("\n")[2]
        text = text.strip(" \n⨯")[-600:]
        usual = errors.DownloadFailed if source.startswith("docker:") else errors.ImageCorrupt
        fits = ((kind, hint) for words, kind, hint in REFUSALS if any(word in text.lower() for word in words))
        kind, hint = next(fits, (usual, usual.hint))
        raise kind(f"{source}: {text}", hint=hint) from exc


def _growth(source: str, target: Path, settings: Settings, progress: Progress) -> sandbox.Watch:
    """Shows how much has come. Raises where that is too much, and where a registry brings nothing any more."""
    size, known, since = 0, 0, time.monotonic()

    def watch() -> None:
        nonlocal size, known, since
        with suppress(FileNotFoundError):  # a blob is just getting its name
            size = sum(path.stat().st_size for path in target.rglob("*"))
        progress.amount(size, None)
        if size > settings.max_size:
            raise errors.ImageTooLarge(f"{source}: more than {settings.max_size} bytes")
        if size >= known + 1024 * settings.stall_timeout:
            known, since = size, time.monotonic()
        elif source.startswith("docker:") and time.monotonic() - since > settings.stall_timeout:
            raise errors.DownloadFailed(f"{source}: less than 1 KiB a second came for {settings.stall_timeout:.0f} s")

    return watch


def _digest(raw: bytes) -> str:
    return f"sha256:{sha256(raw).hexdigest()}"


def _name(source: str) -> str:
    """The reference without tag and digest."""
    head, slash, last = source.partition("@")[0].rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def _for_us(source: str, raw: bytes) -> str:
    """Of a list of manifests, the digest of the one for this architecture; "" of a manifest. Raises errors.ImageUnfit."""
    with malformed(source):
        if "manifests" not in (top := json.loads(raw)):
            return ""
        platforms = {entry["digest"]: entry.get("platform") or {} for entry in top["manifests"]}
        for digest, platform in platforms.items():
            if (platform.get("os"), platform.get("architecture")) == ("linux", ARCHITECTURE):
                return str(digest)
        kinds = sorted({str(platform.get("architecture")) for platform in platforms.values()} - {"unknown", "None"})
    raise errors.ImageUnfit(f"{source}: is for {', '.join(kinds)}, not for {ARCHITECTURE}", hint=FOREIGN)


def _spooled(path: Path, largest: int) -> Path:
    with open(path, "xb") as file:
        while data := sys.stdin.buffer.read(1 << 20):
            if file.tell() + len(data) > largest:
                raise errors.ImageTooLarge(f"standard input: more than {largest} bytes")
            file.write(data)
    if not path.stat().st_size:
        hint = "For example: docker save NAME | belljar image import - --name N"
        raise errors.InputMissing("standard input: nothing came", hint=hint)
    return path

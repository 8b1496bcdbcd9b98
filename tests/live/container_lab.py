"""Container images made by hand, and registries that have them.

    layout = Layout(folder)
    layout.image("tag", [layer(file("bin/busybox", BUSYBOX, mode=0o755))], config={"Cmd": ["/bin/busybox", "id"]})
    with registry(folder, login=True) as hub:
        hub.push(layout, "tag", "team/tool:1")      # then docker://{hub.address}/team/tool:1, with hub.env

A `Layout` is a folder as the OCI lays it out, so every byte of a layer, a manifest or a list can be the test's own:
https://github.com/opencontainers/image-spec/blob/main/image-layout.md. `registry` is Debian's docker-registry on a free
port of the loopback, by TLS with an authority of its own; `mirrored` puts an image on a server that misbehaves.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import roots
from tests.unit.image.http_server import Server

from belljar.image.build import debian

OCI = "application/vnd.oci.image"
MANIFEST, INDEX, CONFIG, LAYER = (
    f"{OCI}.manifest.v1+json", f"{OCI}.index.v1+json", f"{OCI}.config.v1+json", f"{OCI}.layer.v1.tar",
)  # fmt: skip
BUSYBOX = Path("/bin/busybox")  # Debian's static one
MUSL = Path("/usr/lib/x86_64-linux-musl/libc.so")
LONGEST = 120.0  # seconds any one program may take here
USER, PASSWORD = "alice", "secret of alice"
HTPASSWD = f"{USER}:$2b$05$YN97PGroTs/MrHGHid0xpOsu5wcOhN.hqKK9DdcVtS5Ny.rWU6Qk.\n"  # bcrypt of PASSWORD
CONFIG_YML = """version: 0.1
log: {{level: info, formatter: json, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {data}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:0", secret: lab, tls: {{certificate: {pem}, key: {pem}}}}}
"""
AUTH_YML = "auth: {{htpasswd: {{realm: lab, path: {htpasswd}}}}}\n"
HELLO_C = """#include <stdio.h>
int main(void) { puts("hello by musl"); return 0; }
"""

Member = tuple[tarfile.TarInfo, bytes]


# -- layers ---------------------------------------------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: Any) -> Member:
    """One entry of a layer; *fields* are TarInfo's, and `xattrs`."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o755 if kind == tarfile.DIRTYPE else 0o644
    info.pax_headers = {f"SCHILY.xattr.{key}": value for key, value in fields.pop("xattrs", {}).items()}
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def file(name: str, data: bytes | str | Path = b"", **fields: Any) -> Member:
    content = data.read_bytes() if isinstance(data, Path) else data.encode() if isinstance(data, str) else data
    return member(name, data=content, **fields)


def folder(name: str, **fields: Any) -> Member:
    return member(name, tarfile.DIRTYPE, **fields)


def link(name: str, to: str) -> Member:
    return member(name, tarfile.SYMTYPE, linkname=to)


def hard_link(name: str, to: str) -> Member:
    return member(name, tarfile.LNKTYPE, linkname=to)


def device(name: str, major: int, minor: int, kind: bytes = tarfile.CHRTYPE) -> Member:
    return member(name, kind, devmajor=major, devminor=minor)


def layer(*members: Member) -> bytes:
    """A tar archive of exactly these entries, in this order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def busybox(*applets: str) -> bytes:
    """A layer with one static program, and names for it."""
    return layer(
        folder("bin"), file("bin/busybox", BUSYBOX, mode=0o755), *(link(f"bin/{it}", "busybox") for it in applets)
    )


def packed(tar: bytes, how: str) -> bytes:
    if how == "zstd":
        return subprocess.run(["zstd", "-qc"], input=tar, capture_output=True, check=True, timeout=LONGEST).stdout
    return gzip.compress(tar, 1, mtime=0) if how == "gzip" else tar


def musl_root(scratch: Path) -> bytes:
    """A root as Alpine's: musl's loader, a program that needs it, a shell of busybox."""
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "hello.c").write_text(HELLO_C)
    subprocess.run(
        ["musl-gcc", "-o", str(scratch / "hello"), str(scratch / "hello.c")],
        check=True,
        capture_output=True,
        timeout=LONGEST,
    )
    release = 'ID=alpine\nPRETTY_NAME="Alpine of the lab"\n'
    return layer(
        folder("bin"), folder("lib"), folder("etc"), file("bin/busybox", BUSYBOX, mode=0o755), link("bin/sh", "busybox"),
        file("lib/ld-musl-x86_64.so.1", MUSL, mode=0o755), file("bin/hello", scratch / "hello", mode=0o755),
        file("etc/os-release", release), file("etc/passwd", "root:x:0:0::/:/bin/sh\nworker:x:1234:5678::/home:/bin/sh\n"),
        file("etc/group", "root:x:0:\nworker:x:5678:\nextra:x:99:worker\n"), folder("home", uid=1234, gid=5678),
    )  # fmt: skip


def debian_root(*packages: str) -> Path:
    """A small root of Debian 12 as a tar file, made once in the state folder of the tests: a minute."""
    words = ["mmdebstrap", "--variant=essential", "--format=tar", f"--include={','.join(packages)}",
             "--dpkgopt=force-unsafe-io", *(f"--dpkgopt=path-exclude={path}" for path in roots.UNREAD)]  # fmt: skip
    place = roots.folder_for_all(roots.STATE / "containers")
    made = place / f"bookworm-{hashlib.sha256(repr(words).encode()).hexdigest()[:16]}.tar"
    with roots.alone(made.with_suffix(".lock")):
        if not made.exists():
            draft = made.with_suffix(".draft")
            env = {**os.environ, **debian.proxies(), "DEBIAN_FRONTEND": "noninteractive"}
            argv = [
                "setpriv",
                "--pdeathsig=KILL",
                "--",
                *words,
                "bookworm",
                str(draft),
                *debian.sources("bookworm", ""),
            ]
            subprocess.run(argv, env=env, check=True, capture_output=True, timeout=roots.LONGEST, cwd="/")
            draft.rename(made)
    return made


# -- images ---------------------------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """Images in a folder."""

    path: Path
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)  # tag -> descriptor

    def __post_init__(self) -> None:
        (self.path / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (self.path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, kind: str, **fields: Any) -> dict[str, Any]:
        """Stored; its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **fields}

    def image(
        self,
        tag: str,
        layers: Sequence[bytes],
        config: Mapping[str, Any] | None = None,
        *,
        how: str = "gzip",
        architecture: str = "amd64",
        diff_ids: Sequence[str] = (),
    ) -> dict[str, Any]:
        """An image of these tars, under *tag*. *diff_ids*: what its configuration says that they are, where that is a lie."""
        ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in layers]
        blobs = [self.blob(packed(tar, how), LAYER + (f"+{how}" if how else "")) for tar in layers]
        settings = self.json(
            {
                "architecture": architecture, "os": "linux", "config": dict(config or {}),
                "rootfs": {"type": "layers", "diff_ids": list(diff_ids) or ids},
                "history": [{"created_by": "the lab"} for _ in layers],
            },
            CONFIG,
        )  # fmt: skip
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": settings, "layers": blobs}
        platform = {"architecture": architecture, "os": "linux"}
        return self.tag(tag, {**self.json(manifest, MANIFEST), "platform": platform})

    def index(self, tag: str, images: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """A list of images, one per architecture, under *tag*."""
        return self.tag(tag, self.json({"schemaVersion": 2, "mediaType": INDEX, "manifests": list(images)}, INDEX))

    def json(self, value: Mapping[str, Any], kind: str) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), kind)

    def tag(self, tag: str, descriptor: dict[str, Any]) -> dict[str, Any]:
        self.tags[tag] = descriptor
        manifests = [
            {**it, "annotations": {"org.opencontainers.image.ref.name": name}} for name, it in self.tags.items() if name
        ]
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        return descriptor

    def read(self, descriptor: Mapping[str, Any]) -> bytes:
        return self.where(descriptor).read_bytes()

    def where(self, descriptor: Mapping[str, Any]) -> Path:
        return self.path / "blobs/sha256" / str(descriptor["digest"]).removeprefix("sha256:")


# -- registries -----------------------------------------------------------------------------------------------------------


@dataclass
class Hub:
    """A registry that runs. *env*: with it, skopeo trusts its certificate; *login* in it, where it wants one."""

    address: str
    env: dict[str, str]
    login: Path | None
    inside: tuple[str, ...] = ()  # words before each command, as of a network of its own
    certificate: Path = Path()
    log: list[str] = field(default_factory=list)

    def reference(self, name: str) -> str:
        return f"docker://{self.address}/{name}"

    def push(self, layout: Layout, tag: str, name: str) -> str:
        """Put an image there, as it is. Returns the digest by which it is known there."""
        words = ["copy", "--all", "--preserve-digests", "--insecure-policy", "--quiet"]
        words += ["--authfile", str(self.login)] if self.login else []
        self.skopeo(*words, f"oci:{layout.path}:{tag}", self.reference(name))
        return str(layout.tags[tag]["digest"])

    def fetched(self, name: str) -> Counter[str]:
        """How often each blob of this name went out."""
        path = re.compile(rf"/v2/{re.escape(name)}/blobs/sha256:[0-9a-f]+")
        lines = [line for line in self.log if '"GET"' in line and "response completed" in line]
        return Counter(match[0] for match in map(path.search, lines) if match)

    def skopeo(self, *words: str) -> bytes:
        done = subprocess.run(
            [*self.inside, "skopeo", *words], env=self.env, capture_output=True, timeout=LONGEST, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


@contextmanager
def registry(scratch: Path, *, login: bool = False, inside: tuple[str, ...] = ()) -> Iterator[Hub]:
    """Debian's docker-registry with its data in *scratch*."""
    scratch.mkdir(parents=True, exist_ok=True)
    pem = certificate(scratch)
    (scratch / "htpasswd").write_text(HTPASSWD)
    places = {"data": scratch / "data", "pem": pem, "htpasswd": scratch / "htpasswd"}
    (scratch / "config.yml").write_text((CONFIG_YML + AUTH_YML * login).format(**places))
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", "--", *inside, "docker-registry", "serve", str(scratch / "config.yml")],
        env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        address = next((it for it in map(_listening, process.stderr) if it), "")
        assert address, f"docker-registry ended with {process.wait(LONGEST)}"
        authfile = write_login(scratch, address) if login else None
        hub = Hub(f"localhost:{address.rpartition(':')[2]}", {}, authfile, inside, Path(f"{pem}.crt"))
        hub.env = environment(scratch / "home", hub.address, pem)
        reader = threading.Thread(target=lambda: hub.log.extend(process.stderr or ()))
        reader.start()
        try:
            yield hub
        finally:
            process.kill()
            reader.join(LONGEST)
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def _listening(line: str) -> str:
    return line.partition("listening on ")[2].partition(",")[0].strip('"}\n ')


def certificate(scratch: Path) -> Path:
    """A key and a certificate for localhost, in one file."""
    pem = scratch / "registry.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(pem), "-out", f"{pem}.crt"],
        check=True, capture_output=True, timeout=LONGEST,
    )  # fmt: skip
    with open(pem, "ab") as out:
        out.write(Path(f"{pem}.crt").read_bytes())
    return pem


def environment(home: Path, address: str, pem: Path | None = None) -> dict[str, str]:
    """A home whose owner trusts this registry: by its certificate, or without any."""
    containers = home / ".config/containers"
    containers.mkdir(parents=True, exist_ok=True)
    if pem:
        (containers / "certs.d" / address).mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{pem}.crt", containers / "certs.d" / address / "ca.crt")
    else:
        (containers / "registries.conf").write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
    outside = {
        name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name != "XDG_RUNTIME_DIR"
    }
    return {**outside, "HOME": str(home)}


def write_login(scratch: Path, address: str, password: str = PASSWORD) -> Path:
    """The file that `skopeo login` would write."""
    import base64

    path = scratch / "auth.json"
    token = base64.b64encode(f"{USER}:{password}".encode()).decode()
    names = (address, f"localhost:{address.rpartition(':')[2]}")
    path.write_text(json.dumps({"auths": {name: {"auth": token} for name in names}}))
    path.chmod(0o600)
    return path


def mirrored(server: Server, layout: Layout, tag: str, name: str, **tricks: Any) -> str:
    """Put an image on a server of files, with each answer as the registry protocol has it, and return its address.
    *tricks*: of each layer, see `Served`."""
    server.put("/v2/", b"{}")
    manifest = layout.tags[tag]
    for version in (tag, manifest["digest"]):
        server.put(f"/v2/{name}/manifests/{version}", layout.read(manifest), content_type=manifest["mediaType"])
    value = json.loads(layout.read(manifest))
    server.put(f"/v2/{name}/blobs/{value['config']['digest']}", layout.read(value["config"]))
    for it in value["layers"]:
        server.put(f"/v2/{name}/blobs/{it['digest']}", **{"data": layout.read(it), **tricks})
    return f"docker://{server.address.partition('//')[2]}/{name}:{tag}"

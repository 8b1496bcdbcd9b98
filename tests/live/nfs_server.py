"""A private NFS server for tests: NFS 4 alone, on a loopback port of its own, without rpcbind; ended with its `with`.

Needs root (the server opens files by their handles) and the Debian packages nfs-ganesha and nfs-ganesha-vfs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60  # seconds for the server to come up or to go
SETTINGS = """
NFS_CORE_PARAM {{
    Protocols = 4; NFS_Port = {port}; MNT_Port = 0; NLM_Port = 0; Rquota_Port = 0;
    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; Bind_addr = 127.0.0.1; {without_rights}
}}
NFSV4 {{
    Graceless = true; Only_Numeric_Owners = true; RecoveryBackend = fs; RecoveryRoot = "{folder}/recovery";
    Minor_Versions = {versions};
}}
NFS_KRB5 {{ Active_krb5 = false; }}
LOG {{ Default_Log_Level = EVENT; }}
"""
EXPORT = """
EXPORT {{
    Export_Id = {number}; Path = "{path}"; Pseudo = "{name}"; Access_Type = RW; Squash = {squash};
    SecType = sys; Protocols = 4; Transports = TCP; PrivilegedPort = false; Disable_ACL = true; FSAL {{ Name = VFS; }}
}}
"""


def without_rights() -> str:
    """A later ganesha (6.5) wants CAP_SYS_RESOURCE, or this word, which the earlier ones (4.3) do not know."""
    libraries = Path("/usr/lib/ganesha").glob("libganesha_nfsd.so*")
    knows = any(b"allow_set_io_flusher_fail" in library.read_bytes().lower() for library in libraries)
    return "Allow_Set_IO_Flusher_Fail = true;" if knows else ""


class NfsServer:
    """`data` is exported as /data with root as root, `squashed` as /squashed with root as nobody."""

    def __init__(self, folder: Path, versions: str = "0, 1, 2", size: str = "", data: Path | None = None) -> None:
        self.folder, self.port = folder, free_port()
        self.data, self.squashed = data or folder / "data", folder / "squashed"
        for one in (folder / "recovery", self.data, self.squashed):
            if one is not data:
                one.mkdir(parents=True)
                one.chmod(0o755)
        exports = [("/data", self.data, "No_Root_Squash"), ("/squashed", self.squashed, "Root_Squash")]
        rights = without_rights()
        text = SETTINGS.format(port=self.port, folder=folder, versions=versions, without_rights=rights)
        for number, (name, path, squash) in enumerate(exports, 1):
            text += EXPORT.format(number=number, path=path, name=name, squash=squash)
        (folder / "ganesha.conf").write_text(text)
        self.size = size  # of /data, a disk of its own that the server alone sees; "": it is a folder of the host
        self.process: subprocess.Popen[bytes] | None = None

    def share(self, target: str = "/data", mode: str = "rw", name: str = "/data") -> str:
        return f"nfs://127.0.0.1:{self.port}{name}:{target}:{mode}"

    def start(self) -> None:
        log = self.folder / "ganesha.log"
        words = ("ganesha.nfsd", "-F", "-f", self.folder / "ganesha.conf", "-L", log, "-p", self.folder / "pid")
        if self.size:
            # No tmpfs: a later ganesha (6.5) exports none.
            disk = self.folder / "disk"
            make = ("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", disk, self.size)
            subprocess.run(make, check=True, timeout=PATIENCE)
            words = (
                "unshare",
                "-m",
                "sh",
                "-c",
                'mount -o loop "$0" "$1" && shift && exec "$@"',
                disk,
                self.data,
                *words,
            )
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while not (log.exists() and "NFS SERVER INITIALIZED" in log.read_text() and self.answers()):
            assert self.process.poll() is None, log.read_text() if log.exists() else "the server ended"
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "the server is silent"
            time.sleep(0.05)
        lacking = [
            line
            for line in log.read_text().splitlines()
            if re.search("Lookup failed on path|Could not create export", line)
        ]
        assert not lacking, lacking  # such a server runs and shows nothing: an overlay, say, has no file handles

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def pause(self) -> None:
        """From now on it is silent, and its connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Gone, with all its connections. Stopping twice is fine."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def nfs_server(folder: Path, **options: object) -> Iterator[NfsServer]:
    assert os.geteuid() == 0, "needs root"
    server = NfsServer(folder, **options)  # type: ignore[arg-type]
    try:
        server.start()
        yield server
    finally:
        server.stop()

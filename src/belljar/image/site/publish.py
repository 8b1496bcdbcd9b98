"""Change a repository: a folder on a file system that the site's hosts share, or that a web server serves.

New files first, then the metadata of roles, then snapshot and timestamp: a reader sees the old state or the new one. One publisher
works at a time (flock on `.publish.lock`). What lies in the folder is verified from the pinned root down before it is signed anew:
somebody who can write there, and has no key, gets nothing signed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api import metadata as tuf
from tuf.api.exceptions import DownloadError, RepositoryError

from belljar import errors
from belljar.host import commands
from belljar.host.files import no_space_as_error, private_folder, read_secret, sha256_of, sync, write_whole
from belljar.host.locks import locked
from belljar.image import Image
from belljar.image.progress import Progress
from belljar.image.site import PIN, Source, source_of, target_path
from belljar.image.site.client import Fetcher, pinned_root
from belljar.image.store.manifest import DISK, PARTS, image_digest
from belljar.image.store.store import NAME, Store, check_name

PACKING_TIMEOUT, LOCK_TIMEOUT = 4 * 3600, 3600.0
LOCK = ".publish.lock"
LEVEL = "-6"  # of a Debian image: a few per cent larger than with -9, in a bit more than half the time
FILE, FOLDER = 0o644, 0o755  # readable by all: a web server runs as another user
DAY = 86400.0
UNUSED_AGE = 7 * DAY  # so long a file stays for downloads that began with an older state
LIFETIMES = {"root": 5 * 365 * DAY, "snapshot": 14 * DAY, "timestamp": 14 * DAY}
LIFETIME, SOON = 365 * DAY, 60 * DAY  # of the roles that publish images
KEYS = {"root": ("root",), "targets": ("targets",), "online": ("snapshot", "timestamp")}  # a key's file -> its roles


def load_keys(paths: Sequence[Path]) -> list[CryptoSigner]:
    """The keys in these files (PEM, for their owner alone), and in the *.pem of folders. Raises InputMissing, BadSetting."""
    signers = []
    for path in (file for given in paths for file in (sorted(given.glob("*.pem")) if given.is_dir() else [given])):
        try:
            signers.append(CryptoSigner(load_pem_private_key(read_secret(path), None)))
        except (ValueError, TypeError) as exc:
            hint = "`belljar image key FILE` makes one."
            raise errors.InputMissing(f"{path}: not a private key: {exc}", hint=hint) from exc
    return signers


def make_key(path: Path) -> CryptoSigner:
    """The Ed25519 key in a file, made now where there is none. Raises BadOption."""
    if not path.exists():
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(CryptoSigner.generate_ed25519().private_bytes)
        except OSError as exc:
            raise errors.BadOption(f"{path}: {exc.strerror}", hint="Name a new file.") from exc
    return load_keys([path])[0]


def public_word(signer: CryptoSigner) -> str:
    return f"{signer.public_key.keytype}:{signer.public_key.keyval['public']}"


def init(folder: Path, keys: Path, now: float | None = None) -> str:
    """Make a repository, and in *keys* a key for its root, one for the site's images, one for its timestamps. Returns the line for
    `image.sources`. After a crash it goes on."""
    with _our_words(folder):
        for path in (folder, folder / "metadata", folder / "targets"):
            _make(path)
        (folder / LOCK).touch(0o660)  # for all of a group's publishers
    if (folder / "metadata/timestamp.json").exists():
        raise errors.BadOption(f"{folder}: a repository is there already", hint="Leave --init out.")
    private_folder(keys)
    signers = {key: make_key(keys / f"{key}.pem") for key in KEYS}
    if not (path := folder / "metadata/1.root.json").exists():
        metadata = tuf.Metadata(tuf.Root(expires=_date((now or time.time()) + LIFETIMES["root"])))
        for key, role in ((key, role) for key, roles in KEYS.items() for role in roles):
            metadata.signed.add_key(signers[key].public_key, role)
        metadata.sign(signers["root"])
        write_whole(path, metadata.to_bytes(), mode=FILE, durable=True)
    line = f"{folder.absolute()}{PIN}{sha256(path.read_bytes()).hexdigest()}"
    with opened(line, list(signers.values()), now):
        return line


@contextmanager
def opened(line: str, signers: list[CryptoSigner], now: float | None = None) -> Iterator[Repository]:
    """The repository in a line of `image.sources`, to change it. At the end all that these keys can sign is renewed. Raises
    NotPermitted where keys are missing, RepositoryRefused where somebody without keys has changed it."""
    source = source_of(line)
    folder = source.folder
    if folder is None or not (folder / "metadata").exists():
        hint = "Give the folder that the web server serves; `belljar image publish --init` makes one."
        raise errors.BadOption(f"{source.shown}: not a folder with a repository", hint=hint)
    with _our_words(folder), locked(folder / LOCK, timeout=LOCK_TIMEOUT, what=f"publish in {folder}"):
        repository = Repository(folder, source, signers, time.time() if now is None else now)
        yield repository
        repository.save()


@contextmanager
def _our_words(folder: Path) -> Iterator[None]:
    try:
        with no_space_as_error(folder):
            yield
    except OSError as exc:
        hint = "Name a folder you may write to, with --to."
        raise errors.BadOption(f"{folder}: {exc.strerror}", hint=hint) from exc
    except (RepositoryError, DownloadError) as exc:
        raise errors.RepositoryRefused(f"{folder}: {exc}") from exc


class Repository:
    """The latest metadata of each role, verified from the root down; what is changed, and signed anew."""

    def __init__(self, folder: Path, source: Source, signers: list[CryptoSigner], now: float) -> None:
        self.folder, self.signers, self.now = folder, signers, now
        self.notes: list[str] = []  # what the publisher should know
        self.root = tuf.Metadata[tuf.Root].from_bytes(pinned_root(source, Fetcher(0)))
        while (path := folder / f"metadata/{self.root.signed.version + 1}.root.json").exists():
            newer = tuf.Metadata[tuf.Root].from_bytes(path.read_bytes())
            for root in (self.root.signed, newer.signed):
                root.verify_delegate("root", newer.signed_bytes, newer.signatures)
            if newer.signed.version != self.root.signed.version + 1:
                raise RepositoryError(f"{path.name} is version {newer.signed.version}")
            self.root = newer
        self.roles: dict[str, tuf.Metadata[tuf.Targets]] = {}
        self.roles["targets"] = self._latest("targets", self.root.signed, tuf.Targets())
        for role in self._delegated:
            with suppress(RepositoryError):  # signed by keys it had before: the snapshot keeps the version that it has
                self.roles[role] = self._latest(role, self.roles["targets"].signed, tuf.Targets())
        self.snapshot = self._latest("snapshot", self.root.signed, tuf.Snapshot())

    def put(self, store: Store, name: str, image: Image, progress: Progress) -> None:
        """Publish an image under this name, by the first role that may and whose keys are given. Raises ImageCorrupt for one that is
        not what was stored."""
        check_name(name)
        path, delegated = target_path(name, DISK), self._delegated
        may = [role for role in self.roles if role not in delegated or delegated[role].is_delegated_path(path)]
        if not (role := next(filter(self._can, may), "")):
            hint = "Give a key with --key; its site can let it publish names: `publish --delegate`."
            raise errors.NotPermitted(f"{self.folder}: no key that was given may publish {name!r}", hint=hint)
        paths = {part: image.disk.parent / part for part in PARTS if (image.disk.parent / part).exists()}
        with store.hold(image, "publish"):
            if wrong := store.verify(image):
                raise errors.ImageCorrupt(f"image {image.called}: {'; '.join(wrong)}")
            digests = {part: sha256_of(path) for part, path in paths.items()}
            targets = {part: self._packed(name, part, path, progress) for part, path in paths.items()}
        ours = ("published", "signer", "made_from")
        targets[DISK].unrecognized_fields["custom"] = {
            "digest": image_digest(digests, image.append, image.facts), "os": image.os, "append": image.append,
            "made_from": str(image.facts.get("made_from", image.source)),
            "facts": {key: fact for key, fact in image.facts.items() if key not in ours},
            "virtual_size": image.virtual_size, "sizes": {part: path.stat().st_size for part, path in paths.items()},
        }  # fmt: skip
        self._drop(role, name)
        self.roles[role].signed.targets |= {target_path(name, part): target for part, target in targets.items()}

    def remove(self, name: str) -> None:
        """Revoke an image: nodes take it away when they sync."""
        if not any([self._drop(role, name) for role in self.roles if self._can(role)]):
            text = f"{self.folder}: no role whose key was given publishes {name}"
            raise errors.ImageUnknown(text, hint="`belljar image sync --dry-run` shows what is offered.")

    def delegate(self, role: str, names: str, keys: Sequence[str], threshold: int) -> None:
        """Let a role publish these names (patterns as the shell's, | between them) with so many of these public keys. One that is
        there gets them in place of its own; without names it goes, with all its images."""
        self._need("targets")
        if not names and role in self._delegated:
            del self._delegated[role]
            return
        if not NAME.fullmatch(role) or role in (*KEYS, *LIFETIMES) or not re.fullmatch(r"[A-Za-z0-9*?._|-]+", names):
            raise errors.BadOption(f"--delegate {role} {names}: not of the form ROLE NAMES KEY, NAMES as in 'a-*|b'")
        if len(keys) < threshold or not all(re.fullmatch(r"ed25519:[0-9a-f]{64}", word) for word in keys):
            hint = "`belljar image key FILE` prints one: ed25519:..."
            raise errors.BadOption(f"--delegate {role}: not enough public keys", hint=hint)
        targets = self.roles["targets"].signed
        targets.delegations = targets.delegations or tuf.Delegations({}, {})
        paths = [f"{pattern}/*" for pattern in names.split("|")]
        self._delegated[role] = tuf.DelegatedRole(role, [], threshold, True, paths)
        for word in keys:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(word.partition(":")[2]))
            targets.add_key(SSlibKey.from_crypto(key), role)

    def rotate(self, key: str, folder: Path) -> None:
        """Replace a key of KEYS by a new one, made in this folder; and renew the root, which no `save` does by itself."""
        self._need("root")
        former = deepcopy(self.root.signed)
        signer = make_key(folder / f"{key}-{self.root.signed.version + 1}.pem")
        self.signers.append(signer)
        for role in KEYS[key]:
            for keyid in list(self.root.signed.roles[role].keyids):
                self.root.signed.revoke_key(keyid, role)
            self.root.signed.add_key(signer.public_key, role)
        self._write("root", self.root, former, self.root.signed)

    def save(self) -> None:
        """Renew all that the keys can sign."""
        for role, metadata in self.roles.items():
            if self._can(role):
                self._write(role, metadata, self._delegator(role))
            if metadata.signatures:
                version = self.snapshot.signed.meta.setdefault(f"{role}.json", tuf.MetaFile())
                version.version = max(version.version, metadata.signed.version)
                if (left := metadata.signed.expires.timestamp() - self.now) < SOON:
                    self.notes.append(f"the role {role} expires in {left / DAY:.0f} days: --refresh it with its key")
        if self.root.signed.expires.timestamp() - self.now < SOON:
            self.notes.append("the root expires in less than 60 days: --rotate root")
        if not (self._can("snapshot") and self._can("timestamp")):
            self.notes.append("nodes see this after the site's next `belljar image publish --refresh`")
            return
        self._write("snapshot", self.snapshot, self.root.signed)
        version = self.snapshot.signed.version
        timestamp = tuf.Timestamp(version - 1, snapshot_meta=tuf.MetaFile(version))  # the two have the same number
        self._write("timestamp", tuf.Metadata(timestamp), self.root.signed)
        if set(self._delegated) <= set(self.roles):
            self._prune()

    # ---- inside

    @property
    def _delegated(self) -> dict[str, tuf.DelegatedRole]:
        delegations = self.roles["targets"].signed.delegations
        return {} if delegations is None or delegations.roles is None else delegations.roles

    def _delegator(self, role: str) -> tuf.Root | tuf.Targets:
        return self.roles["targets"].signed if role in self._delegated else self.root.signed

    def _can(self, role: str) -> bool:
        """Are enough keys of the role given?"""
        if role in self.roles and role not in ("targets", *self._delegated):
            return False  # it is not delegated any more
        rule = self._delegator(role).get_delegated_role(role)
        return len({signer.public_key.keyid for signer in self.signers} & set(rule.keyids)) >= rule.threshold

    def _need(self, role: str) -> None:
        if not self._can(role):
            what = f"{self.folder}: this takes the role {role}, and too few of its keys were given"
            raise errors.NotPermitted(what, hint="Name the files of its keys with --key.")

    def _latest(self, role: str, delegator: tuf.Root | tuf.Targets, empty: Any) -> tuf.Metadata[Any]:
        """The newest metadata of a role that is signed by its keys. Raises RepositoryError where there is only other metadata."""
        names = "\n".join(os.listdir(self.folder / "metadata"))
        versions = [int(number) for number in re.findall(rf"(?m)^(\d+)\.{re.escape(role)}\.json$", names)]
        for version in sorted(versions, reverse=True):
            with suppress(RepositoryError):
                metadata = tuf.Metadata[Any].from_bytes((self.folder / f"metadata/{version}.{role}.json").read_bytes())
                delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
                if metadata.signed.version == version and isinstance(metadata.signed, type(empty)):
                    return metadata
        if versions:
            raise RepositoryError(f"no metadata of the role {role} is signed by its keys")
        return tuf.Metadata(empty)

    def _write(self, role: str, metadata: tuf.Metadata[Any], *delegators: tuf.Root | tuf.Targets) -> None:
        """Sign it as its next version. That is at least the time, so that a repository from a backup goes on where it was."""
        signed = metadata.signed
        signed.version = signed.version + 1 if role == "root" else max(signed.version + 1, int(self.now))
        signed.expires = _date(self.now + LIFETIMES.get(role, LIFETIME))
        keyids = {keyid for delegator in delegators for keyid in delegator.get_delegated_role(role).keyids}
        metadata.signatures.clear()
        for signer in (signer for signer in self.signers if signer.public_key.keyid in keyids):
            metadata.sign(signer, append=True)
        for delegator in delegators:
            delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
        name = "timestamp.json" if role == "timestamp" else f"{signed.version}.{role}.json"
        write_whole(self.folder / "metadata" / name, metadata.to_bytes(), mode=FILE, durable=True)

    def _prune(self) -> None:
        """Remove old files that no role names."""
        metadata, targets = self.folder / "metadata", self.folder / "targets"
        used = {metadata / "timestamp.json", metadata / f"{self.snapshot.signed.version}.snapshot.json"}
        for role, latest in self.roles.items():
            used.add(metadata / f"{latest.signed.version}.{role}.json")
            used |= {targets / target.get_prefixed_paths()[0] for target in latest.signed.targets.values()}
        for path in {*metadata.glob("*.json"), *targets.glob("*/*")} - used:
            with suppress(OSError):
                if self.now - path.stat().st_mtime > UNUSED_AGE and not path.name.endswith(".root.json"):
                    path.unlink()

    def _drop(self, role: str, name: str) -> bool:
        targets = self.roles[role].signed.targets
        paths = [path for path in targets if path.startswith(f"{name}/")]
        for path in paths:
            del targets[path]
        return bool(paths)

    def _packed(self, name: str, part: str, path: Path, progress: Progress) -> tuf.TargetFile:
        progress.step(f"Packing {part}")
        folder = self.folder / "targets" / name
        _make(folder)
        draft = folder / f".{os.urandom(8).hex()}"
        try:
            argv = ["zstd", "-q", "-T0", LEVEL, "-o", str(draft), "--", str(path)]
            commands.run(argv, timeout=PACKING_TIMEOUT, bound=True)
            target = tuf.TargetFile.from_file(target_path(name, part), str(draft), ["sha256"])
            draft.chmod(FILE)
            os.utime(draft)  # zstd gives it the time of *path*
            sync(draft)
            draft.rename(self.folder / "targets" / target.get_prefixed_paths()[0])
            sync(folder)
        finally:
            draft.unlink(missing_ok=True)
        return target


def _make(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(FOLDER)  # whatever the umask


def _date(seconds: float) -> datetime:
    return datetime.fromtimestamp(int(seconds), UTC)

"""What a machine is told, made for each anew: its user data of a template, files, a proxy and a token; and credentials again while it
lives. It finds those at http://169.254.169.254/credentials/NAME. The patterns of templates are those of user data everywhere in belljar
(`context.filled_in`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from belljar import __version__
from belljar.context import About, filled_in
from belljar.errors import BadUserData, BelljarError, HostError, NoCredentials
from belljar.host.files import read_capped
from belljar.host.files import renew as renew_files
from belljar.host.values import is_url
from belljar.hypervisor import guest_uuid
from belljar.machine import BASE_URL, CREDENTIALS
from belljar.model import NetworkMode
from belljar.records import dataclass, field
from belljar.service.credentials.proxies import limited_proxy, load_source, load_token
from belljar.vacuum import MachineType, Space
from belljar.vacuum.settings.copies import Fetch, fetch, fetch_public
from belljar.vacuum.settings.pipes import strange_addresses

LARGEST = 1 << 20  # of a template, and of a file
PROXY, TOKEN = "x509_proxy", "token"  # `##user_data_option_x509_proxy##`


@dataclass(frozen=True)
class Material:
    """What was read and made for one machine."""

    template: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)  # by the names in `option_files`
    credentials: Mapping[str, bytes] = field(default_factory=dict)  # PROXY, TOKEN


def make_user_data(space: Space, one: MachineType, id: str, now: float, until: float, fetch: Fetch = fetch) -> bytes:
    """The user data of the machine that gets this id, and lives until then at most. Blocks. Raises BadUserData, NoCredentials."""
    if one.user_data in strange_addresses(one, space):
        fetch = fetch_public
    is_served = one.network == NetworkMode.USER.value
    return user_data(
        space, one, gather(one, now, until, fetch), uuid=guest_uuid(id), hostname=f"belljar-{id}",
        manager=f"belljar {__version__}", base_url=BASE_URL if is_served else "",
    )  # fmt: skip


def user_data(
    space: Space, one: MachineType, material: Material, *, uuid: str, hostname: str, manager: str, base_url: str
) -> bytes:
    """The user data of one machine. *base_url*: where it finds its features and leaves its outputs; "": nowhere. *manager*: name and
    version of belljar. Raises BadUserData."""
    about = About(
        uuid=uuid, hostname=hostname, machinetype=one.name, manager=manager, manager_hostname=space.factory,
        space=space.name, site=space.site, url=one.user_data if "://" in one.user_data else "",
        image_url=one.image if "://" in one.image else "",
        machinefeatures=base_url and f"{base_url}/machinefeatures", jobfeatures=base_url and f"{base_url}/jobfeatures",
        joboutputs=base_url and f"{base_url}/joboutputs",
    )  # fmt: skip
    options = {name: text.encode() for name, text in one.options}
    return filled_in(material.template, about, {**options, **material.credentials}, material.files)


def renew(one: MachineType, folder: Path, now: float, until: float) -> bool:
    """Give a living machine, by its folder, new credentials where the site's files have changed since it got its own, or it has none
    there. Says whether it did. Blocks for as long as a key takes. Raises NoCredentials; nothing where the machine has gone."""
    token_file = [one.token_file] if one.token_file else []
    names = [*([PROXY] if one.proxy else []), *([TOKEN] if token_file else [])]
    try:
        return bool(names) and renew_files(
            folder / CREDENTIALS, names, (*one.proxy, *token_file), lambda: credentials(one, now, until)
        )
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and not folder.exists():
            return False
        raise NoCredentials(f"{exc.filename}: {exc.strerror}") from exc


def gather(one: MachineType, now: float, until: float, fetch: Fetch) -> Material:
    """All of it, for a machine that lives until then at most. Blocks. Raises BadUserData, NoCredentials."""
    files = {name: _read(path, f"option_files.{name}", one) for name, path in one.option_files}
    return Material(_template(one, fetch), files, credentials(one, now, until))


def credentials(one: MachineType, now: float, until: float) -> Mapping[str, bytes]:
    """A new proxy and the present token, of a type that has them: for a new machine, and again while it lives. Raises NoCredentials."""
    found = {}
    if one.proxy:
        found[PROXY] = limited_proxy(load_source(one.proxy), now=now, until=until, key=one.proxy_key)
    if one.token_file is not None:
        found[TOKEN] = load_token(one.token_file)
    return found


def _template(one: MachineType, fetch: Fetch) -> bytes:
    if not one.user_data:
        return b""
    if not is_url(one.user_data):
        return _read(Path(one.user_data), "user_data", one)
    try:
        return fetch(one.user_data, LARGEST)
    except BelljarError as exc:
        raise BadUserData(f"machinetype {one.name}: user_data: {exc.message}", hint=exc.hint) from exc


def _read(path: Path, key: str, one: MachineType) -> bytes:
    try:
        return read_capped(path, LARGEST)
    except (OSError, HostError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc.message
        what = f"machinetype {one.name}: {key}: {path}: {why}"
        raise BadUserData(what, hint="`belljar vacuum check-config` names every file that cannot be read.") from exc

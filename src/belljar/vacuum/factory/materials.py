"""What a machine is told, made for each anew: its user data of a template, files, a proxy and a token; and credentials again while it
lives. It finds those at http://169.254.169.254/credentials/NAME. The patterns of templates are those of user data everywhere in belljar
(`context.filled_in`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from belljar import __version__
from belljar.context import About, filled_in
from belljar.errors import BadOption, BelljarError, HostError, NoCredentials
from belljar.host.files import PRIVATE_FOLDER, read_capped, write_whole
from belljar.host.values import is_url
from belljar.hypervisor import guest_uuid
from belljar.machine import BASE_URL, CREDENTIALS
from belljar.model import NetworkMode
from belljar.service.credentials.proxies import limited_proxy, load_source, load_token
from belljar.vacuum import MachineType, Space
from belljar.vacuum.settings.copies import Fetch, fetch, fetch_public
from belljar.vacuum.settings.pipes import strange_addresses

LARGEST = 1 << 20  # of a template, and of a file
PROXY, TOKEN = "x509_proxy", "token"  # `##user_data_option_x509_proxy##`


def make_user_data(space: Space, kind: MachineType, id: str, now: float, until: float, fetch: Fetch = fetch) -> bytes:
    """The user data of the machine that gets this id, and lives until then at most. Blocks. Raises BadOption, NoCredentials."""
    if kind.user_data in strange_addresses(kind, space):
        fetch = fetch_public
    files = {name: _read(path, f"option_files.{name}", kind) for name, path in kind.option_files}
    return user_data(
        space, kind, _template(kind, fetch), credentials(kind, now, until), files, uuid=guest_uuid(id), hostname=f"belljar-{id}",
        manager=f"belljar {__version__}", base_url=BASE_URL if kind.network == NetworkMode.USER.value else "",
    )  # fmt: skip


def user_data(
    space: Space, kind: MachineType, template: bytes, credentials: Mapping[str, bytes], files: Mapping[str, bytes], *,
    uuid: str, hostname: str, manager: str, base_url: str,
) -> bytes:  # fmt: skip
    """The template, filled in for one machine. *files*: by the names in `option_files`. *base_url*: where it finds its features and leaves
    its outputs; "": nowhere. *manager*: name and version of belljar. Raises BadOption."""
    about = About(
        uuid=uuid, hostname=hostname, machinetype=kind.name, manager=manager, manager_hostname=space.factory,
        space=space.name, site=space.site, url=kind.user_data if "://" in kind.user_data else "",
        image_url=kind.image if "://" in kind.image else "",
        machinefeatures=base_url and f"{base_url}/machinefeatures", jobfeatures=base_url and f"{base_url}/jobfeatures",
        joboutputs=base_url and f"{base_url}/joboutputs",
    )  # fmt: skip
    options = {name: text.encode() for name, text in kind.options}
    return filled_in(template, about, {**options, **credentials}, files)


def renew(kind: MachineType, folder: Path, now: float, until: float) -> bool:
    """Give a living machine, by its folder, new credentials where the site's files have changed since it got its own, or it has none
    there. Says whether it did. Blocks for as long as a key takes. Raises NoCredentials; nothing where the machine has gone."""
    names = [*([PROXY] if kind.proxy else []), *([TOKEN] if kind.token_file else [])]
    sources, place = [*kind.proxy, *([kind.token_file] if kind.token_file else [])], folder / CREDENTIALS
    try:
        newest = max((path.stat().st_mtime for path in sources), default=0.0)
        with suppress(FileNotFoundError):
            if not names or min((place / name).stat().st_mtime for name in names) > newest:
                return False
        made = credentials(kind, now, until)
        with suppress(FileExistsError):
            place.mkdir(mode=PRIVATE_FOLDER)
        for name, data in made.items():
            write_whole(place / name, data)
        return True
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and not folder.exists():
            return False
        raise NoCredentials(f"{exc.filename}: {exc.strerror}") from exc


def credentials(kind: MachineType, now: float, until: float) -> Mapping[str, bytes]:
    """A new proxy and the present token, of a type that has them: for a new machine, and again while it lives. Raises NoCredentials."""
    files = {}
    if kind.proxy:
        files[PROXY] = limited_proxy(load_source(kind.proxy), now=now, until=until, key=kind.proxy_key)
    if kind.token_file is not None:
        files[TOKEN] = load_token(kind.token_file)
    return files


def _template(kind: MachineType, fetch: Fetch) -> bytes:
    if not kind.user_data:
        return b""
    if not is_url(kind.user_data):
        return _read(Path(kind.user_data), "user_data", kind)
    try:
        return fetch(kind.user_data, LARGEST)
    except BelljarError as exc:
        raise BadOption(f"machinetype {kind.name}: user_data: {exc.message}", hint=exc.hint) from exc


def _read(path: Path, key: str, kind: MachineType) -> bytes:
    try:
        return read_capped(path, LARGEST)
    except (OSError, HostError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc.message
        what = f"machinetype {kind.name}: {key}: {path}: {why}"
        raise BadOption(what, hint="`belljar vacuum check-config` names every file that cannot be read.") from exc

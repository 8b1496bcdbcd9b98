"""lease.toml becomes `Settings`, and its tables [policy.NAME] `Policy`s: every mistake at once, as `file, key: what, hint`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from belljar.errors import BadOption, BadSetting
from belljar.host.toml import Mistake
from belljar.lease import SIZE, Settings
from belljar.lease.decisions.policy import Policy
from belljar.lease.network import PORTS, WORDS, net_of
from belljar.pool import pilots_of
from belljar.service.tables import Wrong, blame, keys_of, read_values

FILE = Path("/etc/belljar/lease.toml")
TABLE, POLICY = "lease", "policy"


def load(path: Path = FILE) -> tuple[Settings, tuple[Policy, ...]]:
    """Raises BadSetting with every mistake there is."""
    mistakes: list[Mistake] = []
    known = {TABLE: keys_of((Settings,), TABLE), POLICY: keys_of((Policy,), POLICY)}
    tables, values = read_values([path], known, {POLICY}, mistakes)
    settings = Settings(**values.pop(TABLE))
    policies = tuple(Policy(full.partition(".")[2], **options) for full, options in values.items())
    if not mistakes:
        blame(path, tables, ((TABLE, wrong) for wrong in _wrongs(settings, policies)), mistakes)
    if mistakes:
        raise BadSetting.of(tuple(mistakes), hint="Correct the file, then start the service again.")
    return settings, policies


def _wrongs(settings: Settings, policies: Sequence[Policy]) -> Iterator[Wrong]:
    try:
        pilots_of(settings.system)
    except BadOption as exc:
        yield "system", exc.message, exc.hint
    if not settings.types or not all(text for _, text in settings.types):
        yield "types", "a type has no size", SIZE.as_in
    if not settings.address or not settings.address.isascii():
        yield "address", "is missing, or not in ASCII", "name or address of this host, as nodes reach it"
    if not settings.images:
        yield "images", "is missing", 'as in images = ["debian12"]: only images of the site may be leased'
    for name, words in settings.networks:
        if not WORDS.fullmatch(words):
            yield "networks", f"{name} = {words!r} is not a network", "none, user, bridge, bridge:NAME or private"
    try:
        net_of(settings)
    except ValueError as exc:
        yield "private_net", str(exc), "as in 10.98.0.0/24"
    first, _, last = settings.private_ports.partition("-")
    if not PORTS.fullmatch(settings.private_ports) or not int(first) <= int(last or first) <= 65535:
        yield "private_ports", f"{settings.private_ports!r} are not ports", 'as in "8480-8499"'
    for name in ("silence", "lost"):
        if (seconds := getattr(settings, name)) <= (beat := settings.heartbeat):
            yield name, f"is {seconds:g} s, and a pilot is heard of every {beat:g} s", "a multiple of `heartbeat`"
    if not policies:
        yield "images", "there is no policy: nobody may lease anything", 'as in [policy.all] users = ["*"]'

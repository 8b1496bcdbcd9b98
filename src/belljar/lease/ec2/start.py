"""The front end as a part of the lease service."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from belljar.errors import BadSetting
from belljar.lease import Order, Settings, Size
from belljar.lease.belongings import Belongings
from belljar.lease.desk import Desk
from belljar.lease.ec2.front import Front
from belljar.lease.ec2.office import Office, Service
from belljar.lease.ec2.server import listening, place
from belljar.lease.policy import Policy


async def front_end(
    settings: Settings, desk: Desk, belongings: Belongings, types: Mapping[str, Size], policies: Callable[[], Sequence[Policy]], *,
    site_key: bytes, own_certificate: Path, wake: Callable[[], None], order: Callable[[str, Order], object],
    images: Callable[[], Iterable[str]], tell: Callable[..., None],
) -> None:  # fmt: skip
    """At `lease.ec2_listen`, until cancelled. *wake* and *order* are called in this loop; *images*: names known on this host.
    Raises BadSetting, HostError, CommandMissing."""
    soon = asyncio.get_running_loop().call_soon_threadsafe
    service = Service(lambda: soon(wake), lambda slot, one: soon(order, slot, one), images)
    office = Office(desk, belongings, settings, types, policies, service)
    tls = _tls(settings, own_certificate)
    front = Front(office, site_key, tell=tell)
    async with listening(settings.ec2_listen, front.answer, tls):
        tell("EC2 API", address=f"{'http' if tls is None else 'https'}://{settings.ec2_listen}")
        await asyncio.get_running_loop().create_future()


def _tls(settings: Settings, own: Path) -> ssl.SSLContext | None:
    """By the site's certificate; else by the service's own; on loopback, without the site's, none."""
    if not settings.ec2_certificate and ip_address(place(settings.ec2_listen)[0]).is_loopback:
        return None
    path: Any = settings.ec2_certificate or own
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(path)
    except (OSError, ssl.SSLError) as exc:
        raise BadSetting(
            f"lease.ec2_certificate: {path}: {exc.strerror or exc}",
            hint="A PEM file with the chain of certificates and the key.",
        ) from exc
    return tls

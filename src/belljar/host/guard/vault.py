"""Secrets of one machine, which its guest never has: the proxy puts them in the place of their placeholders. And the authority
whose certificates the guest trusts, for there TLS ends at the proxy. All of it is in this process's memory alone.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Iterable
from contextlib import suppress

from belljar.errors import HostError
from belljar.host.guard.certificates import certificate
from belljar.host.guard.names import name
from belljar.model import Secret

DAYS = 390  # programs refuse certificates that count for longer
PROTOCOLS = ["http/1.1"]
Headers = list[tuple[bytes, bytes]]


class Vault:
    """Made once for a machine. Raises HostError where this host trusts no authority."""

    def __init__(self, secrets: Iterable[tuple[Secret, bytes]]) -> None:
        self._secrets = [(secret, value, tuple(filter(None, map(name, secret.hosts)))) for secret, value in secrets]
        self.outward = ssl.create_default_context()
        self.outward.set_alpn_protocols(PROTOCOLS)
        roots = self.outward.get_ca_certs(binary_form=True)
        if not roots:
            raise HostError("this host has no certificates of authorities", hint="Install ca-certificates.")
        names = sorted({host.host for _, _, hosts in self._secrets for host in hosts})
        root, _, authority = certificate("belljar machine", (), DAYS)  # its key is forgotten
        _, key, chain = certificate("belljar proxy", names, DAYS, by=root)
        self.bundle = "".join(map(ssl.DER_cert_to_PEM_cert, roots)).encode() + authority
        self.inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.inward.set_alpn_protocols(PROTOCOLS)
        with open(os.memfd_create("chain"), "wb", 0) as file:  # OpenSSL's functions that Python offers want a path
            file.write(key + chain)
            self.inward.load_cert_chain(f"/proc/self/fd/{file.fileno()}")

    def filled(self, headers: Headers, host: str, port: int) -> tuple[Headers, list[str]]:
        """The headers of a request with the secrets for this host, "" for one that goes in the clear; and the names of those that
        are not for it."""
        strays = []
        for secret, value, hosts in self._secrets:
            placeholder = secret.placeholder.encode()
            replaced = [(key, _replaced(text, placeholder, value)) for key, text in headers]
            if any(place.fits(host, port) for place in hosts):
                headers = replaced
            elif replaced != headers:
                strays.append(secret.name)
        return headers, strays


def _replaced(text: bytes, placeholder: bytes, value: bytes) -> bytes:
    """Also within the user and password of `Basic`."""
    scheme, blank, word = text.partition(b" ")
    with suppress(binascii.Error):
        if scheme.lower() == b"basic" and placeholder in (plain := base64.b64decode(word, validate=True)):
            return scheme + blank + base64.b64encode(plain.replace(placeholder, value))
    return text.replace(placeholder, value)

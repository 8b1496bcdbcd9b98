"""Chains of X.509 certificates: for whom does an authority in a folder vouch? Only signatures within images need this.

The library `cryptography` builds and checks a chain. This module says what is checked: authorities are authorities, keys are for
signing, and no list of revocations beside the certificates (`*.r0`, `*.crl`) names a certificate of the chain. Folders are laid
out as /etc/grid-security/certificates: PEM files `*.pem`, `*.crt`, `*.0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import SignatureRefused, UnsafeFolder
from belljar.host.files import read_capped

if TYPE_CHECKING:
    from cryptography import x509

LARGEST_CERTIFICATE, LARGEST_LIST = 1 << 20, 64 << 20
LONGEST_CHAIN = 8
CERTIFICATES, REVOCATIONS = (".pem", ".crt", ".0"), (".r0", ".crl")
# A value that looks like further parts of the name would make the one-line form ambiguous.
LOOKS_LIKE_A_PART = re.compile(r"/[A-Za-z]+=")


def check_chain(chain: Sequence[str], folder: Path, now: datetime) -> tuple[Any, str]:
    """The public key and the name of the signer of a chain of PEM certificates, the signer's first, for whom an authority in
    *folder* vouches. *now*: in UTC. Raises SignatureRefused."""
    from cryptography import x509
    from cryptography.x509.verification import VerificationError

    if not 1 <= len(chain) <= LONGEST_CHAIN:
        raise SignatureRefused(f"a chain of {len(chain)} certificates")
    try:
        signer, *between = [x509.load_pem_x509_certificate(pem.encode()) for pem in chain]
    except ValueError as exc:
        raise SignatureRefused(f"its certificate cannot be read: {exc}") from exc
    dn = one_line(signer.subject)
    authorities = list(_authorities(folder))
    if not authorities:
        raise SignatureRefused(f"{folder}: no certificate of an authority is there")
    try:
        verified = _verifier(authorities, now).verify(signer, between)
    except (VerificationError, ValueError) as exc:
        raise SignatureRefused(f"no authority in {folder} vouches for {dn}: {exc}") from exc
    _refuse_revoked(verified.chain, folder)
    return signer.public_key(), dn


def one_line(name: x509.Name) -> str:
    """A distinguished name as grids write it: /DC=ch/DC=cern/CN=signer."""
    parts = []
    for attribute in name:
        text = str(attribute.value)
        if LOOKS_LIKE_A_PART.search(text) or not text.isprintable():
            raise SignatureRefused(f"the name {text!r} in a certificate could be mistaken for another name")
        word = "emailAddress" if attribute.oid.dotted_string == "1.2.840.113549.1.9.1" else None
        parts.append(f"/{word or attribute.rfc4514_attribute_name}={text}")
    return "".join(parts)


def _verifier(authorities: list[x509.Certificate], now: datetime) -> Any:
    from cryptography import x509
    from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store

    either = Criticality.AGNOSTIC
    of_authorities = (
        ExtensionPolicy.permit_all()
        .require_present(x509.BasicConstraints, either, _is_authority)
        .may_be_present(x509.KeyUsage, either, _signs_certificates)
    )
    of_signers = ExtensionPolicy.permit_all().may_be_present(x509.KeyUsage, either, _signs)
    builder = PolicyBuilder().store(Store(authorities)).time(now).max_chain_depth(LONGEST_CHAIN)
    return builder.extension_policies(ca_policy=of_authorities, ee_policy=of_signers).build_client_verifier()


def _is_authority(policy: Any, certificate: Any, constraints: Any) -> None:
    if not constraints.ca:
        raise ValueError("its issuer is not an authority")


def _signs_certificates(policy: Any, certificate: Any, usage: Any) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("its issuer's key may not sign certificates")


def _signs(policy: Any, certificate: Any, usage: Any) -> None:
    if usage is not None and not (usage.digital_signature or usage.content_commitment):
        raise ValueError("its key is not for signatures")


def _authorities(folder: Path) -> Iterator[x509.Certificate]:
    from cryptography import x509

    for path in _files(folder, CERTIFICATES):
        with suppress(OSError, ValueError, UnsafeFolder):  # one broken file of a hundred does not matter
            yield from x509.load_pem_x509_certificates(read_capped(path, LARGEST_CERTIFICATE))


def _refuse_revoked(chain: list[x509.Certificate], folder: Path) -> None:
    """Every list counts that its authority has signed, old ones too: what was revoked stays revoked."""
    from cryptography import x509

    for path in _files(folder, REVOCATIONS):
        with suppress(OSError, ValueError, UnsafeFolder):
            revoked = x509.load_pem_x509_crl(read_capped(path, LARGEST_LIST))
            for certificate, issuer in pairwise(chain):
                if revoked.issuer != certificate.issuer or not revoked.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                    continue
                if revoked.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
                    raise SignatureRefused(
                        f"the certificate of {one_line(certificate.subject)} was revoked ({path.name})"
                    )


def _files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.suffix in endings)
    return []

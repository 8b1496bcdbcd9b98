"""The images of a site: published, signed, trusted, synced."""

from __future__ import annotations

from belljar.records import dataclass


@dataclass(frozen=True)
class Signature:
    """One signature as it came, with what it claims to be by."""

    key: str = ""  # base64 of an Ed25519 public key
    certificates: tuple[str, ...] = ()  # PEM, the signer's first
    value: str = ""  # base64

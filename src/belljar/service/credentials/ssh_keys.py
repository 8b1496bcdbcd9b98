"""Key pairs for ssh, and their fingerprints as EC2 states them.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/verify-keys.html: an RSA key that was made has the SHA-1 of its private key
(DER), one that was brought the MD5 of its public key (DER); any other the SHA-256 of the public key, as `ssh-keygen -l` prints it.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from belljar.records import dataclass

KINDS = ("rsa", "ed25519")
BITS, MOST_BITS = 2048, 16384


@dataclass(frozen=True)
class Made:
    """A new pair: the private key as PEM, the public one as OpenSSH's line."""

    private: str
    public: str
    fingerprint: str


def make(kind: str) -> Made:
    """*kind*: one of KINDS."""
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key: Any
    if kind == "rsa":
        key = rsa.generate_private_key(public_exponent=65537, key_size=BITS)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        der = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        return Made(private.decode(), _line(key.public_key()), _colons(hashlib.sha1(der).hexdigest()))
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = _line(key.public_key())
    return Made(private.decode(), public, _sha256(public))


def read_public(data: bytes) -> tuple[str, str]:
    """A public key as OpenSSH's line, without its comment, and its fingerprint. Only OpenSSH's own form is read. Raises ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(data.strip())
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise ValueError("it is not a line as in OpenSSH's id_ed25519.pub") from exc
    if isinstance(key, rsa.RSAPublicKey) and BITS <= key.key_size <= MOST_BITS:
        der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return _line(key), _colons(hashlib.md5(der).hexdigest())
    is_hardwares = data.strip().startswith(b"sk-")  # signs other bytes: without its kind it opens nothing
    if isinstance(key, ed25519.Ed25519PublicKey) and not is_hardwares:
        return _line(key), _sha256(_line(key))
    raise ValueError(f"RSA of {BITS} to {MOST_BITS} bits, and ED25519, are taken, and no security key's (sk-)")


def kind_of(public: str) -> str:
    """For a line as `make` and `read_public` write it."""
    return public.partition(" ")[0].removeprefix("ssh-")


def _line(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return str(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())


def _colons(text: str) -> str:
    return ":".join(text[at : at + 2] for at in range(0, len(text), 2))


def _sha256(line: str) -> str:
    """With its `=`, as EC2 has it and ssh-keygen has not."""
    return base64.b64encode(hashlib.sha256(base64.b64decode(line.split()[1])).digest()).decode()

"""Public keys that somebody else wrote: what is no key is refused, however long it is."""

from __future__ import annotations

import pytest

from belljar.service.credentials.ssh_keys import read_public

LONG = 1 << 22  # looked at more than once a byte, this would take hours


@pytest.mark.parametrize(
    "data",
    [
        b"", b" " * LONG + b"!", b"A" * LONG + b"!", b"-----BEGIN PUBLIC KEY-----" + b"\n" * LONG + b"!",
        b"---- BEGIN SSH2 PUBLIC KEY ----\n" + b":" * LONG, b"ssh-rsa " + b"A" * LONG,
    ],
    ids=["nothing", "spaces", "base64", "PEM", "RFC 4716", "ssh"],
)  # fmt: skip
def test_what_is_no_key_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a line"):
        read_public(data)


def test_a_security_keys_is_not_taken_for_another_kind() -> None:
    """What it signs is not what ssh-ed25519 does: a machine with such a line would let nobody in."""
    key = b"sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAIGXl1sP7L8fzAiNRlr8tHvyj3ZVGl5QWnFOIkVCpXPeuAAAABHNzaDo="
    for data in (key, b" " + key + b" me@desk\n"):
        with pytest.raises(ValueError, match="no security key's"):
            read_public(data)

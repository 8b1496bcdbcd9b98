"""Chains of certificates: for whom an authority vouches, and for whom it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.image.authority import DAY, NOW, Holder, authority, holder

from belljar.errors import ImageMismatch
from belljar.image.intake.signature import check_chain

DN = "/DC=org/DC=grid/CN=image signer"


def name_of(folder: Path, *holders: Holder) -> str:
    return check_chain([holder.pem for holder in holders], folder / "ca", NOW)[1]


def refused(folder: Path, *holders: Holder) -> str:
    with pytest.raises(ImageMismatch) as caught:
        name_of(folder, *holders)
    return caught.value.message


def test_a_certificate_of_an_authority_is_known_by_its_name(tmp_path: Path) -> None:
    assert name_of(tmp_path, authority(tmp_path / "ca").issue(DN, signs=True)) == DN


def test_an_authority_between_is_followed(tmp_path: Path) -> None:
    between = authority(tmp_path / "ca").issue("/DC=org/CN=Between", is_authority=True)
    assert name_of(tmp_path, between.issue(DN), between) == DN


def test_certificates_that_are_no_good_are_refused(tmp_path: Path) -> None:
    assert "no authority in" in refused(tmp_path, holder(DN))
    ca = authority(tmp_path / "ca")
    assert "vouches" in refused(tmp_path, holder(DN))  # its own authority
    assert "vouches" in refused(tmp_path, holder("/CN=Other", is_authority=True).issue(DN))
    assert "vouches" in refused(tmp_path, ca.issue(DN, until=NOW - DAY))
    for is_authority in (None, False):
        plain = ca.issue("/CN=user", is_authority=is_authority)
        assert "vouches" in refused(tmp_path, plain.issue(DN), plain)
    assert "vouches" in refused(tmp_path, ca.issue(DN, signs=False))  # a key for encryption
    assert "could be mistaken" in refused(tmp_path, holder_with_slashes(ca))
    with pytest.raises(ImageMismatch, match="cannot be read"):
        check_chain(["not a certificate"], tmp_path / "ca", NOW)


def holder_with_slashes(ca: Holder) -> Holder:
    from unittest.mock import patch

    from cryptography import x509
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "user/CN=image signer")])
    with patch("tests.unit.image.authority.named", lambda _: name):
        return ca.issue(DN)


def test_a_revoked_certificate_is_refused_and_a_strangers_list_is_not_believed(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    signer = ca.issue(DN)
    stranger = holder("/DC=org/DC=grid/CN=Authority", is_authority=True)
    (tmp_path / "ca/a.r0").write_bytes(stranger.revoke(signer))
    (tmp_path / "ca/b.r0").write_bytes(b"nonsense")
    assert name_of(tmp_path, signer) == DN
    (tmp_path / "ca/c.r0").write_bytes(ca.revoke(signer))
    assert "revoked" in refused(tmp_path, signer)

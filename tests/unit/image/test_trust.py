"""Who may publish which names: lines of the policy, signatures by keys and by certificates."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.unit.image.authority import DAY, NOW, Holder, authority, holder

from belljar.errors import BadSetting, InputMissing, NotPermitted, OutputUnwritable, SignatureRefused
from belljar.image.site import signing, trust
from belljar.image.site.signing import Signer

DATA = b"belljar image statement 1\n{}"
DN = "/DC=org/DC=grid/CN=image signer"


@pytest.fixture
def key(tmp_path: Path) -> Signer:
    signing.make_key(tmp_path / "key")
    return signing.load_signer(tmp_path / "key")


def word(key: Signer) -> str:
    return f"ed25519:{signing.public_word(key.key.public_key())}"


def judged(name: str, lines: list[str], *signatures: trust.Signature, data: bytes = DATA) -> str:
    return trust.judge(name, data, signatures, trust.read_rules(lines), NOW, shown="it")


def chained(who: Holder, *between: Holder) -> Signer:
    return Signer(who.key, tuple(one.pem for one in (who, *between)))


BAD_LINES = [
    "debian*", "", "debian* ed25519:", "debian* ed25519:AAAA", "debian* ed25519:!!!", "debian* rsa:AAAA", "debian* unsigned:x",
    "debian* x509:relative:.*", "debian* x509:/certificates", "debian* x509:/certificates:", "debian* x509:/certificates:(",
    "../x unsigned", "a||b unsigned", "a,b unsigned",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_means_nothing_is_refused(line: str) -> None:
    with pytest.raises(BadSetting, match=r"image\.trust"):
        trust.read_rules([line])


def test_a_key_signs_for_its_names_alone(key: Signer) -> None:
    lines = [f"debian*|site-[ab] {word(key)}"]
    signature = key.sign(b"", DATA)
    for name in ("debian12", "debian", "site-a"):
        assert judged(name, lines, signature) == word(key)
    for name in ("alma9", "site-c", "mydebian"):
        with pytest.raises(SignatureRefused, match="nobody may publish the name"):
            judged(name, lines, signature)


def test_what_was_not_signed_or_by_another_or_otherwise_is_refused(key: Signer, tmp_path: Path) -> None:
    lines = [f"* {word(key)}"]
    signing.make_key(tmp_path / "other")
    other = signing.load_signer(tmp_path / "other")
    with pytest.raises(SignatureRefused, match="has no signature"):
        judged("x", lines)
    with pytest.raises(SignatureRefused, match="not named there"):
        judged("x", lines, other.sign(b"", DATA))
    with pytest.raises(SignatureRefused, match="not what was signed"):
        judged("x", lines, key.sign(b"", DATA + b"x"))
    with pytest.raises(SignatureRefused, match="not what was signed"):  # another's signature under the key's name
        judged("x", lines, trust.Signature(word(key).partition(":")[2], (), other.sign(b"", DATA).value))
    with pytest.raises(SignatureRefused, match="not base64"):
        judged("x", lines, trust.Signature(word(key).partition(":")[2], (), "?"))


def test_one_good_signature_of_several_will_do(key: Signer, tmp_path: Path) -> None:
    signing.make_key(tmp_path / "other")
    other = signing.load_signer(tmp_path / "other")
    assert judged("x", [f"x {word(key)}"], other.sign(b"", DATA), key.sign(b"", DATA)) == word(key)


def test_a_signature_for_an_index_is_none_for_an_image(key: Signer) -> None:
    signature = key.sign(signing.INDEX, b"{}")
    with pytest.raises(SignatureRefused):
        judged("x", [f"* {word(key)}"], signature, data=signing.STATEMENT + b"{}")


def test_unsigned_images_need_a_line_that_says_so(key: Signer) -> None:
    lines = [f"debian* {word(key)}", "scratch-* unsigned"]
    assert judged("scratch-1", lines) == ""
    with pytest.raises(SignatureRefused):
        judged("debian12", lines)
    with pytest.raises(SignatureRefused, match="empty"):
        trust.judge_index(DATA, [], (), NOW, shown="it")


# -- certificates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_certificate_of_an_authority_signs_by_its_name(tmp_path: Path, kind: str) -> None:
    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256R1())
    signer = chained(authority(tmp_path / "ca").issue(DN, key=key, signs=True))
    lines = [f"* x509:{tmp_path}/ca:/DC=org/DC=grid/CN=image .*"]
    assert judged("x", lines, signer.sign(b"", DATA)) == DN
    with pytest.raises(SignatureRefused, match="not what was signed"):
        judged("x", lines, signer.sign(b"", DATA + b"x"))


def test_an_authority_between_is_followed(tmp_path: Path) -> None:
    between = authority(tmp_path / "ca").issue("/DC=org/CN=Between", is_authority=True)
    signer = chained(between.issue(DN), between)
    assert judged("x", [f"* x509:{tmp_path}/ca:{DN}"], signer.sign(b"", DATA)) == DN


def refused(tmp_path: Path, signer: Signer, pattern: str = ".*") -> str:
    with pytest.raises(SignatureRefused) as caught:
        judged("x", [f"* x509:{tmp_path}/ca:{pattern}"], signer.sign(b"", DATA))
    return caught.value.message


def test_a_name_that_only_contains_the_pattern_is_refused(tmp_path: Path) -> None:
    signer = chained(authority(tmp_path / "ca").issue("/DC=org/CN=not image signer"))
    assert "not one `image.trust` names" in refused(tmp_path, signer, "/DC=org/CN=.*(?<!not )image signer")
    assert "not one" in refused(tmp_path, signer, "image signer")


def test_certificates_that_are_no_good_are_refused(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    plain = ca.issue("/CN=user")
    assert "vouches" in refused(tmp_path, chained(holder(DN)))  # by himself
    assert "vouches" in refused(tmp_path, chained(holder("/CN=Other", is_authority=True).issue(DN)))
    assert "vouches" in refused(tmp_path, chained(ca.issue(DN, until=NOW - DAY)))
    assert "vouches" in refused(tmp_path, chained(plain.issue(DN), plain))  # by one who is no authority
    plain = ca.issue("/CN=user", is_authority=False)
    assert "vouches" in refused(tmp_path, chained(plain.issue(DN), plain))  # and says so
    assert "vouches" in refused(tmp_path, chained(ca.issue(DN, signs=False)))  # a key for encryption
    assert "cannot be read" in refused(tmp_path, Signer(plain.key, ("not a certificate",)))
    assert "a chain of 20" in refused(tmp_path, chained(*[plain] * 20))
    assert "could be mistaken" in refused(tmp_path, chained(holder_with_slashes(ca)))


def holder_with_slashes(ca: Holder) -> Holder:
    from unittest.mock import patch

    from cryptography import x509
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "user/CN=image signer")])
    with patch("tests.unit.image.authority.named", lambda _: name):
        return ca.issue(DN)


def test_a_revoked_certificate_is_refused_and_a_strangers_list_is_not_believed(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    who = ca.issue(DN)
    stranger = holder("/DC=org/DC=grid/CN=Authority", is_authority=True)
    (tmp_path / "ca/a.r0").write_bytes(stranger.revoke(who))
    (tmp_path / "ca/b.r0").write_bytes(b"nonsense")
    signer = chained(who)
    assert judged("x", [f"* x509:{tmp_path}/ca:.*"], signer.sign(b"", DATA)) == DN
    (tmp_path / "ca/c.r0").write_bytes(ca.revoke(who))
    assert "revoked" in refused(tmp_path, signer)


def test_without_authorities_nobody_is_known(tmp_path: Path) -> None:
    assert "no certificate of an authority" in refused(tmp_path, chained(holder(DN)))


# -- key files ---------------------------------------------------------------------------------------------------------


def test_a_key_is_its_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    signing.make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OutputUnwritable):
        signing.make_key(path)
    path.chmod(0o640)
    with pytest.raises(NotPermitted, match="others may read"):
        signing.load_signer(path)


def test_files_that_are_no_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputMissing):
        signing.load_signer(tmp_path / "none")
    (tmp_path / "noise").write_bytes(b"noise")
    (tmp_path / "noise").chmod(0o600)
    with pytest.raises(InputMissing, match="not a private key"):
        signing.load_signer(tmp_path / "noise")


def test_a_certificate_must_be_the_keys(tmp_path: Path) -> None:
    one, other = holder(DN), holder(DN)
    (tmp_path / "key").write_bytes(one.key_pem)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "mine").write_text(one.pem)
    (tmp_path / "others").write_text(other.pem)
    assert signing.load_signer(tmp_path / "key", tmp_path / "mine").certificates == (one.pem,)
    with pytest.raises(InputMissing, match="another key"):
        signing.load_signer(tmp_path / "key", tmp_path / "others")
    with pytest.raises(InputMissing, match="not an Ed25519 key"):
        signing.load_signer(tmp_path / "key")

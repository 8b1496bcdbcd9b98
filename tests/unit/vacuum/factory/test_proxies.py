"""Limited proxies: what is in them, and what is refused. OpenSSL has the last word where it is installed."""

import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from belljar import __version__
from belljar.errors import BadOption, DownloadFailed, NoCredentials
from belljar.records import replace
from belljar.service.credentials.proxies import LEAST, PROXY_CERT_INFO, ProxyKey, limited_proxy, load_source
from belljar.vacuum import MachineType, Space
from belljar.vacuum.factory.materials import credentials, make_user_data, renew
from belljar.vacuum.settings.copies import Fetch

NOW = 1_800_000_000.0
DAY = 86400.0
YEAR = 365 * DAY
CN = x509.NameOID.COMMON_NAME


def moment(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, UTC)


class Authority:
    """A certificate authority, and robots it knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(CN, "Example CA")])
        basic = (x509.BasicConstraints(ca=True, path_length=None), True)
        self.certificate = self._sign(self.name, self.key.public_key(), NOW - YEAR, NOW + 2 * YEAR, [basic])
        self.file = folder / "ca.pem"
        self.file.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def _sign(
        self,
        name: x509.Name,
        public: object,
        begins: float,
        ends: float,
        extensions: list[tuple[x509.ExtensionType, bool]],
    ) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            self.name, name, public, x509.random_serial_number(), moment(begins), moment(ends)
        )  # type: ignore[arg-type]
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, SHA256())

    def robot(
        self, key: object = None, *, begins: float = NOW - YEAR, ends: float = NOW + YEAR, is_ca: bool = False,
        signs: bool = True, more: tuple[tuple[x509.ExtensionType, bool], ...] = (),
    ) -> tuple[Path, Path]:  # fmt: skip
        key = key or ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "Example"), x509.NameAttribute(CN, "Robot 1")]
        )
        usage = x509.KeyUsage(signs, False, True, False, False, is_ca, False, False, False)
        made = self._sign(
            name, key.public_key(), begins, ends, [(usage, True), (x509.BasicConstraints(is_ca, None), True), *more]
        )  # type: ignore[attr-defined]
        certificate, private = self.folder / "x509cert.pem", self.folder / "x509key.pem"
        certificate.write_bytes(made.public_bytes(Encoding.PEM))
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))  # type: ignore[attr-defined]
        private.chmod(0o600)
        return certificate, private


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def parts(pem: bytes) -> list[str]:
    return re.findall(r"-----BEGIN ([A-Z ]+)-----", pem.decode())


@pytest.mark.parametrize(("kind", "private"), [(ProxyKey.RSA, "RSA PRIVATE KEY"), (ProxyKey.EC, "EC PRIVATE KEY")])
def test_a_proxy_is_what_the_rfc_says(authority: Authority, kind: ProxyKey, private: str) -> None:
    source = load_source(authority.robot())
    proxy = limited_proxy(source, now=NOW, until=NOW + DAY, key=kind)
    assert parts(proxy) == ["CERTIFICATE", private, "CERTIFICATE"]
    made, issuer = x509.load_pem_x509_certificates(proxy)
    assert made.not_valid_after_utc.timestamp() == NOW + DAY
    assert made.not_valid_before_utc.timestamp() == NOW - 300
    assert made.version is x509.Version.v3 and made.issuer == issuer.subject
    assert made.subject.rdns[:-1] == issuer.subject.rdns
    assert made.subject.rdns[-1].rfc4514_string() == f"CN={made.serial_number}"
    (usage, info) = made.extensions
    assert usage.critical and usage.value.digital_signature and not usage.value.key_cert_sign
    assert usage.value.key_encipherment is (kind is ProxyKey.RSA) and usage.value.key_agreement is (kind is ProxyKey.EC)
    assert info.critical and info.oid.dotted_string == PROXY_CERT_INFO
    key = load_pem_private_key(proxy[proxy.index(b"-----BEGIN " + private.encode()) :], None)
    assert key.public_key() == made.public_key()
    assert not isinstance(key, rsa.RSAPrivateKey) or key.key_size == 2048
    made.verify_directly_issued_by(issuer)


def test_two_proxies_of_one_source_are_two(authority: Authority) -> None:
    source = load_source(authority.robot())
    one, other = (limited_proxy(source, now=NOW, until=NOW + DAY, key=ProxyKey.EC) for _ in range(2))
    assert x509.load_pem_x509_certificate(one).subject != x509.load_pem_x509_certificate(other).subject


@pytest.mark.parametrize("source_key", ["rsa", "ec", "ed25519"])
@pytest.mark.parametrize("kind", ProxyKey)
def test_openssl_takes_it_for_a_limited_proxy(
    authority: Authority, tmp_path: Path, kind: ProxyKey, source_key: str
) -> None:
    key = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ec": lambda: ec.generate_private_key(ec.SECP384R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }[source_key]()
    robot = authority.robot(key)
    file = tmp_path / "proxy.pem"
    file.write_bytes(limited_proxy(load_source(robot), now=NOW, until=NOW + DAY, key=kind))
    words = [
        "openssl",
        "verify",
        "-allow_proxy_certs",
        "-attime",
        str(int(NOW)),
        "-CAfile",
        authority.file,
        "-untrusted",
        robot[0],
        file,
    ]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    late = subprocess.run(
        [str(word).replace(str(int(NOW)), str(int(NOW + DAY) + 1)) for word in words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert late.returncode != 0 and "expired" in late.stdout + late.stderr
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-text", "-in", str(file)], capture_output=True, text=True, timeout=60
    )
    assert "Proxy Certificate Information: critical" in shown.stdout
    assert (
        "Policy Language: 1.3.6.1.4.1.3536.1.1.1.9" in shown.stdout
        and "Path Length Constraint: infinite" in shown.stdout
    )


def test_a_proxy_of_a_proxy_is_its_chain(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "proxy.pem"
    file.write_bytes(limited_proxy(load_source(authority.robot()), now=NOW, until=NOW + DAY, key=ProxyKey.EC))
    file.chmod(0o600)
    source = load_source((file,))
    proxy = limited_proxy(source, now=NOW, until=NOW + 2 * DAY, key=ProxyKey.EC)
    assert parts(proxy) == ["CERTIFICATE", "EC PRIVATE KEY", "CERTIFICATE", "CERTIFICATE"]
    assert x509.load_pem_x509_certificate(proxy).not_valid_after_utc.timestamp() == NOW + DAY


def test_a_source_that_has_not_begun_or_cannot_sign_is_told_as_such(authority: Authority) -> None:
    """A host's clock may be behind, and a certificate of anybody's making."""
    broken = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.17"), b"\x30\x03\xff")
    for asked, why in (
        ({"begins": NOW + 3600}, "has not begun: 2027-01-15 09:00 UTC"), ({"begins": NOW + 2 * DAY}, "has not begun"),
        ({"more": ((broken, False),)}, "can sign none"), ({"key": x25519.X25519PrivateKey.generate()}, "can sign none"),
    ):  # fmt: skip
        with pytest.raises(NoCredentials, match=why):
            limited_proxy(load_source(authority.robot(**asked)), now=NOW, until=NOW + DAY, key=ProxyKey.EC)  # type: ignore[arg-type]


def test_it_ends_with_its_source(authority: Authority) -> None:
    source = load_source(authority.robot(ends=NOW + 3600))
    made = x509.load_pem_x509_certificate(limited_proxy(source, now=NOW, until=NOW + DAY, key=ProxyKey.EC))
    assert made.not_valid_after_utc.timestamp() == NOW + 3600
    with pytest.raises(NoCredentials, match="is nearly over: 2027-01-15 09:00 UTC"):
        limited_proxy(source, now=NOW + 3601 - LEAST, until=NOW + DAY)
    with pytest.raises(NoCredentials, match="is over"):
        limited_proxy(source, now=NOW + DAY, until=NOW + 2 * DAY)


def test_what_can_have_no_proxy_is_refused(authority: Authority) -> None:
    source = load_source(authority.robot(is_ca=True))
    with pytest.raises(NoCredentials, match="authority's"):
        limited_proxy(source, now=NOW, until=NOW + DAY)
    source = load_source(authority.robot(signs=False))
    with pytest.raises(NoCredentials, match="not for signing"):
        limited_proxy(source, now=NOW, until=NOW + DAY)


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.robot()
    for paths, why in (
        ((tmp_path / "no", key), "No such file"), ((certificate, tmp_path / "no"), "No such file"),
        ((certificate,), "no private key"), ((authority.file, key), "is not the key of"), ((key, key), "no certificate"),
        ((tmp_path, key), "Is a directory"),
    ):  # fmt: skip
        with pytest.raises(NoCredentials, match=why):
            load_source(paths)
    key.chmod(0o640)
    with pytest.raises(NoCredentials, match="others may read this private key") as caught:
        load_source((certificate, key))
    assert caught.value.hint == "chmod 600 it."
    key.write_bytes(b"-----BEGIN RSA PRIVATE KEY-----\nx\n-----END RSA PRIVATE KEY-----\n")
    key.chmod(0o600)
    with pytest.raises(NoCredentials, match="no certificate with a key in PEM"):
        load_source((certificate, key))


# -- all that one machine needs ----------------------------------------------------------------------------------------


def no_net(url: str, largest: int) -> bytes:
    raise DownloadFailed(f"{url}: no route to host")


def test_credentials_are_made_anew_each_time(authority: Authority, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("ey.first\n")
    one = MachineType("a", proxy=authority.robot(), proxy_key=ProxyKey.EC, token_file=token)
    first = credentials(one, NOW, NOW + DAY)
    token.write_text("ey.second\n")
    second = credentials(one, NOW + 3600, NOW + DAY)
    assert (first["token"], second["token"]) == (b"ey.first", b"ey.second")
    assert (
        x509.load_pem_x509_certificate(second["x509_proxy"]).not_valid_before_utc
        > x509.load_pem_x509_certificate(first["x509_proxy"]).not_valid_before_utc
    )
    assert credentials(MachineType("b"), NOW, NOW + DAY) == {}


@pytest.mark.parametrize("data", [b"", b"  \n", b"two words", "ü".encode(), b"x" * 70_000, None])
def test_a_token_file_without_a_token_is_named(tmp_path: Path, data: bytes | None) -> None:
    token = tmp_path / "token"
    if data is not None:
        token.write_bytes(data)
    with pytest.raises(NoCredentials, match=str(token)):
        credentials(MachineType("a", token_file=token), NOW, NOW + DAY)


def data_of(one: MachineType, fetch: Fetch = no_net) -> bytes:
    return make_user_data(Space("v", "f"), one, "0123456789ab", NOW, NOW + DAY, fetch)


def test_a_machine_s_material_is_read_anew_and_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "ud").write_bytes(b"template ##user_data_file_cert##")
    (tmp_path / "cert").write_bytes(b"PEM")
    one = MachineType("a", user_data=str(tmp_path / "ud"), option_files=(("cert", tmp_path / "cert"),))
    assert data_of(one) == b"template PEM"
    (tmp_path / "cert").unlink()
    with pytest.raises(BadOption, match=rf"machinetype a: option_files.cert: {tmp_path}/cert: No such file"):
        data_of(one)


def test_a_template_comes_from_its_address(tmp_path: Path) -> None:
    one = MachineType("a", user_data="https://example.org/ud")
    assert data_of(one, lambda url, largest: f"{url} {largest}".encode()) == b"https://example.org/ud 1048576"
    with pytest.raises(BadOption, match=r"machinetype a: user_data: https://example.org/ud: no route"):
        data_of(one)
    assert data_of(MachineType("b")) == b""


def test_a_living_machine_gets_new_credentials_when_the_site_has_new_ones(authority: Authority, tmp_path: Path) -> None:
    folder, token = tmp_path / "machine", tmp_path / "token"
    folder.mkdir()
    token.write_text("ey.first")
    one = MachineType("a", proxy=authority.robot(), proxy_key=ProxyKey.EC, token_file=token)
    for path in (*one.proxy, token):
        os.utime(path, (1, 1))
    assert renew(one, folder, NOW, NOW + DAY) is True
    first = (folder / "credentials/x509_proxy").read_bytes()
    assert (folder / "credentials").stat().st_mode & 0o777 == 0o700
    assert (folder / "credentials/token").read_bytes() == b"ey.first"
    assert renew(one, folder, NOW, NOW + DAY) is False
    token.write_text("ey.second")
    later = (folder / "credentials/token").stat().st_mtime + 10
    os.utime(token, (later, later))
    assert renew(one, folder, NOW, NOW + DAY) is True
    assert (folder / "credentials/token").read_bytes() == b"ey.second"
    assert (folder / "credentials/x509_proxy").read_bytes() != first


def test_a_machine_that_has_gone_or_has_no_credentials_gets_none(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("ey")
    assert renew(MachineType("a", token_file=token), tmp_path / "gone", NOW, NOW + DAY) is False
    assert renew(MachineType("a"), tmp_path, NOW, NOW + DAY) is False
    with pytest.raises(NoCredentials, match="/nowhere/token: No such file"):
        renew(MachineType("a", token_file=Path("/nowhere/token")), tmp_path, NOW, NOW + DAY)


def test_the_user_data_of_a_machine_name_it_as_its_metadata_service_does(tmp_path: Path) -> None:
    (tmp_path / "ud").write_text(
        "##user_data_machine_hostname## ##user_data_joboutputs_url## ##user_data_manager_version##"
    )
    one, space = MachineType("a", user_data=str(tmp_path / "ud")), Space("v", "f")
    made = make_user_data(space, one, "0123456789ab", NOW, NOW + DAY, no_net).decode()
    assert made == f"belljar-0123456789ab http://169.254.169.253/joboutputs belljar {__version__}"
    alone = make_user_data(space, replace(one, network="none"), "0123456789ab", NOW, NOW + DAY, no_net).decode()
    assert alone == f"belljar-0123456789ab  belljar {__version__}"

"""Hosts reached by their names, with real guests: unchanged programs, a name server and web servers in the lab's world."""

import json
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.net_lab import Lab, lab
from tests.live.test_networks import InLab

from belljar.host.guard.vault import certificates

__all__ = ["lab"]
API = "api.example.org"
ADDRESSES = {API: "203.0.113.1", "data.example.org": "203.0.113.1", "www.example.net": "203.0.113.1", "rebound.example.org": "10.77.0.1",
             "metadata.example.org": "169.254.169.254"}  # fmt: skip
# Answers queries of type A; writes each name that it was asked for to a file.
NAMES = """
import json, socket, struct, sys
addresses, log = json.loads(sys.argv[1]), open(sys.argv[2], "a")
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("203.0.113.1", 53))
print("ready", flush=True)
while True:
    data, sender = server.recvfrom(4096)
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1:at + 1 + data[at]].decode())
        at += 1 + data[at]
    name, kind = ".".join(labels).lower(), data[at + 1:at + 3]
    print(name, file=log, flush=True)
    address = addresses.get(name) if kind == b"\\0\\1" else None
    answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x01\\0\\4" + socket.inet_aton(address) if address else b""
    code = 0x8180 if name in addresses else 0x8183
    head = data[:2] + struct.pack(">5H", code, 1, bool(answer), 0, 0)
    server.sendto(head + data[12:at + 5] + answer, sender)
"""
# HTTP on a port, with TLS where there is a chain: answers with the headers it was sent.
WEB = """
import http.server, json, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps(dict(self.headers)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler)
if len(sys.argv) > 3:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[3])
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
"""
# What a guest tries: addresses of the web, each with a bearer's token; and a lookup by a name server of its own choice.
ASK = """
import json, os, sys, time, urllib.error, urllib.request
found = {}
for url in sys.argv[1:]:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ.get("TOKEN", "")})
    begin = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found[url] = json.loads(answer.read()).get("Authorization")
    except urllib.error.HTTPError as exc:
        found[url] = exc.code
    except OSError as exc:
        found[url] = str(exc)
    assert time.monotonic() - begin < 20, url
print(json.dumps(found))
"""


@pytest.fixture
def host(belljar: Belljar, lab: Lab, tmp_path: Path) -> InLab:
    """A host whose resolver and authorities are of the lab's world, where a web is."""
    authority, chain = certificates(list(ADDRESSES))
    (tmp_path / "roots.pem").write_bytes(authority)
    (tmp_path / "chain.pem").write_bytes(chain)
    lab.resolver("203.0.113.1")
    lab.begin(lab.world, NAMES, json.dumps(ADDRESSES), str(tmp_path / "asked"))
    for address in ("203.0.113.1", "10.77.0.1"):
        lab.begin(lab.world, WEB, address, "80")
        lab.begin(lab.world, WEB, address, "443", str(tmp_path / "chain.pem"))
    belljar.env["SSL_CERT_FILE"] = str(tmp_path / "roots.pem")
    return InLab(belljar, lab)


def asks(host: InLab, *words: str, urls: tuple[str, ...], **env: str) -> dict[str, str | int | None]:
    done = host("run", *words, "--", "python3", "-c", ASK, *urls, **env)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, str | int | None] = json.loads(done.stdout)
    return found


def test_a_guest_reaches_what_is_allowed_by_name_and_nothing_else(host: InLab, tmp_path: Path) -> None:
    trusted = (
        "--in",
        f"{tmp_path}/roots.pem:/tmp/roots.pem",
        "--env",
        "SSL_CERT_FILE=/tmp/roots.pem",
        "--env",
        "TOKEN=x",
    )
    good = ("https://api.example.org/", "http://data.example.org/a?b", "https://API.example.org:443/")
    bad = ("https://www.example.net/", "http://www.example.net/", "http://203.0.113.1/", "http://rebound.example.org/",
           "http://metadata.example.org/", "https://203.0.113.1/", "http://nowhere.example.org/")  # fmt: skip
    found = asks(host, "--allow", "*.example.org", *trusted, urls=(*good, *bad))
    assert [found[url] for url in good] == ["Bearer x"] * 3
    assert found["http://203.0.113.1/"] == 403  # its name is not one
    assert "Network is unreachable" in str(found["http://rebound.example.org/"])
    assert not any(str(found[url]).startswith("Bearer") for url in bad)
    (machine,) = [path.name for path in host.belljar.logs.iterdir() if len(path.name) == 12]
    shown = host.belljar("show", machine).stdout.decode()
    assert "reaches only   *.example.org" in shown and "refused        www.example.net:53/udp (not allowed)" in shown
    assert "www.example.net" not in (tmp_path / "asked").read_text()
    assert host.belljar.leftovers() == []


@pytest.mark.slow
def test_nothing_is_reached_where_nothing_is_allowed(host: InLab) -> None:
    found = asks(host, "--allow", "none", urls=("http://data.example.org/", "http://203.0.113.1/"))
    assert "name resolution" in str(found["http://data.example.org/"]) and "unreachable" in str(
        found["http://203.0.113.1/"]
    )


def test_a_secret_is_sent_to_its_host_and_is_nowhere_else(host: InLab, tmp_path: Path) -> None:
    secret, value = f"TOKEN=env:REAL,host={API}", "hunter2-is-not-in-any-file"
    urls = (f"https://{API}/", f"http://{API}/", "http://data.example.org/")
    options = ("--detach", "--name", "job", "--user", "1000", "--inherit-env", "--secret", secret, "--keep")
    done = host("run", *options, "--", "python3", "-c", ASK, *urls, REAL=value)
    assert done.returncode == 0 and host("wait", "job").returncode == 0, done.stderr.decode()
    found = json.loads(host("logs", "--stdout", "job").stdout)
    assert found == {urls[0]: f"Bearer {value}", **dict.fromkeys(urls[1:], "Bearer belljar-TOKEN-placeholder")}
    (machine,) = [path.name for path in host.belljar.logs.iterdir() if len(path.name) == 12]
    shown = host.belljar("show", machine).stdout.decode()
    assert f"TOKEN for {API}" in shown and f"{API}:80/tcp (TOKEN is sent as its placeholder)" in shown
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        assert path.name == "stdout.log" or value.encode() not in path.read_bytes(), path  # which the host echoed

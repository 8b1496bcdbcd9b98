"""Hosts reached by their names, with real guests: unchanged programs, a name server and web servers in the lab's world."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.net_lab import Lab, lab
from tests.live.test_networks import InLab

from belljar.host.guard.certificates import certificate

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
# Files by HTTPS, for who has the value in one of the usual ways; those in /open for everybody.
FILES = """
import base64, functools, http.server, ssl, sys
address, chain, folder, value = sys.argv[1:]
known = ("Bearer " + value, "Basic " + base64.b64encode(("me:" + value).encode()).decode())
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path.startswith("/open/") or self.headers["Authorization"] in known:
            return super().do_GET()
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="files"')
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer((address, 443), functools.partial(Handler, directory=folder))
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(chain)
server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
"""
# The host's own curl, git and pip, in the place of the guest's programs.
PROGRAMS = """
mount --bind /mnt/usr /usr
cd /tmp; export HOME=/tmp
api=api.example.org data=https://data.example.org/open
curl -fsS -H "Authorization: Bearer $TOKEN" https://$api/words
curl -fsS --user "me:$TOKEN" https://$api/words
git clone -q "https://me:$TOKEN@$api/repo.git" own; cat own/words
pip install -q --no-cache-dir --target site --index-url "https://me:$TOKEN@$api/simple/" thing; cat site/thing.py
curl -fsS $data/words
git clone -q $data/repo.git open; cat open/words
pip install -q --no-cache-dir --target site2 --index-url $data/simple/ thing; cat site2/thing.py
for command in curl 'git clone -q' 'pip download -q --retries 0 --index-url'; do
    $command https://www.example.net/repo.git 2>/dev/null && exit 9
done
curl -sS -o /dev/null -w '%{http_code}' -H "Authorization: Bearer $TOKEN" $data/../words
"""
# What a guest tries: addresses of the web, each with a bearer's token; and a lookup by a name server of its own choice.
ASK = """
import json, os, socket, sys, time, urllib.error, urllib.request
found = {}
def asked(name):
    # what the name server answers, without what a resolver would do
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(10)
        one.connect(("10.0.2.3", 53))
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        one.send(bytes((0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)) + labels + bytes((0, 0, 1, 0, 1)))
        return one.recv(1000)[3] & 15
if "dns" in sys.argv:
    sys.argv.remove("dns")
    found["dns"] = [asked("www.example.net"), asked("data.example.org"), asked("nowhere.example.net")]
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


def named_host(belljar: Belljar, lab: Lab, tmp_path: Path) -> InLab:
    """A host whose resolver and authorities are of the lab's world."""
    root, _, authority = certificate("the lab's", (), 30)
    _, key, chain = certificate("a web server", ADDRESSES, 30, by=root)
    (tmp_path / "roots.pem").write_bytes(authority)
    (tmp_path / "chain.pem").write_bytes(key + chain)
    lab.resolver("203.0.113.1")
    lab.begin(lab.world, NAMES, json.dumps(ADDRESSES), str(tmp_path / "asked"))
    belljar.env["SSL_CERT_FILE"] = str(tmp_path / "roots.pem")
    return InLab(belljar, lab)


@pytest.fixture
def host(belljar: Belljar, lab: Lab, tmp_path: Path) -> InLab:
    """A host in whose world a web is."""
    host = named_host(belljar, lab, tmp_path)
    for address in ("203.0.113.1", "10.77.0.1"):
        lab.begin(lab.world, WEB, address, "80")
        lab.begin(lab.world, WEB, address, "443", str(tmp_path / "chain.pem"))
    return host


def asks(host: InLab, *words: str, urls: tuple[str, ...], **env: str) -> dict[str, str | int | None]:
    done = host("run", *words, "--", "python3", "-c", ASK, *urls, **env)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, str | int | None] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_preparation_reaches_what_is_allowed_by_name_and_what_the_host_allows(host: InLab) -> None:
    good, not_asked, not_allowed = (
        f"http://{name}/" for name in ("api.example.org", "data.example.org", "www.example.net")
    )
    recipe = (
        "--from",
        "debian12",
        "-m",
        "256M",
        "--cwd",
        "/",
        "--allow",
        "api.example.org",
        "--allow",
        "www.example.net",
    )
    prepare = ("python3", "-c", ASK, "dns", good, not_asked, not_allowed)
    made = host("image", "warm", "named", *recipe, "--", *prepare, BELLJAR_NETWORK_ALLOW="*.example.org")
    try:
        assert made.returncode == 0, made.stderr.decode()
        found = json.loads(made.stderr)
        assert found[good] == "Bearer" and found["dns"] == [3, 3, 3]
        assert not any(str(found[url]).startswith("Bearer") for url in (not_asked, not_allowed))
    finally:
        host.belljar("image", "remove", "named")


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
    found = asks(host, "--allow", "*.example.org", *trusted, urls=("dns", *good, *bad))
    assert found["dns"] == [3, 0, 3]  # at once, where the name is not one of these
    assert [found[url] for url in good] == ["Bearer x"] * 3
    assert found["http://203.0.113.1/"] == 403  # its name is not one
    assert "Network is unreachable" in str(found["http://rebound.example.org/"])
    assert not any(str(found[url]).startswith("Bearer") for url in bad)
    (machine,) = [path.name for path in host.belljar.logs.iterdir() if len(path.name) == 12]
    shown = host.belljar("show", machine).stdout.decode()
    assert "refused        169.254.169.254:80/tcp (link-local)" in shown
    assert "reaches only   *.example.org" in shown and "refused        www.example.net:53/udp (not allowed)" in shown
    assert "www.example.net" not in (tmp_path / "asked").read_text()
    assert host.belljar.leftovers() == []


@pytest.mark.slow
def test_nothing_is_reached_where_nothing_is_allowed(host: InLab) -> None:
    found = asks(host, "--allow", "none", urls=("http://data.example.org/", "http://203.0.113.1/"))
    assert "not known" in str(found["http://data.example.org/"]) and "unreachable" in str(found["http://203.0.113.1/"])


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


def site(folder: Path) -> None:
    """Words, a repository, and an index of packages."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "words").write_text("of git\n")
    for words in (
        ("init", "-q", "-b", "main"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "words"),
    ):
        subprocess.run(["git", "-C", source, *words], check=True, timeout=60)
    for place in (folder, folder / "open"):
        (place / "simple/thing").mkdir(parents=True)
        (place / "words").write_text("of curl\n")
        subprocess.run(["git", "clone", "-q", "--bare", source, place / "repo.git"], check=True, timeout=60)
        subprocess.run(["git", "-C", place / "repo.git", "update-server-info"], check=True, timeout=60)
        wheel = "thing-1-py3-none-any.whl"
        (place / "simple/thing/index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
        with zipfile.ZipFile(place / "simple/thing" / wheel, "w") as file:
            file.writestr("thing.py", "# of pip\n")
            file.writestr("thing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
            file.writestr(
                "thing-1.dist-info/WHEEL",
                "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            file.writestr("thing-1.dist-info/RECORD", "thing.py,,\n")


@pytest.mark.slow
def test_curl_git_and_pip_work_by_name_and_with_a_secret(belljar: Belljar, lab: Lab, tmp_path: Path) -> None:
    value = "hunter2-is-not-in-any-file"
    host = named_host(belljar, lab, tmp_path)
    site(tmp_path / "files")
    lab.begin(lab.world, FILES, "203.0.113.1", str(tmp_path / "chain.pem"), str(tmp_path / "files"), value)
    words = ("--allow", "data.example.org", "--secret", f"TOKEN=env:REAL,host={API}", "--share", "/usr:/mnt/usr")
    done = host("run", *words, "--", "sh", "-euc", PROGRAMS, REAL=value)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "of curl\nof curl\nof git\n# of pip\nof curl\nof git\n# of pip\n401"
    assert host.belljar.leftovers() == []

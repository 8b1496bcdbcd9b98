"""Networks with real packets: guests in namespaces, servers beside them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar
from tests.live.net_lab import Lab, lab

__all__ = ["lab"]

# What a guest tries: places of a list, one after the other. It prints one line of JSON.
TRY = """
import json, socket, sys
def tcp(address, port):
    with socket.create_connection((address, port), timeout=20) as one:
        one.settimeout(20)
        said = one.recv(100).decode()
        one.sendall(b"x" * 100000)
        left = 100000
        while left:
            left -= len(one.recv(65536))
        return said
def udp(address, port, patience=20):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(patience)
        one.connect((address, port))
        for _ in range(20):
            one.send(b"?")
            answer = one.recv(100).decode()
        return answer
found = {}
ways = {"tcp": tcp, "udp": udp, "briefly": lambda *place: udp(*place, 3)}
for place in sys.argv[1:]:
    kind, address, port = place.split(":")
    try:
        found[place] = ways[kind](address, int(port))
    except OSError as exc:
        found[place] = exc.strerror or str(exc)
print(json.dumps(found))
"""
UNREACHABLE = "Network is unreachable"


class InLab:
    """The command, run in the lab's host."""

    def __init__(self, belljar: Belljar, lab: Lab) -> None:
        self.belljar, self.lab = belljar, lab

    def argv(self, *words: str) -> list[str]:
        return self.lab.inside(self.lab.host, *map(str, self.belljar.argv(*words)))

    def __call__(self, *words: str, **settings: str) -> subprocess.CompletedProcess[bytes]:
        env = {**self.belljar.env, **settings}
        return subprocess.run(self.argv(*words), env=env, capture_output=True, timeout=LONGEST, check=False)

    def tries(self, *places: str, network: str = "user", **settings: str) -> dict[str, str]:
        done = self("run", "--network", network, "--", "python3", "-c", TRY, *places, **settings)
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, str] = json.loads(done.stdout)
        return found

    @contextlib.contextmanager
    def guest(self, network: str, command: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
        """A machine that runs a shell command, until the end of the block."""
        argv = self.argv("run", "--network", network, "--", "sh", "-c", command)
        env = {**self.belljar.env, **settings}
        one = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            yield one
        finally:
            if one.poll() is None:
                one.send_signal(signal.SIGTERM)
            with contextlib.suppress(ValueError):
                one.communicate(timeout=60)


@pytest.fixture
def host(belljar: Belljar, lab: Lab) -> InLab:
    return InLab(belljar, lab)


def test_a_guarded_machine_reaches_the_world_and_nothing_inside(host: InLab) -> None:
    lab = host.lab
    lab.resolver("10.77.0.1")
    lab.serve(lab.world, "tcp", "203.0.113.1", 8080, "public")
    lab.serve(lab.world, "udp", "203.0.113.1", 5000, "public")
    lab.serve(lab.world, "udp", "10.77.0.1", 53, "resolver")
    lab.serve(lab.world, "tcp", "10.77.0.1", 8080, "inside")
    lab.serve(lab.world, "udp", "10.77.0.1", 5000, "inside")
    lab.serve(lab.host, "tcp", "0.0.0.0", 9090, "loopback")
    found = host.tries(
        "tcp:203.0.113.1:8080", "udp:203.0.113.1:5000", "udp:10.0.2.3:53", "tcp:10.77.0.1:8080", "briefly:10.77.0.1:5000",
        "udp:10.77.0.1:53", "tcp:10.0.2.3:9090", "tcp:10.0.2.2:9090", "tcp:203.0.113.2:9090", "tcp:10.77.0.2:9090",
        "tcp:169.254.169.254:80",
    )  # fmt: skip
    assert found == {
        "tcp:203.0.113.1:8080": "public", "udp:203.0.113.1:5000": "public?", "udp:10.0.2.3:53": "resolver?",
        "tcp:10.77.0.1:8080": UNREACHABLE, "briefly:10.77.0.1:5000": "timed out",
        "udp:10.77.0.1:53": "resolver?",  # the same place by its own name
        "tcp:10.0.2.3:9090": UNREACHABLE, "tcp:10.0.2.2:9090": UNREACHABLE, "tcp:203.0.113.2:9090": UNREACHABLE,
        "tcp:10.77.0.2:9090": UNREACHABLE, "tcp:169.254.169.254:80": UNREACHABLE,
    }  # fmt: skip
    (machine,) = [path.name for path in host.belljar.logs.iterdir() if len(path.name) == 12]
    shown = host.belljar("show", machine).stdout.decode()
    assert "refused        10.77.0.1:8080/tcp (private)" in shown
    assert "refused        203.0.113.2:9090/tcp (this host)" in shown
    assert host.belljar.leftovers() == []


def test_a_site_opens_and_closes_what_it_wants(host: InLab) -> None:
    lab = host.lab
    for port in (8080, 8081):
        lab.serve(lab.world, "tcp", "10.77.0.1", port, "inside")
        lab.serve(lab.world, "tcp", "203.0.113.1", port, "public")
    places = [f"tcp:{address}:{port}" for address in ("10.77.0.1", "203.0.113.1") for port in (8080, 8081)]
    found = host.tries(
        *places, BELLJAR_NETWORK_ALLOW="10.77.0.0/24:8080/tcp", BELLJAR_NETWORK_DENY="203.0.113.0/24:8081"
    )
    assert list(found.values()) == ["inside", UNREACHABLE, "public", UNREACHABLE]
    wrong = host("run", "--network", "user", "--", "true", BELLJAR_NETWORK_ALLOW="10.77.0.0/33")
    assert wrong.returncode == 125 and b"network.allow" in wrong.stderr


@pytest.mark.slow
def test_an_open_network_reaches_what_its_host_reaches(host: InLab) -> None:
    host.lab.serve(host.lab.host, "tcp", "127.0.0.1", 9090, "loopback")
    found = host.tries("tcp:10.0.2.2:9090", BELLJAR_NETWORK_EGRESS="open")
    assert found == {"tcp:10.0.2.2:9090": "loopback"}


# -- bridge ------------------------------------------------------------------------------------------------------------


BRIDGE = {
    "BELLJAR_NETWORK_BRIDGES": "br0", "BELLJAR_NETWORK_BRIDGE_ADDRESSES": "10.99.0.10-10.99.0.20/24",
    "BELLJAR_NETWORK_BRIDGE_GATEWAY": "10.99.0.1",
}  # fmt: skip
# Sends a frame with any source address, a spoofed one first, and then asks a server properly.
SPOOF = """
import json, socket, sys
card = [name for _, name in socket.if_nameindex() if name != "lo"][0]
with open("/sys/class/net/%s/address" % card) as file:
    mine = bytes.fromhex(file.read().strip().replace(":", ""))
def checksum(data):
    total = sum(int.from_bytes(data[at:at + 2], "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return (~total & 0xffff).to_bytes(2, "big")
def datagram(source, text, port=4000):
    body = (port).to_bytes(2, "big") + (5000).to_bytes(2, "big") + (8 + len(text)).to_bytes(2, "big") + b"\\0\\0" + text
    head = b"\\x45\\0" + (20 + len(body)).to_bytes(2, "big") + b"\\0\\0\\0\\0\\x40\\x11\\0\\0"
    head += socket.inet_aton(source) + socket.inet_aton("10.99.0.1")
    return head[:10] + checksum(head) + head[12:] + body
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind((card, 0))
everyone, other = b"\\xff" * 6, bytes.fromhex("525400123456")
address = sys.argv[1]
raw.send(everyone + mine + b"\\x08\\x00" + datagram("10.99.0.77", b"spoofed address"))
raw.send(everyone + other + b"\\x08\\x00" + datagram(address, b"spoofed card"))
raw.send(everyone + mine + b"\\x08\\x00" + datagram(address, b"rogue server", 67))
arp = b"\\x00\\x01\\x08\\x00\\x06\\x04\\x00\\x02" + mine + socket.inet_aton("10.99.0.1") + everyone + socket.inet_aton(address)
raw.send(everyone + mine + b"\\x08\\x06" + arp)
raw.send(everyone + mine + b"\\x08\\x00" + datagram(address, b"honest"))
with socket.create_connection(("10.99.0.1", 8080), timeout=20) as one:
    print(one.recv(100).decode())
"""
HEAR = """
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
one.bind(("0.0.0.0", 5000))
print("ready", flush=True)
while (data := one.recv(1000)) != b"enough":
    print(data.decode(), flush=True)
    if data == b"honest":
        break
"""


def make_bridge(lab: Lab) -> None:
    """br0 in the host, with an address of its own. (Real bridges have a card of the host on them, too.)"""
    for words in (
        ("link", "add", "br0", "type", "bridge"), ("addr", "add", "10.99.0.1/24", "dev", "br0"), ("link", "set", "br0", "up"),
    ):  # fmt: skip
        subprocess.run(["ip", "-n", lab.host, *words], check=True, timeout=30)


def links(lab: Lab) -> list[str]:
    shown = json.loads(lab.run(lab.host, "ip", "-j", "link"))
    return [one["ifname"] for one in shown if one["ifname"].startswith(("bj", "tap"))]


def tables(lab: Lab) -> str:
    return lab.run(lab.host, "nft", "list", "tables").strip()


def test_a_machine_on_a_bridge_speaks_for_itself_alone(host: InLab) -> None:
    lab = host.lab
    make_bridge(lab)
    lab.serve(lab.host, "tcp", "10.99.0.1", 8080, "gateway")
    argv = lab.inside(lab.host, "python3", "-c", HEAR)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as hearing:
        assert hearing.stdout and hearing.stdout.readline() == "ready\n"
        own = {**BRIDGE, "BELLJAR_NETWORK_BRIDGE_ADDRESSES": "10.99.0.10/24"}
        done = host("run", "--network", "bridge", "--", "python3", "-c", SPOOF, "10.99.0.10", **own)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout == b"gateway\n"
        heard, _ = hearing.communicate(timeout=30)
    assert heard == "honest\n"
    assert links(lab) == [] and tables(lab) == ""
    assert host.belljar.leftovers() == []


@pytest.mark.parametrize("victim", ["supervisor", pytest.param("QEMU", marks=pytest.mark.slow)])
def test_what_was_made_for_a_machine_on_a_bridge_goes_with_it_whoever_is_killed(host: InLab, victim: str) -> None:
    lab = host.lab
    make_bridge(lab)
    with host.guest("bridge:br0", "echo up; exec sleep 600", **BRIDGE) as one:
        assert one.stdout and one.stdout.readline() == b"up\n"
        assert len(links(lab)) == 1 and "belljar_" in tables(lab)
        os.kill(one.pid if victim == "supervisor" else host.belljar.domains()[0], signal.SIGKILL)
        one.wait(30)
    until(lambda: not links(lab), "the tap is gone with QEMU")
    assert ("belljar_" in tables(lab)) is (victim == "supervisor")
    assert host("reap").returncode == 0
    assert tables(lab) == ""
    assert host.belljar.leftovers() == []


def test_a_bridge_the_site_did_not_name_is_refused(host: InLab) -> None:
    make_bridge(host.lab)
    none = host("run", "--network", "bridge", "--", "true")
    assert none.returncode == 125 and b"network.bridges" in none.stderr
    other = host("run", "--network", "bridge:br1", "--", "true", **BRIDGE)
    assert other.returncode == 125 and b"br0 only" in other.stderr
    missing = host("run", "--network", "bridge:br1", "--", "true", **{**BRIDGE, "BELLJAR_NETWORK_BRIDGES": "br1"})
    assert missing.returncode == 125 and b"no bridge br1" in missing.stderr
    assert host.belljar.leftovers() == [] and links(host.lab) == []


# -- isolated ----------------------------------------------------------------------------------------------------------


def test_machines_of_one_group_see_each_other_and_nobody_else(host: InLab) -> None:
    serve = 'ip=$(hostname -I 2>/dev/null); python3 -c \'import socket; s=socket.create_server(("0.0.0.0",7000));\nprint("up",flush=True)\nwhile True:\n c=s.accept()[0]; c.sendall(b"mate")\n while d:=c.recv(65536): c.sendall(d)\n c.close()\''
    with host.guest("isolated:blue", serve) as first:
        assert first.stdout and first.stdout.readline() == b"up\n"
        assert host.tries("tcp:10.98.0.1:7000", network="isolated:blue") == {"tcp:10.98.0.1:7000": "mate"}
        stranger = host.tries("tcp:10.98.0.1:7000", "tcp:10.98.0.2:7000", network="isolated:red")
        assert stranger["tcp:10.98.0.1:7000"] == "Connection refused"  # that is itself, the first of its group
        assert stranger["tcp:10.98.0.2:7000"] == "No route to host"
    assert not (host.belljar.run_folder / "networks").exists() or not list(
        (host.belljar.run_folder / "networks").iterdir()
    )
    assert host.belljar.leftovers() == []


def until(is_so: object, what: str) -> None:
    end = time.monotonic() + 20
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.05)


# -- other ways --------------------------------------------------------------------------------------------------------

HELPED = """
import fcntl, os, subprocess, sys
helper, folder = sys.argv[1:]
from belljar.network import bridge
def run(*argv): subprocess.run(argv, check=True)
run("mount", "-t", "tmpfs", "none", folder + "/etc")  # all this is seen by this process and its children alone
for name in ("upper", "work"): os.mkdir(folder + "/etc/" + name)
run("mount", "-t", "overlay", "-o", "lowerdir=/etc,upperdir=%s/etc/upper,workdir=%s/etc/work" % (folder, folder), "none", "/etc")
os.makedirs("/etc/qemu", exist_ok=True)
os.mkdir(folder + "/etc/net")
os.mknod(folder + "/etc/net/tun", 0o666 | 0o020000, os.makedev(10, 200))
os.chmod(folder + "/etc/net/tun", 0o666)  # as udev has it
run("mount", "--bind", folder + "/etc/net", "/dev/net")
with open("/etc/qemu/bridge.conf", "w") as file:
    file.write("allow br0\\n")
os.chmod("/etc/qemu", 0o755)
bridge.HELPERS = (helper,)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
tap = bridge.ask_helper("br0")
name = fcntl.ioctl(tap, 0x800454D2, bytes(40))[:16].rstrip(b"\\0").decode()  # TUNGETIFF
print(os.path.exists("/sys/class/net/br0/lower_" + name) or name)
try:
    bridge.ask_helper("br1")
except bridge.NetworkFailed as exc:
    print(exc.message.rpartition(": ")[2], exc.hint)
"""


def test_a_user_is_put_on_a_bridge_by_the_helper_of_qemu(lab: Lab) -> None:
    make_bridge(lab)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        (Path(folder) / "etc").mkdir()
        helper = shutil.copy("/usr/lib/qemu/qemu-bridge-helper", folder)
        os.chmod(helper, 0o4755)
        said = lab.run(lab.host, sys.executable, "-c", HELPED, helper, folder).splitlines()
    assert said[0] == "True"
    assert "access denied" in said[1] and "allow br1" in said[1]
    assert links(lab) == []


# -- warm images -------------------------------------------------------------------------------------------------------


# Tries places while it prepares; then its jobs see what became of the connection that was open, and try another.
HELD = """
import socket, sys
sys.path.append("/usr/lib/belljar")
import belljar_hold
def reached(address, port):
    try:
        with socket.create_connection((address, port), timeout=20) as connection:
            return connection.recv(100).decode()
    except OSError as exc:
        return exc.strerror
stays = socket.create_connection(("203.0.113.1", 8080), timeout=20)
print(stays.recv(100).decode(), reached("10.77.0.1", 8080), reached("203.0.113.1", 8081), sep=", ", flush=True)
address = belljar_hold.hold()[0]
try:
    end = stays.recv(100)
except OSError as exc:
    end = exc.strerror
print(end, reached(address, 8080), sep=", ")
"""


@pytest.mark.parametrize(
    "networks", [("none", "user"), pytest.param(("bridge", "isolated:group"), marks=pytest.mark.slow)]
)
def test_a_warm_image_is_prepared_with_a_network_for_jobs_with_any(
    host: InLab, tmp_path: Path, networks: tuple[str, ...]
) -> None:
    name, lab = f"warm-net-{os.getpid()}", host.lab
    lab.serve(lab.world, "tcp", "203.0.113.1", 8080, "public")
    make_bridge(lab)
    lab.serve(lab.host, "tcp", "10.99.0.1", 8080, "bridge")
    (tmp_path / "held.py").write_text(HELD)
    recipe = ("--from", "debian12", "-m", "256M", "--in", str(tmp_path / "held.py"), "--cwd", "/root", "--user", "0:0")
    allow = ("--network", "user", "--allow", "203.0.113.1:8080", "--allow", "10.77.0.1")
    made = host("image", "warm", name, *recipe, *allow, "--", "python3", "held.py")
    try:
        assert made.returncode == 0, made.stderr.decode()
        assert made.stderr.decode() == f"public, {UNREACHABLE}, {UNREACHABLE}\n"
        for network in networks:
            address = "10.99.0.1" if network == "bridge" else "203.0.113.1"
            done = host("run", "-n", "--image", name, "--network", network, "--cwd", "/", "--", address, **BRIDGE)
            reached = {"bridge": "bridge", "user": "public"}.get(network, UNREACHABLE)
            assert done.stdout.decode() == f"Software caused connection abort, {reached}\n", done.stderr.decode()
        assert host.belljar.leftovers() == []
    finally:
        host.belljar("image", "remove", name)

"""Who an ssh guest is told to be: scripts as root, and the proof, read back from the guest's kernel and files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from belljar.errors import AgentLost
from belljar.guest import Identity, IdentityProof
from belljar.guest.conversation import SKEW_ENOUGH
from belljar.guest.ssh_link import library
from belljar.guest.ssh_scripts import HOME, text

# The calls of random(4) that credit entropy and have the kernel use it at once, for which it takes more than a shell.
RESEED = (
    'perl -e \'open(my $f, ">", "/dev/random") or exit 1; my $b = pack("H*", $ARGV[0]);'
    ' exit !(ioctl($f, 0x40085203, pack("ii", 8 * length($b), length($b)) . $b) && ioctl($f, 0x5207, 0));\''
)
# Without perl, a kernel from 5.18 on draws new random numbers by itself, when QEMU tells it that it has become a clone.
SETTLE = f"""\
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin"
if ! {RESEED} 00112233445566778899aabbccddeeff 2> /dev/null; then
    release=$(uname -r); major=${{release%%.*}}; minor=${{release#*.}}; minor=${{minor%%[!0-9]*}}
    modprobe vmgenid 2> /dev/null
    bound=
    for d in /sys/bus/acpi/drivers/vmgenid/*:* /sys/bus/platform/drivers/vmgenid/*:*; do [ -L "$d" ] && bound=yes; done
    if [ -z "$bound" ] || [ "$major" -lt 5 ] || {{ [ "$major" = 5 ] && [ "$minor" -lt 18 ]; }}; then
        echo "it has no perl, and its kernel $release draws no new random numbers in a clone, so it starts cold" >&2
        exit 7
    fi
    dmesg | grep -c 'virtual machine fork' > {HOME}/forks
fi
rm -rf {HOME}/ssh/*
sync
exit 0
"""

CLOCK_TRIES = 8
KEYS = "/etc/ssh"


def fresh_host_key() -> tuple[str, str]:
    """An Ed25519 key: (private, public), in OpenSSH's formats."""
    key = library().generate_private_key("ssh-ed25519")
    return key.export_private_key().decode(), key.export_public_key().decode().strip()


def identity_script(identity: Identity, private: str, public: str) -> str:
    """Names, entropy, host key, address. What it then is, the script reads back from where the kernel keeps it."""
    octets = "".join(f"\\{byte:03o}" for byte in identity.entropy)
    uuid = identity.nonce
    boot_id = f"{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"
    return f"""\
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
umask 022; mkdir -p {HOME}
if [ -e {HOME}/forks ]; then
    read -r forks < {HOME}/forks; tries=0
    until [ "$(dmesg | grep -c 'virtual machine fork')" -gt "$forks" ]; do
        tries=$((tries + 1)); [ $tries -gt 50 ] && echo "its kernel did not notice that it is a clone" >&2 && exit 7
        sleep 0.1
    done
    rm -f {HOME}/forks
elif command -v perl > /dev/null; then
    {RESEED} {identity.entropy.hex()} || {{ echo "its kernel takes no entropy" >&2; exit 7; }}
fi
printf '{octets}' > /dev/urandom
echo {text(identity.hostname)} > /proc/sys/kernel/hostname
echo {text(identity.hostname)} > /etc/hostname 2> /dev/null
grep -q {text(identity.hostname)} /etc/hosts 2> /dev/null || echo "127.0.1.1 {identity.hostname}" >> /etc/hosts 2> /dev/null
echo {identity.machine_id} > /etc/machine-id 2> /dev/null
[ ! -f /var/lib/dbus/machine-id ] || [ -L /var/lib/dbus/machine-id ] || echo {identity.machine_id} > /var/lib/dbus/machine-id
echo {identity.nonce} > {HOME}/nonce
echo {boot_id} > {HOME}/boot_id
mount -o bind {HOME}/boot_id /proc/sys/kernel/random/boot_id 2> /dev/null
if [ -d {KEYS} ] && [ -w {KEYS} ]; then
    rm -f {KEYS}/ssh_host_*
    (umask 077; cat > {KEYS}/ssh_host_ed25519_key) << 'END'
{private.strip()}
END
    echo {text(public)} > {KEYS}/ssh_host_ed25519_key.pub
    for f in /run/sshd.pid /var/run/sshd.pid; do
        [ -r $f ] && read -r p < $f && kill -HUP "$p" 2> /dev/null && break
    done
fi
{card_script(identity) if identity.mac else ":"}
read -r hostname < /proc/sys/kernel/hostname; echo "hostname $hostname"
read -r id < /etc/machine-id; echo "machine_id $id"
read -r nonce < {HOME}/nonce; echo "nonce $nonce"
echo "sample $(dd if=/dev/urandom bs=32 count=1 2> /dev/null | od -An -v -tx1 | tr -d ' \\n')"
exit 0
"""


def card_script(identity: Identity) -> str:
    """The card takes the machine's address, where it has another one: a clone's is its template's. It stays up, so no DHCP
    client begins anew, and it tells QEMU's network by itself: this very connection goes over it."""
    return f"""\
for c in /sys/class/net/*; do [ -e $c/device ] && card=${{c##*/}} && break; done
read -r mac < /sys/class/net/$card/address
if [ "$mac" != {identity.mac} ]; then
    echo 1 > /proc/sys/net/ipv4/conf/$card/arp_notify
    ip link set dev $card address {identity.mac} 2> /dev/null || ifconfig $card hw ether {identity.mac}
fi
read -r mac < /sys/class/net/$card/address; echo "mac $mac"
"""


def read_proof(said: Mapping[str, str], identity: Identity, skew: float) -> IdentityProof:
    return IdentityProof(
        said.get("hostname", ""), said.get("machine_id", ""), said.get("nonce", ""),
        said.get("mac", "") if identity.mac else identity.mac, said.get("sample", ""), skew,
    )  # fmt: skip


async def steer_clock(process: Any, *, precise: bool) -> float:
    """Ask the guest's clock, and set it where it is surely off; returns how far off it is then. *process* runs `CLOCK`."""
    skew, rounds, best = 0.0, 0.2, 1e9
    for _ in range(CLOCK_TRIES):
        before = time.time()
        process.stdin.write(b"tell\n")
        clock = read_clock(await process.stdout.readline())
        after = time.time()
        rounds = after - before
        now, doubt = clock - (before + after) / 2, rounds / 2
        if doubt < best:
            skew, best = now, doubt
        if abs(now) + doubt <= SKEW_ENOUGH:
            return now
        if abs(now) > doubt:
            best = 1e9
            process.stdin.write(await _setting(rounds / 2, precise=precise))
            await process.stdout.readline()
    return skew


async def _setting(ahead: float, *, precise: bool) -> bytes:
    """The order that sets the clock to what it is when the order arrives. A clock that only takes whole seconds gets it
    when one begins."""
    if precise:
        return f"set {time.time() + ahead:.6f}\n".encode()
    whole = int(time.time() + ahead) + 1
    await asyncio.sleep(max(whole - ahead - time.time(), 0))
    return f"set {whole}\n".encode()


def read_clock(said: bytes) -> float:
    """Seconds since the epoch, by the guest's clock. Raises AgentLost."""
    word = said.strip()
    if not word.isdigit() or len(word) > 20:
        raise AgentLost("the guest did not tell the time")
    return int(word) / 1e9

"""Who an ssh guest is told to be: scripts as root, and the proof, read back from the guest's kernel and files."""

from __future__ import annotations

import time
from collections.abc import Mapping

from belljar.errors import AgentLost
from belljar.guest import Identity, IdentityProof
from belljar.guest.ssh_link import library
from belljar.guest.ssh_scripts import HOME, text

# A kernel from 5.18 on draws new random numbers when QEMU tells it by the vmgenid device that it has become a clone.
SETTLE = """\
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin"
release=$(uname -r); major=${release%%.*}; minor=${release#*.}; minor=${minor%%[!0-9]*}
if [ "$major" -lt 5 ] || { [ "$major" = 5 ] && [ "$minor" -lt 18 ]; }; then
    echo "its kernel $release does not draw new random numbers in a clone (from 5.18 on kernels do), so it starts cold" >&2
    exit 7
fi
modprobe vmgenid 2> /dev/null
bound=
for d in /sys/bus/acpi/drivers/vmgenid/*; do [ -L "$d" ] && case ${d##*/} in module) ;; *) bound=yes ;; esac; done
for d in /sys/bus/platform/drivers/vmgenid/*; do [ -L "$d" ] && case ${d##*/} in module) ;; *) bound=yes ;; esac; done
if [ -z "$bound" ]; then
    echo "its kernel has no driver for vmgenid, which tells it that it has become a clone, so it starts cold" >&2
    exit 7
fi
rm -rf /run/belljar/ssh/*
dmesg | grep -c 'virtual machine fork' > /run/belljar/settled
sync
exit 0
"""

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
if [ -e {HOME}/settled ]; then
    read -r forks < {HOME}/settled; tries=0
    until [ "$(dmesg | grep -c 'virtual machine fork')" -gt "$forks" ]; do
        tries=$((tries + 1)); [ $tries -gt 50 ] && echo "its kernel did not notice that it is a clone" >&2 && exit 7
        sleep 0.1
    done
    rm -f {HOME}/settled
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
    """The card that has the machine's link takes its address, where it has another one: a clone's is its template's."""
    return f"""\
for c in /sys/class/net/*; do [ -e $c/device ] && card=${{c##*/}} && break; done
read -r mac < /sys/class/net/$card/address
if [ "$mac" != {identity.mac} ]; then
    if command -v ip > /dev/null; then
        ip link set dev $card down; ip link set dev $card address {identity.mac}; ip link set dev $card up
        ip addr add {identity.address} dev $card 2> /dev/null
        ip route replace default via {identity.gateway} dev $card
    else
        ifconfig $card down; ifconfig $card hw ether {identity.mac}
        ifconfig $card {identity.address.partition("/")[0]} netmask 255.255.255.0 up
        route add default gw {identity.gateway} $card
    fi
fi
read -r mac < /sys/class/net/$card/address; echo "mac $mac"
"""


def read_proof(said: Mapping[str, str], identity: Identity, skew: float) -> IdentityProof:
    return IdentityProof(
        said.get("hostname", ""), said.get("machine_id", ""), said.get("nonce", ""),
        said.get("mac", "") if identity.mac else identity.mac, said.get("sample", ""), skew,
    )  # fmt: skip


def clock_script(ahead: float | None, *, precise: bool) -> str:
    """Tells the guest's time in nanoseconds; or sets it, to what it will be here *ahead* seconds from now."""
    if ahead is None:
        if precise:
            return "date +%s%N\n"
        # now, of the clock that never steps, and how far the time of day is ahead of it
        return (
            "while read -r a b c d; do case \"$a $b\" in 'now at') now=$c ;; 'clock 1:') is=1 ;; '.offset: '*)"
            ' [ -n "$is" ] && { echo $((now + b)); exit 0; } ;; esac; done < /proc/timer_list\nexit 8\n'
        )
    moment = time.time() + ahead
    if precise:
        return f"date -u -s @{moment:.6f} > /dev/null\n"
    whole = int(moment) + 1
    return f"sleep {whole - moment:.3f}; date -u -s @{whole} > /dev/null\n"


def read_clock(said: bytes) -> float:
    """Seconds since the epoch, by the guest's clock. Raises AgentLost."""
    word = said.strip()
    if not word.isdigit() or len(word) > 20:
        raise AgentLost("the guest did not tell the time")
    return int(word) / 1e9

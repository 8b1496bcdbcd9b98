"""Who an ssh guest is told to be: scripts as root, and the proof, read back from the guest's kernel and files.

Each program a script starts is felt in an emulated guest, so what a shell can do itself it does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

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
if [ -d /run/systemd/system ] && [ -z "$(loginctl list-sessions --no-legend)" ]; then
    systemctl stop user@0.service user-runtime-dir@0.service
fi 2> /dev/null
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

# Says the time in nanoseconds. bash knows it by itself; else a date that has them; else the kernel: what the clock is
# that never steps, and how far the time of day is ahead of it.
TELL = """\
if [ -n "$EPOCHREALTIME" ]; then
    tell() { t=$EPOCHREALTIME; echo "${t%[.,]*}${t#*[.,]}000"; }
else
    tell() { date +%s%N; }
    case $(date +%N) in *[!0-9]* | '') tell() {
        is=
        while read -r a b c d; do
            case "$a $b" in
            'now at') now=$c ;;
            'clock 1:') is=yes ;;
            .offset:*) [ -z "$is" ] || { echo $((now + b)); return; } ;;
            esac
        done < /proc/timer_list
    } ;; esac
fi
"""
CLOCK_TRIES = 20
# Whatever is still being started would go on being started in each clone.
UP = """\
if [ -d /run/systemd/system ]; then timeout 200 systemctl is-system-running --wait; fi > /dev/null 2>&1
exit 0
"""
KEYS = "/etc/ssh"


def fresh_host_key() -> tuple[str, str]:
    """An Ed25519 key: (private, public), in OpenSSH's formats."""
    key = library().generate_private_key("ssh-ed25519")
    return key.export_private_key().decode(), key.export_public_key().decode().strip()


def identity_script(identity: Identity, private: str, public: str, *, is_told: bool = True) -> str:
    """Names, entropy, host key, address. What it then is, the script reads back from where the kernel keeps it. *is_told*: the image's ssh server is to read its key now."""
    octets = "".join(f"\\{byte:03o}" for byte in identity.entropy)
    uuid = identity.nonce
    boot_id = f"{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"
    return f"""\
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
umask 022; [ -d {HOME} ] || mkdir -p {HOME}
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
name={text(identity.hostname)}
echo "$name" > /proc/sys/kernel/hostname
echo "$name" > /etc/hostname 2> /dev/null
while read -r line; do case $line in *"$name"*) known=yes ;; esac; done < /etc/hosts
[ -n "$known" ] || echo "127.0.1.1 $name" >> /etc/hosts 2> /dev/null
echo {identity.machine_id} > /etc/machine-id 2> /dev/null
[ ! -f /var/lib/dbus/machine-id ] || [ -L /var/lib/dbus/machine-id ] || echo {identity.machine_id} > /var/lib/dbus/machine-id
echo {identity.nonce} > {HOME}/nonce
echo {boot_id} > {HOME}/boot_id
read -r id < /proc/sys/kernel/random/boot_id
[ "$id" = {boot_id} ] || mount -o bind {HOME}/boot_id /proc/sys/kernel/random/boot_id 2> /dev/null
{host_key_script(private, public, is_told=is_told)}
{card_script(identity) if identity.mac else ":"}
read -r hostname < /proc/sys/kernel/hostname; echo "hostname $hostname"
read -r id < /etc/machine-id; echo "machine_id $id"
read -r nonce < {HOME}/nonce; echo "nonce $nonce"
echo "sample "$(od -An -v -tx1 -N32 /dev/urandom || dd if=/dev/urandom bs=32 count=1 2> /dev/null | od -An -v -tx1)
exit 0
"""


def host_key_script(private: str, public: str, *, is_told: bool) -> str:
    """The guest's ssh server shows a key that no other machine has: from now on, or from its next start on, for that takes an
    emulated guest seconds."""
    tell = """\
    for f in /run/sshd.pid /var/run/sshd.pid; do
        [ -r $f ] && read -r p < $f && kill -HUP "$p" 2> /dev/null && break
    done
"""
    return f"""\
if [ -d {KEYS} ] && [ -w {KEYS} ]; then
    for f in {KEYS}/ssh_host_*; do case $f in *ed25519_key | *ed25519_key.pub) ;; *) rm -f {KEYS}/ssh_host_*; break ;; esac; done
    (umask 077; echo {text(private.strip())} > {KEYS}/ssh_host_ed25519_key)
    echo {text(public)} > {KEYS}/ssh_host_ed25519_key.pub
{tell if is_told else ""}fi"""


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
        said.get("mac", "") if identity.mac else identity.mac, said.get("sample", "").replace(" ", ""), skew,
    )  # fmt: skip


# -- the clock -----------------------------------------------------------------------------------------------------------

Ask = Callable[[str], Awaitable[bytes]]


async def steer_clock(ask: Ask, *, precise: bool) -> float:
    """Ask the guest's clock, and set it where it is surely off; returns how far off it is then. *ask* runs a script after
    `TELL`. An answer that took long says little, so the one that took least counts."""
    skew, best, rounds, script = 0.0, 1e9, 0.2, "tell"
    for _ in range(CLOCK_TRIES):
        before = time.time()
        clock = read_clock(await ask(script))
        after = time.time()
        is_set, script = script != "tell", "tell"
        if is_set:  # by then the clock was another one
            best = 1e9
        rounds = after - before
        now, doubt = clock - (before + after) / 2, rounds / 2
        if doubt < best:
            skew, best = now, doubt
        if abs(now) + doubt <= SKEW_ENOUGH:
            return now
        if abs(now) > doubt:
            script = await _setting(rounds / 2, precise=precise)
    return skew


async def _setting(ahead: float, *, precise: bool) -> str:
    """The order that sets the clock to what it is when the order arrives. A clock that only takes whole seconds gets it
    when one begins."""
    if precise:
        return f"date -u -s @{time.time() + ahead:.6f} > /dev/null && tell"
    whole = int(time.time() + ahead) + 1
    await asyncio.sleep(max(whole - ahead - time.time(), 0))
    return f"date -u -s @{whole} > /dev/null && tell"


def read_clock(said: bytes) -> float:
    """Seconds since the epoch, by the guest's clock. Raises AgentLost."""
    word = said.strip()
    if not word.isdigit() or len(word) > 20:
        raise AgentLost("the guest did not tell the time")
    return int(word) / 1e9


# -- the server of ours ----------------------------------------------------------------------------------------------------

SERVER = f"{HOME}/server"
SERVER_CONFIG = f"""\
Port %(port)d
HostKey {SERVER}/host_key
AuthorizedKeysFile {SERVER}/authorized_keys
AuthenticationMethods publickey
StrictModes no
PermitRootLogin prohibit-password
AllowUsers root
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
PidFile {SERVER}/pid
LogLevel ERROR
"""


def server_script(public: str, port: int) -> str:
    """Starts a second OpenSSH server for belljar alone. It asks no PAM, so no login session is made for each connection, and
    up to OpenSSH 9.7 it does not load itself anew for each (-r). With the others that takes seconds of an emulated guest.
    A root whose password is locked would not be let in without PAM: it stays without a password, by another word."""
    return f"""\
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin"
server=$(command -v sshd) && [ -r {KEYS}/ssh_host_ed25519_key ] || exit 6
umask 077; mkdir -p {SERVER} /run/sshd && cp {KEYS}/ssh_host_ed25519_key {SERVER}/host_key || exit 6
chmod 0755 /run/sshd
echo {text(public)} > {SERVER}/authorized_keys
cat > {SERVER}/config << 'END'
{SERVER_CONFIG % {"port": port}}END
case $(grep '^root:' /etc/shadow) in 'root:!'*) sed -i 's/^root:!/root:*!/' /etc/shadow || exit 6 ;; esac
"$server" -r -f {SERVER}/config -E {SERVER}/log < /dev/null > /dev/null 2>&1 || exit 6
tries=0
until [ -s {SERVER}/pid ]; do tries=$((tries + 1)); [ $tries -gt 100 ] && exit 6; sleep 0.1; done
exit 0
"""


NO_SERVER = f"[ ! -r {SERVER}/pid ] || {{ read -r p < {SERVER}/pid; kill $p; }}; rm -rf {SERVER}; exit 0"

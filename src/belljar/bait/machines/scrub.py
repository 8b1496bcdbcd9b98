"""What is done in a machine between two jobs, by root over the agent's own channel: it is cleaned, and proved to be what it was.

Before its first job can come, BASELINE notes the moment, and takes the rights of root from every program that has them by its set-user-ID
bit or a capability: no user becomes root. So nobody can hide from the proof: a change of a file, and a file that goes, leave a ctime that
only the kernel writes, and only root has processes, mounts or files that the proof does not know.

What a job left is whatever belongs to no system account of the image (https://www.debian.org/doc/debian-policy/ch-opersys.html#uid-and-gid-classes),
or lies where everybody may write. The proof prints what
else is not as it was; a machine that says anything but CLEAN is destroyed. What changes in the folders of the node's daemons is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

PLACE = "/run/belljar-node"
SHARED = (
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/run/lock",
    "/run/user",
    "/var/spool/cron/crontabs",
    "/var/spool/cron/atjobs",
)
CLEAN = b"clean\n"
LOCAL = r"""
place={place}
mounts() { while read -r _ dir type flags _; do case $type in ext[234]|xfs|btrfs|overlay|tmpfs|ramfs) echo "local $dir $flags";;
  *) echo "other $dir";; esac; done < /proc/self/mounts; }
locals() { mounts | sed -n 's/^local //p'; }
shared() { for dir in {shared}; do [ ! -d "$dir" ] || find "$dir" -xdev -mindepth 1; done | sort; }
"""
# `remount,bind` sets the flags that it names and no others.
BASELINE = (
    LOCAL
    + r"""
set -eu
umask 077
mkdir "$place"
locals > "$place/locals"
while read -r dir flags; do
  same=$(echo "$flags" | tr , '\n' | grep -xE 'ro|nodev|noexec|noatime|nodiratime|relatime' | tr '\n' ,)
  mount -o "remount,bind,${same}nosuid" "$dir"
done < "$place/locals"
cp /etc/passwd /etc/group "$place/"
shared > "$place/shared"
awk -F : -v job="${JOB_UID-}" '$3 != job && ($3 < 1000 || $3 >= 60000 && $3 <= 65534) { print $3 }' /etc/passwd > "$place/uids"
cat /proc/self/mounts > "$place/mounts"
: > "$place/mark"
"""
)
SCRUB = (
    LOCAL
    + r"""
umask 077
strangers() { set +f; cat /proc/[0-9]*/status 2>/dev/null | awk '
  NR == FNR { own[$1]; next } /^Pid:/ { pid = $2 }
  /^Uid:/ { for (i = 2; i <= 5; i++) if (!($i in own)) { print pid; break } }' "$place/uids" -; set -f; }
scrub() {
  for try in 1 2 3 4 5 6 7 8 9 10; do
    left=$(strangers)
    [ -n "$left" ] || break
    kill -KILL $left 2>&-
    sleep 0.1
  done
  [ -z "$left" ] || echo "process $left"
  for file in passwd group; do cmp -s "$place/$file" "/etc/$file" || cat "$place/$file" > "/etc/$file"; done
  set -- -true
  while read -r uid; do set -- "$@" ! -uid "$uid"; done < "$place/uids"
  others=$(mounts | sed -n 's/^other /! -path /p')
  locals | while read -r dir _; do
    find "$dir" -xdev -depth -cnewer "$place/mark" $others \( \( "$@" \) \( -delete -o -print \) -o {outside} -print \)
  done
  shared | diff "$place/shared" - | grep '^[<>]'
  diff "$place/mounts" /proc/self/mounts | grep '^[<>]'
  for kind in msg sem shm; do ipcrm --all=$kind; tail -n +2 /proc/sysvipc/$kind; done
  mkdir -p "$place/queues"
  mount -t mqueue none "$place/queues" && {
    find "$place/queues" -mindepth 1 \( -delete -o -print \)
    umount "$place/queues"
  }
  tr -d ' ' < /proc/key-users | awk -F : 'NR == FNR { own[$1]; next } !($1 in own) { print "keys of " $1 }' "$place/uids" -
  dmesg --clear
  find /var/log -xdev -type f -cnewer "$place/mark" -exec truncate -s 0 {} +
}
if [ -e "$place/mark" ]; then found=$(scrub 2>&1); else found="no baseline"; fi
if [ -z "$found" ]; then echo clean; else printf '%s\n' "$found" | head -n 5; fi
"""
)
# The job that the node lets in, and its user; then one line of passwd, all others are of group.
ADMIT = r"""
set -eu
IFS= read -r owner
printf '%s\n' "$owner" > /run/belljar/owner
add() { grep -q "^${line%%:*}:" "$1" || printf '%s\n' "$line" >> "$1"; }
IFS= read -r line
add /etc/passwd
while IFS= read -r line; do add /etc/group; done
"""


def baseline() -> bytes:
    return _filled(BASELINE)


def scrub(own: Iterable[str]) -> bytes:
    """*own*: folders that the node's daemons write to."""
    theirs = [f"! -path {one} ! -path '{one}/*'" for one in own]
    changed = [f"! -path {one}" for one in ("/etc/passwd", "/etc/group", *SHARED)]
    within = [f"! -path '{one}/*'" for one in SHARED]  # by name
    return _filled(SCRUB.replace("{outside}", " ".join((*theirs, *changed, *within))))


def why_not(code: int, out: bytes, err: bytes) -> str:
    """What the proof found; "" where it found nothing."""
    if code == 0 and out == CLEAN and not err:
        return ""
    said = (out if out != CLEAN else b"") + err
    return f"exit {code}: {said[:400].decode('ascii', 'replace')}".strip()


def _filled(script: str) -> bytes:
    return script.replace("{place}", PLACE).replace("{shared}", " ".join(SHARED)).encode()

"""What an ssh guest is told to do: small scripts for any POSIX shell. Pure text; nothing here talks to anybody.

A payload is a folder of files in the guest (`job_files`), begun by a fixed word on a session of its own:

    run     waits for the payload, ends what it left behind, and writes `status`: the one record of its end
    go      as root: tells its process id, joins the control group, sets limits, then becomes the user
    become  as the user: folder, descriptors, and the program in place of the shell; what it cannot do is in `error`
    watch   says `ready`, then the process id of the payload, and in the end the record

`jobs` of bash, `time` of busybox or GNU, and perl can tell death by a signal from an exit code above 128; of a shell's
own `$?` nobody can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from belljar.errors import GuestRefused
from belljar.model import Account, Payload, StdinKind

HOME = "/run/belljar"
JOBS = f"{HOME}/ssh"
LIMITS = {  # prlimit's name, ulimit's letter and its unit
    "CPU": ("cpu", "t", 1), "FSIZE": ("fsize", "f", 512), "DATA": ("data", "d", 1024), "STACK": ("stack", "s", 1024),
    "CORE": ("core", "c", 512), "RSS": ("rss", "m", 1024), "NOFILE": ("nofile", "n", 1), "AS": ("as", "v", 1024),
    "NPROC": ("nproc", "u", 1), "MEMLOCK": ("memlock", "l", 1024), "LOCKS": ("locks", "x", 1),
    "SIGPENDING": ("sigpending", "i", 1), "MSGQUEUE": ("msgqueue", "q", 1), "NICE": ("nice", "e", 1),
    "RTPRIO": ("rtprio", "r", 1), "RTTIME": ("rttime", "R", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Means:
    """What a guest has that these scripts can use."""

    waiter: str = "sh"  # perl, bash, time or busybox (its time); sh knows exit codes up to 128 only
    dropper: str = ""  # the path of setpriv, chroot or su; empty: nothing that makes root another user
    prlimit: bool = False
    cgroup: bool = False
    setsid: bool = False
    gnu_tar: bool = False
    nanoseconds: bool = False  # its date has them


# Says what there is, one word and its value on a line.
PROBE = f"""
tell() {{ while IFS= read -r line; do echo "$line"; done < {HOME}/probe; exit 0; }}
[ ! -r {HOME}/probe ] || tell
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
mkdir -p -m 0711 {HOME} {JOBS} || exit 3
[ "$(id -u)" = 0 ] || exit 4
{{
has() {{ command -v "$1" > /dev/null 2>&1; }}
. /etc/os-release 2> /dev/null; echo "os $PRETTY_NAME"
echo "kernel $(uname -r)"
if has perl && perl -MPOSIX -e1 2> /dev/null; then echo waiter perl
elif has bash; then echo waiter bash
elif [ -x /usr/bin/time ]; then echo waiter time
elif has busybox && busybox time true 2> /dev/null; then echo waiter busybox
else echo waiter sh
fi
if setpriv --reuid 0 --regid 0 --clear-groups true 2> /dev/null; then echo "dropper $(command -v setpriv)"
elif chroot --userspec=0:0 --groups=0 / true 2> /dev/null; then echo "dropper $(command -v chroot)"
elif has su; then echo "dropper $(command -v su)"
fi
has prlimit && echo prlimit yes
has setsid && echo setsid yes
tar --version 2> /dev/null | grep -q GNU && echo gnu_tar yes
case $(date +%N) in *[!0-9]* | '') ;; *) echo nanoseconds yes ;; esac
if [ -w /sys/fs/cgroup/cgroup.procs ] && mkdir -p /sys/fs/cgroup/belljar 2> /dev/null; then echo cgroup yes; fi
grep -q 9p /proc/filesystems && echo nine_p yes
modprobe -n 9p 2> /dev/null && echo nine_p yes
echo "boot $(tr -d - < /proc/sys/kernel/random/boot_id)"
}} > {HOME}/probe
tell
"""


def quote(word: bytes) -> bytes:
    """One word for a POSIX shell, whatever bytes it holds."""
    return b"'" + word.replace(b"'", b"'\\''") + b"'"


def text(word: str) -> str:
    return quote(word.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


# -- a payload ---------------------------------------------------------------------------------------------------------

RUN = """\
cd /
J={folder} G={group}
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
[ -e $J/begun ] && exit 9
: > $J/begun
oom() {{ while read -r k v; do [ "$k" = oom_kill ] && echo "$v"; done < /proc/vmstat; }}
before=$(oom)
exec 7>&2 2>> $J/log
read -r BELLJAR_MACHINE < /proc/sys/kernel/arch 2> /dev/null || BELLJAR_MACHINE=$(uname -m); export BELLJAR_MACHINE
[ -n "$G" ] && mkdir -p $G
trap : INT QUIT HUP TERM
{wait}
# Nothing of the payload outlives it.
if [ -n "$G" ]; then
    echo 1 > $G/cgroup.kill
    tries=0
    until rmdir $G || [ $tries -gt 200 ]; do
        while read -r p; do kill -9 "$p"; done < $G/cgroup.procs
        read -r peak < $G/memory.peak && echo "$peak" > $J/peak
        tries=$((tries + 1)); sleep 0.05
    done
else
    read -r leader < $J/pid
    for s in /proc/[0-9]*/stat; do
        read -r line < "$s" || continue
        set -- ${{line##*) }}
        s=${{s#/proc/}}
        [ "$4" = "$leader" ] && kill -9 "${{s%/stat}}"
    done
fi
[ "$(oom)" = "$before" ] || echo oom >> $J/end
[ -s $J/peak ] && echo "peak $(cat $J/peak)" >> $J/end
mv $J/end $J/status
echo ended 1<> $J/started
exit 0
"""

# perl: the wait status as the kernel has it. $0 is the go script. Its POSIX takes an emulated guest longer to load than all of
# the rest, so setsid is called by its number where that is known (x86_64, aarch64).
PERL = """\
perl -e '
my ($tty, $end, @go) = @ARGV;
my $pid = fork(); defined $pid or exit 99;
if (!$pid) {{
    $SIG{{$_}} = "DEFAULT" for qw(INT QUIT HUP TERM);
    open(STDERR, ">&7") or exit 98; open(my $seven, ">&=", 7) and close($seven);
    my $number = {{x86_64 => 112, aarch64 => 157}}->{{$ENV{{BELLJAR_MACHINE}}}};
    if ($number) {{ syscall($number) }} else {{ require POSIX; POSIX::setsid() }}
    ioctl(STDIN, 0x540E, 1) if $tty;
    exec @go; exit 127;
}}
open(my $seven, ">&=", 7) and close($seven); close(STDIN); close(STDOUT);
waitpid($pid, 0) == $pid or exit 99;
my $status = $?; my (undef, undef, $user, $system) = times;
open(my $f, ">", $end) or exit 99; print $f "wait $status $user $system\\n"; close($f) or exit 99;
' "{tty}" $J/end sh $J/go
exec 0< /dev/null 1>&0 7>&0
"""

# bash: an asynchronous list may take its signals back, and `jobs` tells in words how it ended.
BASH = """\
bash -c '
trap "jobs > $0/said" CHLD
exec 5<&0
( trap - INT QUIT HUP TERM; exec setsid {ctty} sh $0/go <&5 2>&7 7>&- 5<&- ) &
exec 0< /dev/null 1>&0 5<&0 7>&0
wait $!; code=$?
while [ ! -s $0/said ] && [ $code -gt 128 ] && kill -0 $! 2> /dev/null; do wait $!; code=$?; done
trap - CHLD; times > $0/times
{{ echo "shell $code $(tr "\\n" " " < $0/said)"; tail -n 1 $0/times; }} > $0/end
' $J
exec 0< /dev/null 1>&0 7>&0
"""

# time, of GNU or busybox: says when a signal ended the program.
TIME = """\
exec 5> $J/times
{time} -f '%x %U %S' -o $J/said setsid {ctty} sh $J/go 2>&7 7>&- 5>&-
code=$?
exec 0< /dev/null 1>&0 7>&0
{{ echo "time $code"; cat $J/said; }} > $J/end
"""

PLAIN = """\
{setsid} sh $J/go 2>&7 7>&-
code=$?
exec 0< /dev/null 1>&0 7>&0
echo "plain $code" > $J/end
"""

GO = """\
echo $$ > {folder}/pid
echo $$ 1<> {folder}/started
{place}
{limits}
{group}
cd /
exec {become}
"""

# As the user. What fails is told in a file, and not on the payload's own stderr.
BECOME = b"""\
fail() { echo "$2" > %(folder)s/error; exit "$1"; }
umask %(umask)03o
cd -- %(cwd)s 2> /dev/null || fail 125 no-cwd
check() {
    if [ -d "$1" ]; then fail 126 not-executable; fi
    [ -e "$1" ] || { case ${1%%/*} in '' | "$1") fail 127 not-found ;; esac; [ -d "${1%%/*}" ] || [ ! -e "${1%%/*}" ] || fail 126 not-executable; fail 127 not-found; }
    [ -x "$1" ] || fail 126 not-executable
    if [ -r "$1" ] && IFS= read -r first < "$1" 2> /dev/null; then
        case $first in
        '#!'*) first=${first#??}; first=${first#"${first%%%%[! ]*}"}; [ -x "${first%%%%[ 	]*}" ] || fail 126 not-executable ;;
        esac
    fi 2> /dev/null
}
program=%(program)s
case $program in
'') fail 127 not-found ;;
*/*) check "$program" ;;
*)
    paths=%(path)s: found= denied=
    while [ -n "$paths" ]; do
        one=${paths%%%%:*}; paths=${paths#*:}; one=${one:-.}
        [ -f "$one/$program" ] || continue
        if [ -x "$one/$program" ]; then found=yes; check "$one/$program"; break; fi
        denied=yes
    done
    [ -n "$found" ] || { [ -n "$denied" ] && fail 126 not-executable; fail 127 not-found; } ;;
esac
exec%(descriptors)s
exec %(command)s
"""

WATCH = """\
exec 3<> {folder}/started
echo ready
read -r pid <&3 && echo "$pid"
read -r end <&3
cat {folder}/status; echo --; cat {folder}/error
"""


def job_files(payload: Payload, means: Means, folder: str, number: int, *, script: bytes | None) -> dict[str, bytes]:
    """The files of a payload. *script*: the place of its script in the guest."""
    group = f"/sys/fs/cgroup/belljar/{number}" if means.cgroup else ""
    setsid = "setsid" if means.setsid and not payload.terminal else ""
    ctty = "-c" if payload.terminal else ""
    how = {"perl": PERL, "bash": BASH if means.setsid else PLAIN, "time": TIME, "busybox": TIME}.get(
        means.waiter, PLAIN
    )
    if not means.setsid and how is TIME:
        how = PLAIN
    timer = "/usr/bin/time" if means.waiter == "time" else "busybox time"
    wait = how.format(tty="1" if payload.terminal else "", ctty=ctty, setsid=setsid, time=timer)
    go = GO.format(
        folder=folder, place=make_place(payload.cwd, payload.account), limits="\n".join(limits(payload.rlimits, means)),
        group=f"echo $$ > {group}/cgroup.procs" if group else "",
        become=become(payload.account, means, f"sh {folder}/become"),
    )  # fmt: skip
    return {
        "run": RUN.format(folder=folder, group=group, wait=wait).encode(),
        "go": go.encode("utf-8", "surrogateescape"),
        "become": program(payload, folder, script),
        "watch": WATCH.format(folder=folder).encode(),
    }


def make_place(path: bytes | None, account: Account) -> str:
    """Commands that make the working directory, with those above it, the account's own where they are missing: outside it
    is there. Entering it says what is wrong."""
    if path is None or not path.startswith(b"/"):
        return ":"
    make = f'make() {{ [ -e "$1" ] || [ -z "$1" ] || {{ make "${{1%/*}}"; mkdir "$1" && chown {account.uid}:{account.gid} "$1"; }}; }}'
    return f"{make}\nmake {quote(path).decode('utf-8', 'surrogateescape')} 2> /dev/null"


def limits(wanted: Sequence[tuple[str, int, int]], means: Means) -> list[str]:
    """Commands that set resource limits, as far as the guest has a way to. Names are ours, values are numbers."""
    commands = []
    for name, soft, hard in wanted:
        if name.removeprefix("RLIMIT_") not in LIMITS:
            continue
        long, letter, unit = LIMITS[name.removeprefix("RLIMIT_")]
        if means.prlimit:
            ends = ":".join("unlimited" if value < 0 else str(value) for value in (soft, hard))
            commands.append(f"prlimit --pid $$ --{long}={ends} 2> /dev/null")
        else:
            for which, value in (("H", hard), ("S", soft)):
                amount = "unlimited" if value < 0 else str(value // unit)
                commands.append(
                    f"(ulimit -{which} -{letter} {amount}) 2> /dev/null && ulimit -{which} -{letter} {amount}"
                )
    return commands


def become(account: Account, means: Means, command: str) -> str:
    """A command line that runs *command* (fixed words) with the account's rights."""
    groups = sorted({gid for gid, _ in account.groups})
    path = means.dropper
    match path.rpartition("/")[2]:
        case "setpriv":
            more = f"--groups {','.join(map(str, groups))}" if groups else "--clear-groups"
            return f"{path} --reuid {account.uid} --regid {account.gid} {more} -- {command}"
        case "chroot":
            more = ",".join(map(str, groups or [account.gid]))
            return f"{path} --userspec={account.uid}:{account.gid} --groups={more} / {command}"
        case _ if account.uid == 0 and account.gid == 0:
            return command
        case "su":
            return f"{path} -s /bin/sh -c {text('exec ' + command)} {text(account.name)}"
    raise GuestRefused(
        f"the guest has no program that makes root another user (setpriv, chroot, su), as {account.name} wants"
    )


def program(payload: Payload, folder: str, script: bytes | None) -> bytes:
    """The user's own script: everything of the request's is a quoted word in it."""
    env = dict(payload.env)
    name = script or payload.program or (payload.argv[0] if payload.argv else b"")
    words = [name, *payload.argv[1:]]
    variables = [key + b"=" + value for key, value in env.items()]
    command = b" ".join([b"env -i --", *(quote(word) for word in variables)])
    if b"=" in name:  # env would take it for a variable
        command += b' /bin/sh -c \'exec "$0" "$@"\''
    command += b"".join(b" " + quote(word) for word in words)
    return BECOME % {
        b"folder": folder.encode(), b"umask": payload.umask, b"cwd": quote(payload.cwd or payload.account.home.encode()),
        b"program": quote(name), b"path": quote(env.get(b"PATH", b"/usr/bin:/bin")),
        b"descriptors": descriptors(payload), b"command": command,
    }  # fmt: skip


def descriptors(payload: Payload) -> bytes:
    """The redirections that make the standard descriptors what they are outside."""
    words = []
    for number, kind in enumerate((payload.stdin, payload.stdout, payload.stderr)):
        if payload.terminal and kind is StdinKind.STREAM:
            continue
        if kind is StdinKind.NULL:
            words.append(b"%d<> /dev/null" % number)
        elif kind is StdinKind.CLOSED:
            words.append(b"%d>&-" % number)
        elif kind is StdinKind.STDOUT:
            words.append(b"%d>&1" % number)
    return b"".join(b" " + word for word in words) or b" 7>&-"

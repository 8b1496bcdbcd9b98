#!/bin/sh
# Root runs it in the guest. The key comes by standard input, so that no image, record or command line has it. When slurmd ends,
# so does the machine. 78 is UNFIT_CODE. The node's own prolog lets nobody else's job in, whatever the controller was told. With ONE_JOB
# slurmd ($$) is told to end when the epilog of that job has ended; what it has to tell the controller of the job it tells before. Each
# program takes a tenth of a second under emulation: the shell does what it can by itself.
set -eu
for one in munged slurmd; do command -v $one >/dev/null || { echo "no $one is installed in it" >&2; exit 78; }; done
umask 077
mkdir -p /etc/munge /var/lib/munge /var/log/munge /run/munge
cat > /etc/munge/munge.key
umask 022
chown -R munge:munge /etc/munge /var/lib/munge /var/log/munge /run/munge
chmod 0400 /etc/munge/munge.key
echo "$NODE" > /proc/sys/kernel/hostname
printf '%s\n' "$HOSTS" >> /etc/hosts
for address in $(hostname -I); do printf '%s %s\n' "$address" "$NODE" >> /etc/hosts; done
[ -e /sys/fs/cgroup/cgroup.procs ] || mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /var/spool/slurmd /var/log/slurm /run/belljar /sys/fs/cgroup/system.slice
put() { while IFS= read -r line; do printf '%s\n' "$line"; done > "$1"; }
put /run/belljar/prolog <<'END'
#!/bin/sh
read -r uid job < /run/belljar/owner
[ -z "$uid" ] || [ "$SLURM_JOB_UID $SLURM_JOB_ID" = "$uid ${job:-$SLURM_JOB_ID}" ]
END
put /run/belljar/epilog <<'END'
#!/bin/sh
read -r uid job < /run/belljar/owner
[ -p /run/belljar/over ] && [ "$SLURM_JOB_UID $SLURM_JOB_ID" = "$uid $job" ] || exit 0
exec 3<> /run/belljar/over
END
if [ -n "${ONE_JOB-}" ]; then
mkfifo /run/belljar/over
{ read -r line < /run/belljar/over || kill $$; } </dev/null >/dev/null 2>&1 &
fi
chmod 0755 /run/munge /run/belljar/prolog /run/belljar/epilog
for group in /sys/fs/cgroup /sys/fs/cgroup/system.slice; do echo "+cpuset +cpu +memory +pids" > $group/cgroup.subtree_control; done
setpriv --reuid=munge --regid=munge --init-groups munged
[ -z "${BASELINE-}" ] || sh -c "$BASELINE"
unset BASELINE
add() { while IFS= read -r line; do grep -q "^${line%%:*}:" "$1" || printf '%s\n' "$line" >> "$1"; done; }
printf '%s\n' "$JOB_UID $JOB_ID" > /run/belljar/owner
[ -z "$PASSWD" ] || printf '%s\n' "$PASSWD" | add /etc/passwd
[ -z "$GROUPS_OF" ] || printf '%s\n' "$GROUPS_OF" | add /etc/group
if [ -n "$CONF" ]; then exec slurmd -D -f "$SLURM_CONF" -Z -N "$NODE" --conf "$CONF" </dev/null; fi
exec slurmd -D -b -f "$SLURM_CONF" -N "$NODE" </dev/null

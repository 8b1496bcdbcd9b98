#!/bin/sh
# execd in the foreground (SGE_ND): when it ends, so does the machine. 78 is UNFIT_CODE. The ports are those of /etc/services, or the
# usual ones.
set -eu
umask 022
hostname "$NODE"
printf '%s\n' "$HOSTS" >> /etc/hosts
for address in $(hostname -I); do printf '%s %s\n' "$address" "$NODE" >> /etc/hosts; done
add() { while IFS= read -r line; do grep -q "^${line%%:*}:" "$1" || printf '%s\n' "$line" >> "$1"; done; }
[ -z "$PASSWD" ] || printf '%s\n' "$PASSWD" | add /etc/passwd
[ -z "$GROUPS_OF" ] || printf '%s\n' "$GROUPS_OF" | add /etc/group
command -v sge_execd >/dev/null || { echo "no sge_execd is installed in it" >&2; exit 78; }
admin=$(sed -n 's/^admin_user[[:space:]]*//p' "$SGE_ROOT/$SGE_CELL/common/bootstrap")
mkdir -p /var/spool/gridengine/execd
[ "$admin" = none ] || chown -R "$admin" /var/spool/gridengine
grep -qs '^sge[-_]qmaster' /etc/services || export SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445
export SGE_ND=true
exec sge_execd </dev/null

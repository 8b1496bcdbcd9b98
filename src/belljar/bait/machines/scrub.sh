# Between two jobs: cleans, and prints what is not as it was.
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

# Before the first job: `remount,bind` sets the flags that it names and no others.
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

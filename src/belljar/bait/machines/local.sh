# Words of baseline.sh and scrub.sh, which follow it. {place} and its like are filled in by scrub.py.
place={place}
mounts() { while read -r _ dir type flags _; do case $type in ext[234]|xfs|btrfs|overlay|tmpfs|ramfs) echo "local $dir $flags";;
  *) echo "other $dir";; esac; done < /proc/self/mounts; }
locals() { mounts | sed -n 's/^local //p'; }
shared() { for dir in {shared}; do [ ! -d "$dir" ] || find "$dir" -xdev -mindepth 1; done | sort; }

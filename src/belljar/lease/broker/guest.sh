# What a machine of a cluster does, as root by its own /bin/sh. Before this stand: token, name, hosts, known, wanted, provides, unpack.
home=/var/lib/belljar/cluster pid=/run/belljar-cluster.pid

tell() { printf '%s %s\n' "$token" "$*" >&3; }

encoded() { base64 | tr -d '\n'; }

finish() { # CODE SCRIPT
    tell log "$(tail -c 4096 log | encoded)"
    tell end "$1" "$2"
    rm -f "$pid"
    exit 0
}

put() { # PATH BASE64
    mkdir -p "$home/${1%/*}" && printf %s "$2" | base64 -d >"$home/$1.new" && chmod 700 "$home/$1.new" && mv "$home/$1.new" "$home/$1"
}

# A script that is not there is nothing to do. What daemons it starts are not this conversation's: they get none of its streams.
run() { # KEY SCRIPT ARGUMENT...
    key=$1 script=$2
    shift 2
    [ -f "scripts/$script" ] || return 0
    echo "== $script $*"
    "$home/scripts/$script" "$@" </dev/null 3>&- || finish $? "$script"
}

# Each line of `wanted` is done once in this machine's life; what was done for machines that are gone is undone.
work() {
    printf '%s\n' "$wanted" >wanted
    touch done
    grep ' 1-ipandhost/' done | grep -Fxv -f wanted >gone
    while read -r line; do
        run $(echo "$line" | sed 's| 1-ipandhost/| 1-gone/|')
        grep -Fxv -e "$line" done >done.new
        mv done.new done
    done <gone
    while read -r line; do
        grep -Fxq -e "$line" done || { run $line && echo "$line" >>done; }
    done <wanted
}

names() {
    echo "$name" >/proc/sys/kernel/hostname
    echo "$name" >/etc/hostname
    [ -f scripts/0-etchosts.sh ] || {
        grep -v '# belljar cluster$' /etc/hosts >hosts.new
        printf '%s' "$hosts" | sed 's/$/ # belljar cluster/' >>hosts.new
        cat hosts.new >/etc/hosts
    }
    [ ! -d /etc/ssh ] || printf '%s' "$known" >/etc/ssh/ssh_known_hosts
}

give() {
    for one in $provides; do
        [ -f "provide/$one" ] && [ "$(wc -c <"provide/$one")" -le 16384 ] || {
            echo "provide/$one: no script has left it, or it has more than 16384 bytes"
            finish 1 "provide/$one"
        }
        tell data "$one" "$(encoded <"provide/$one")"
    done
}

main() {
    exec 3>&1 </dev/null
    mkdir -p "$home/provide" && cd "$home" || exit 1
    chmod 700 "$home"
    while kill -0 "$(cat "$pid" 2>/dev/null)" 2>/dev/null; do sleep 1; done # an earlier conversation that was cut off
    echo $$ >"$pid"
    exec >log 2>&1
    # The agent ends what it started and all of that group: daemons that scripts start are to stay.
    [ ! -f /sys/fs/cgroup/cgroup.procs ] || echo $$ >/sys/fs/cgroup/cgroup.procs
    export BELLJAR_CLUSTER="$home" HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    rm -rf scripts data
    unpack
    names
    work
    give
    finish 0 -
}

# What a pilot has its guests' own shell do, as root: these, and then the word of one of them.

prepare() { # NAME HOSTS; its owner's keys are read; its host's public keys are printed
    [ -n "$1" ] && { echo "$1" >/proc/sys/kernel/hostname; echo "$1" >/etc/hostname; echo "$2" >>/etc/hosts; }
    umask 077
    mkdir -p /root/.ssh /run/sshd
    chmod 755 /run/sshd
    touch /root/.ssh/authorized_keys
    cat >>/root/.ssh/authorized_keys
    for one in ed25519 ecdsa; do # no RSA key: without KVM that takes half a minute
        file=/etc/ssh/ssh_host_${one}_key
        [ -s $file ] || [ ! -x /usr/bin/ssh-keygen ] || ssh-keygen -q -t $one -N '' -f $file </dev/null >/dev/null 2>&1
    done
    cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null
    leave
    sync </dev/null >/dev/null 2>&1 & # a guest that crashes soon comes back with its keys
    exit 0
}

leave() { # the control group of this command, all of whose processes end with it
    [ -e /sys/fs/cgroup/cgroup.procs ] && echo $$ >/sys/fs/cgroup/cgroup.procs
}

# A script among user data is run once, where no cloud-init has it already. What it writes is on the console.
begin() {
    for one in /var/lib/cloud/instance/user-data.txt /var/lib/belljar/user-data; do [ -s $one ] && exit 0; done
    leave
    umask 077
    mkdir -p /var/lib/belljar
    cat >/var/lib/belljar/user-data
    chmod 700 /var/lib/belljar/user-data
    setsid sh -c 'exec /var/lib/belljar/user-data </dev/null >/dev/console 2>&1' >/dev/null 2>&1 </dev/null &
}

reboot() {
    sync
    [ -d /run/systemd/system ] && systemctl reboot && exit
    echo u >/proc/sysrq-trigger
    sleep 1
    echo b >/proc/sysrq-trigger
}

notice() { # the moment when it is killed, in UTC, is read: as EC2's spot/termination-time has it
    cd /run && mkdir -p belljar && cat >belljar/termination-time.new && mv -f belljar/termination-time.new belljar/termination-time
    echo "belljar: the batch system takes this node back at $(cat belljar/termination-time)" >/dev/console
}

serve() { # what was started to stay outlives its session
    mkdir -p /run/sshd
    leave
    for one in /usr/sbin/sshd /usr/bin/sshd; do [ -x $one ] && exec $one -i; done
    exit 127
}


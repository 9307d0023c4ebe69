#!/bin/sh
# Process 1 of the virtual machine. Its root is a read-only directory of the host, over which it lays a tmpfs; what it
# runs, and what that answers, is in another one, at /mnt/share.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 TERM=dumb

off() {
    sync
    echo o >/proc/sysrq-trigger
    sleep 60
}

if [ "$1" != writable ]; then
    mount -t proc proc /proc
    modprobe overlay
    mount -t tmpfs -o size=80% tmpfs /mnt && mkdir /mnt/upper /mnt/work /mnt/root &&
        mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work root /mnt/root || off
    umount /proc
    cd /mnt/root
    exec switch_root /mnt/root /crab-vm-init writable
fi

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /run /tmp /mnt/share
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs -o mode=1777,size=80% tmp /tmp
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
mount -t debugfs debugfs /sys/kernel/debug
mount -t securityfs securityfs /sys/kernel/security
ln -sf /proc/self/fd /dev/fd
ln -sf fd/0 /dev/stdin
ln -sf fd/1 /dev/stdout
ln -sf fd/2 /dev/stderr
hostname crab-vm 2>/dev/null || echo crab-vm >/proc/sys/kernel/hostname
ip link set lo up
mount -t virtiofs share /mnt/share || off
# Without udev, making a pool on a disk waits for half a minute.
/lib/systemd/systemd-udevd --daemon 2>/dev/null
modprobe -a zfs btrfs ext4 loop tun unix_diag tcp_diag udp_diag netlink_diag
cd /mnt/share
setsid -w sh /mnt/share/run </dev/null >/dev/hvc0 2>&1
echo $? >/mnt/share/ended
off

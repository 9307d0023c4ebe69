# What sandboxes on ZFS in the guest need: a pool that is mounted where they look for one, in which the root filesystem of
# the host's sandboxes is a dataset. A part of the script that the guest runs.
(
    set -e
    mkdir -p /tmp/crab-zfs/criu/usr/sbin
    ln -s /usr/sbin/criu /tmp/crab-zfs/criu/usr/sbin/criu
    truncate -s 3G /tmp/crab-zfs/pool.img
    zpool create -o cachefile=none -O compression=lz4 -O atime=off -m /tmp/crab-zfs/pool crab-vm-zfs /tmp/crab-zfs/pool.img
    zfs create crab-vm-zfs/base
    tar -C /tmp/crab-zfs/pool/base -xf /mnt/share/base.tar
) || exit 9

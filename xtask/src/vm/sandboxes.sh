# What sandboxes in the guest need: a pool with a root filesystem, which consists of parts of the guest's own, and CRIU
# where it is looked for. A part of the script that the guest runs.
(
    set -e
    mkdir -p /tmp/crab/pool /tmp/crab/criu/usr/sbin
    ln -s /usr/sbin/criu /tmp/crab/criu/usr/sbin/criu
    truncate -s 2G /tmp/crab/pool.img
    mkfs.btrfs -q /tmp/crab/pool.img
    mount -o loop /tmp/crab/pool.img /tmp/crab/pool
    btrfs -q subvolume create /tmp/crab/pool/base
    cd /tmp/crab/pool/base
    mkdir -p usr/bin usr/sbin usr/lib/x86_64-linux-gnu usr/lib64 etc dev/pts dev/shm proc sys run tmp root workspace
    ln -s usr/bin usr/sbin usr/lib usr/lib64 .
    cd /usr/bin
    cp -a bash dash sh env cat ls rm mkdir sleep setsid ps pgrep kill true false touch python3 python3.* \
        /tmp/crab/pool/base/usr/bin/
    cp -a /usr/lib64/. /tmp/crab/pool/base/usr/lib64/
    cp -a /usr/lib/python3* /tmp/crab/pool/base/usr/lib/
    cd /usr/lib/x86_64-linux-gnu
    find . -maxdepth 1 -name '*.so*' ! -name 'libz[pf]*' -exec cp -a {} /tmp/crab/pool/base/usr/lib/x86_64-linux-gnu/ \;
    cp -a /etc/ld.so.c* /etc/passwd /etc/group /tmp/crab/pool/base/etc/
    cd /tmp/crab/pool/base/dev
    for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
        mknod -m 666 $(echo $node | tr : ' ' | sed 's/ / c /')
    done
    ln -s pts/ptmx ptmx
    ln -s /proc/self/fd fd
    cp /mnt/share/crab-init ../usr/sbin/crab-init
) || exit 9

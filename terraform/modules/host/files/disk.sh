#!/bin/bash
# Before every start of the service: the host's local NVMe disks, striped, are mounted at $1, for the user $2 alone; weights
# are cached there. They are empty after a stop. A host without such disks keeps its cache on the root volume.
set -euo pipefail
target=$1 user=$2

mount_disks() {
    # The NVIDIA images of AWS stripe and mount the disks themselves.
    if mountpoint -q /opt/dlami/nvme; then
        mkdir -p /opt/dlami/nvme/stoker
        mount --bind /opt/dlami/nvme/stoker "$target"
        return
    fi
    mapfile -t disks < <(lsblk --nodeps --noheadings --output PATH,MODEL | awk '/Amazon EC2 NVMe Instance Storage/ {print $1}')
    case ${#disks[@]} in
    0) return ;;
    1) device=${disks[0]} ;;
    *)
        device=/dev/md0
        command -v mdadm &>/dev/null || dnf install -q -y mdadm
        mdadm --stop --scan
        mdadm --create "$device" --level=0 --force --run --raid-devices=${#disks[@]} "${disks[@]}"
        ;;
    esac
    mkfs.xfs -q -f -K "$device"
    mount -o noatime "$device" "$target"
}

mkdir -p "$target"
if ! mountpoint -q "$target"; then mount_disks; fi
install -d -m 0700 -o "$user" -g "$user" "$target" "$target/logs"

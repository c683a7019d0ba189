#!/bin/bash
# Before every start of a worker: users of functions (uids $1) can't reach the instance metadata, which hands out the host's own
# credentials. Other address families have no way there: the launch template leaves its IPv6 endpoint off.
set -euo pipefail
command -v nft &>/dev/null || dnf install -q -y nftables
nft -f - <<EOF
table inet stoker
delete table inet stoker
table inet stoker {
  chain output {
    type filter hook output priority filter; policy accept;
    meta skuid $1 ip daddr 169.254.169.254 reject
  }
}
EOF

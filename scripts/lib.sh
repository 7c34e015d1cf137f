# shellcheck shell=bash
# What the scripts here share; sourced, never run.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
lab=$root/target/lab

# Tests and the demo look for built programs in this folder, wherever the caller's cargo would put them.
export CARGO_TARGET_DIR=$root/target
# modprobe, ip and rdma live where a plain user's PATH doesn't look.
PATH=$PATH:/usr/sbin:/sbin

say() { printf '%s\n' "$*" >&2; }
die() {
    say "${0##*/}: $*"
    exit 1
}

# The libclang that scripts/setup had to choose, if it had to: see there.
load_env() {
    if [[ -f $lab/env ]]; then
        # shellcheck disable=SC1091  # made by scripts/setup
        . "$lab/env"
    fi
}

# The newest kernel here that has soft-RoCE (cloud flavours don't).
lab_kernel() {
    local image version
    while read -r version; do
        image=/boot/vmlinuz-$version
        if [[ -r $image ]] && compgen -G "/lib/modules/$version/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*" >/dev/null; then
            printf '%s\n' "$image"
            return
        fi
    done < <(compgen -G '/boot/vmlinuz-*' | sed 's,^/boot/vmlinuz-,,' | sort -rV)
    return 1
}

# test_binary NAME [OPTION]...: the path of the integration test, built with all features and these options of cargo.
test_binary() {
    local name=$1
    shift
    cargo test --all-features --no-run --message-format=json-render-diagnostics --test "$name" "$@" |
        python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("executable") and message["target"]["name"] == sys.argv[1] and "test" in message["target"]["kind"]:
        print(message["executable"])
' "$name"
}

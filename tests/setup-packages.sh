#!/bin/bash
# Installs the Debian packages named that are missing; silent when none is.
set -euo pipefail

missing=()
for package; do
    status=$(dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null || true)
    grep -qx installed <<<"$status" || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo)
if ! command -v apt-get >/dev/null || ! command -v "${sudo[@]:-true}" >/dev/null; then
    echo "These Debian packages are missing, and installing them takes apt-get and root or sudo:" >&2
    echo "  ${missing[*]}" >&2
    echo "Where other packages provide the same, PACKAGES= on make's command line skips this." >&2
    exit 1
fi

echo "Installing Debian packages: ${missing[*]}"
apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
"${apt[@]}" update || echo "apt-get update failed; going on with the package lists that are there" >&2
if ! "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null; then
    echo "Could not install: ${missing[*]}" >&2
    exit 1
fi

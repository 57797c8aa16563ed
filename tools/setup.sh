#!/usr/bin/env bash
# Set-up on a fresh Debian machine: system packages (only those that are missing) and a virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."

# --node: what the virtual node and the package build need too, and nothing else.
if [[ ${1:-} == --node ]]; then
  packages=(mmdebstrap systemd-container debian-archive-keyring)
else
  packages=(gcc libc6-dev pkg-config libsystemd-dev python3-venv python3-dev psmisc lsof util-linux e2fsprogs procps kmod)
fi

quietly() { # COMMAND...: what it says is shown only when it fails
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || status=$?
  [[ $status == 0 ]] || { cat "$log"; echo "setup: failed with exit status $status: $*"; } >&2
  rm -f "$log"
  return "$status"
}

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  if [[ $(id -u) != 0 ]]; then
    echo "setup: these packages are missing: ${missing[*]} (run as root, or install them)" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  quietly apt-get update
  quietly apt-get install -y --no-install-recommends "${missing[@]}"
fi

[[ ${1:-} != --node ]] || exit 0

python=${PYTHON:-python3}
echo "setup: Python packages of pyproject.toml into .venv"
[[ -x .venv/bin/python ]] || quietly "$python" -m venv .venv
# systemd-python is built from source against libsystemd; everything else comes as wheels.
quietly .venv/bin/python -m pip install --disable-pip-version-check --use-pep517 -e '.[dev,systemd]'
touch .venv/.ready

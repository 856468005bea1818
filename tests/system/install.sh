#!/bin/sh
# Installs the missing system packages of the tests with real launchers, several hosts and a browser, as root on Debian or
# Ubuntu. Elsewhere those tests are skipped, each with its reason.
set -u
missing=
need() { command -v "$1" >/dev/null || missing="$missing $2"; }
PATH=$PATH:/usr/sbin:/sbin
need mpirun openmpi-bin
need srun slurm-wlm
need slurmctld slurm-wlm
need slurmd slurm-wlm
need munged munge
need ip iproute2
command -v chromium >/dev/null || need chromium-headless-shell chromium-headless-shell
missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ' | sed 's/ $//')
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "tests that need $missing will be skipped; run this as root on Debian or Ubuntu to install them"
  exit 0
fi
echo "installing for the tests: $missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq; apt-get install -qq -y --no-install-recommends $missing; } >"$log" 2>&1 </dev/null && exit 0
tail -n 20 "$log" >&2
echo "apt-get could not install $missing (its last lines are above); to test without: make test SYSTEM=" >&2
exit 1

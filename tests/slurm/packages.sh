#!/bin/sh
# Installs Slurm where that is possible. Without it the tests are skipped, and say what is missing.
PATH="$PATH:/usr/sbin:/sbin"
for program in slurmctld slurmd munged srun; do
    command -v "$program" >/dev/null || missing="$program"
done
[ -n "${missing:-}" ] || exit 0
command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || exit 0
export DEBIAN_FRONTEND=noninteractive
packages="slurmctld slurmd slurm-client munge"
# shellcheck disable=SC2086  # a list of words
apt-get install -y -qq $packages >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq $packages >/dev/null; } ||
    echo "packages.sh: $packages could not be installed"
exit 0

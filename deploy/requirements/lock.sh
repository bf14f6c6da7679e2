#!/bin/sh
# Writes the pinned dependencies of the images anew, with hashes: deploy/requirements/lock.sh (needs uv, PyPI).
# What torch itself brings for a GPU is left out, as torch is: its own index says what belongs to it.
set -eu
cd -- "$(dirname -- "$0")/../.."
lock() {
  name=$1
  shift
  uv pip compile --quiet pyproject.toml "$@" --generate-hashes --universal --python-version 3.11 --no-annotate \
    --custom-compile-command "deploy/requirements/lock.sh" --output-file "deploy/requirements/$name.txt"
}
lock service --extra service --extra cli --extra hub --extra tracing
lock dashboard --extra dashboard
gpu=$(uv pip compile --quiet pyproject.toml --extra worker --universal --python-version 3.11 --no-annotate --no-header |
  sed -n 's/^\(torch\|triton\|nvidia-[a-z0-9-]*\|cuda-[a-z0-9-]*\)\b.*/--no-emit-package=\1/p' | sort -u)
# shellcheck disable=SC2086 # words
lock worker --extra worker --extra hub $gpu

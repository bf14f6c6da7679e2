#!/bin/sh
# Compiles the Go client and runs it: examples/go/run.sh [ADDRESS]. KVATLAS_TOKEN, if set, goes along.
# GO_BUILD is where generated code and the program are kept; they are made again when a source has changed.
# Needs of Debian 12: golang-go golang-google-grpc-dev golang-google-genproto-dev protobuf-compiler libprotobuf-dev
# golang-github-golang-protobuf-1-5-dev protoc-gen-go-1-5 protoc-gen-go-grpc. With Go modules instead: generate as
# below, `go mod init`, `go mod tidy`.
set -eu
for tool in go protoc protoc-gen-go protoc-gen-go-grpc; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed: the head of $0 names the packages" >&2; exit 2; }
done
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
build=${GO_BUILD:-${XDG_CACHE_HOME:-$HOME/.cache}/kvatlas/go-example}
program="$build/generate"
if [ ! -e "$program" ] || [ -n "$(find "$root/protos/kvatlas/v1" "$root/examples/go" -newer "$program" -name '*.proto' -o -newer "$program" -name '*.go')" ]; then
  rm -rf "$build/src"
  mkdir -p "$build/src/generate"
  protoc -I "$root/protos" --go_out="$build/src" --go-grpc_out="$build/src" "$root"/protos/kvatlas/v1/*.proto
  cp "$root"/examples/go/*.go "$build/src/generate/"
  (cd "$build/src/generate" && GO111MODULE=off GOFLAGS='' GOPATH="$build:/usr/share/gocode" GOCACHE="$build/cache" \
    go build -tags old_grpc -o "$program" .)
fi
# Retries of the service config are on by default from grpc-go 1.40; before, this switches them on.
GRPC_GO_RETRY=on exec "$program" "${1:-127.0.0.1:50051}" "$root/examples/service_config.json"

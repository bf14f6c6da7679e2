#!/bin/sh
# Compiles the Java client and runs it: examples/java/run.sh [ADDRESS]. KVATLAS_TOKEN, if set, goes along.
# JAVA_BUILD is where compiled classes are kept; they are made again when a source has changed.
# Needs Java 17 and, of Debian 12: libgrpc-java libgoogle-gson-java libguava-java libnetty-java libperfmark-java
# libprotobuf-java libprotobuf-dev protobuf-compiler protobuf-compiler-grpc-java-plugin
set -eu
for tool in java javac protoc grpc_java_plugin; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed: the head of $0 names the packages" >&2; exit 2; }
done
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
jars=/usr/share/java
classpath=
for name in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub \
  protobuf guava failureaccess gson netty-all netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-codec-socks \
  netty-common netty-handler netty-handler-proxy netty-resolver netty-transport netty-transport-native-unix-common \
  perfmark-api perfmark-impl error-prone-annotations; do
  [ -e "$jars/$name.jar" ] && classpath="$classpath:$jars/$name.jar"
done
classpath=${classpath#:}
build=${JAVA_BUILD:-${XDG_CACHE_HOME:-$HOME/.cache}/kvatlas/java-example}
stamp="$build/.made"
if [ ! -e "$stamp" ] || [ -n "$(find "$root/protos/kvatlas/v1" "$root/examples/java" -newer "$stamp" -name '*.proto' -o -newer "$stamp" -name '*.java')" ]; then
  rm -rf "$build"
  mkdir -p "$build/source" "$build/classes"
  protoc -I "$root/protos" -I "$root/examples/java" --java_out="$build/source" --grpc-java_out="$build/source" \
    --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
    "$root"/protos/kvatlas/v1/*.proto "$root/examples/java/details.proto"
  # The stub's annotation left Java with version 11.
  find "$build/source" -name '*Grpc.java' -exec sed -i '/^@javax.annotation.Generated/,/)$/d' {} +
  find "$build/source" "$root/examples/java" -name '*.java' >"$build/files"
  javac -nowarn -proc:none -cp "$classpath" -d "$build/classes" "@$build/files"
  touch "$stamp"
fi
exec java -cp "$build/classes:$classpath" Generate "${1:-127.0.0.1:50051}" "$root/examples/service_config.json"

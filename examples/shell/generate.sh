#!/bin/sh
# Streams an answer with nothing but `buf curl` (pip install buf-bin): the server describes itself
# through reflection. Usage: examples/shell/generate.sh [ADDRESS] [PROMPT]
# KVATLAS_TOKEN goes along as bearer token; KVATLAS_CA_FILE makes it TLS. buf prints status and details of
# what is refused, and its exit code is eight times the status. Ctrl-C cancels the call.
set -eu
command -v "${BUF:-buf}" >/dev/null || { echo "buf is not installed: pip install buf-bin" >&2; exit 2; }
address=${1:-127.0.0.1:50051}
prompt=${2:-The sky is}
unavailable=112
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Quotes, backslashes, tabs and ends of lines of the prompt, made safe for JSON.
tab=$(printf '\t')
escaped=$(printf '%s\n' "$prompt" | sed "s/\\\\/\\\\\\\\/g; s/\"/\\\\\"/g; s/$tab/\\\\t/g" |
  awk '{ printf "%s%s", (NR > 1 ? "\\n" : ""), $0 }')
scheme=http
set -- --protocol grpc
if [ -n "${KVATLAS_TOKEN:-}" ]; then
  # From a file: command lines can be read by everybody on this machine.
  (umask 077 && printf 'authorization: Bearer %s\n' "$KVATLAS_TOKEN" >"$scratch/headers")
  set -- "$@" -H "@$scratch/headers"
fi
if [ -n "${KVATLAS_CA_FILE:-}" ]; then
  scheme=https
  set -- "$@" --cacert "$KVATLAS_CA_FILE"
else
  set -- "$@" --http2-prior-knowledge
fi
# Again while nobody took it; never once something of the answer has come.
for pause in 1 2 4 0; do
  {
    # Of a server that is away, or speaks no $scheme, a call says only that its method is unknown: a list says why.
    if "${BUF:-buf}" curl "$@" --list-services "$scheme://$address" >"$scratch/services"; then
      "${BUF:-buf}" curl "$@" \
        -d "{\"spec\": {\"text\": \"$escaped\", \"sampling\": {\"temperature\": 0}, \"stop\": {\"maxTokens\": 12}}}" \
        "$scheme://$address/kvatlas.v1.GenerationService/StreamGenerate" && code=0 || code=$?
    else
      code=$unavailable
    fi
    echo "$code" >"$scratch/code"
  } | tee "$scratch/answer"
  code=$(cat "$scratch/code")
  if [ "$code" -ne "$unavailable" ] || [ -s "$scratch/answer" ] || [ "$pause" -eq 0 ]; then
    exit "$code"
  fi
  sleep "$pause"
done

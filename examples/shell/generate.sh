#!/bin/sh
# Streams an answer with nothing but `buf curl` (pip install buf-bin): the server describes itself
# through reflection. Usage: examples/shell/generate.sh [ADDRESS] [PROMPT]
set -eu
address=${1:-127.0.0.1:50051}
prompt=${2:-The sky is}
# Quotes and backslashes of the prompt, made safe for JSON.
escaped=$(printf '%s' "$prompt" | sed 's/\\/\\\\/g; s/"/\\"/g')
exec "${BUF:-buf}" curl --protocol grpc --http2-prior-knowledge \
  -d "{\"spec\": {\"text\": \"$escaped\", \"sampling\": {\"temperature\": 0}, \"stop\": {\"maxTokens\": 12}}}" \
  "http://$address/kvatlas.v1.GenerationService/StreamGenerate"

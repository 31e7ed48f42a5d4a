#!/usr/bin/env bash
# A tour of the API with curl, against a running `make serve`.
#   HEADRACE_URL  server, default http://127.0.0.1:8000
#   HEADRACE_KEY  API key, where the server wants one
set -euo pipefail

url=${HEADRACE_URL:-http://127.0.0.1:8000}
model=${1:-smollm2-135m-instruct}

call() {
    local path=$1
    shift
    echo "== $path"
    curl --silent --show-error --fail-with-body --no-buffer "$url$path" \
        --header 'Content-Type: application/json' \
        --header "Authorization: Bearer ${HEADRACE_KEY:-none}" "$@"
    echo
}

call /readyz
call /v1/models

call /v1/chat/completions --data @- <<JSON
{"model": "$model", "max_tokens": 40, "temperature": 0,
 "messages": [{"role": "user", "content": "What is the capital of France?"}]}
JSON

# Streamed, with the token counts in the last chunk.
call /v1/chat/completions --data @- <<JSON
{"model": "$model", "max_tokens": 20, "stream": true, "stream_options": {"include_usage": true},
 "messages": [{"role": "user", "content": "Name three rivers."}]}
JSON

# Raw completion: two prompts, two choices each, with the three best tokens at each position.
call /v1/completions --data @- <<JSON
{"model": "$model", "prompt": ["Once upon a time", "The river"], "n": 2, "max_tokens": 12,
 "seed": 7, "logprobs": 3}
JSON

call /tokenize --data @- <<JSON
{"model": "$model", "prompt": "Many streams, one flow."}
JSON

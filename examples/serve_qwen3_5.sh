#!/usr/bin/env bash
# Serve Qwen3.5 with multi-token prediction: stock `lmdeploy serve api_server`, nothing of dlinfer_ext on its line.
#
#   DLINFER_EXT_VENDOR=cpu examples/serve_qwen3_5.sh         the trained tiny one, on this CPU
#   examples/serve_qwen3_5.sh Qwen/Qwen3.5-9B --tp 1         on Ascend (not run on NPU)
#
# What follows the model is handed on to LMDeploy and overrides what stands here. PORT (23333), DRAFTS (4; 0: none).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
model="${1:-$here/checkpoints/tiny_qwen3_5}"
shift || true
options=(--backend pytorch --device ascend --server-name 127.0.0.1 --server-port "${PORT:-23333}")
if [ "${DLINFER_EXT_VENDOR:-}" = cpu ]; then
    export DLINFER_EXT_CPU_DTYPE="${DLINFER_EXT_CPU_DTYPE:-float32}"  # as the tiny checkpoint; elsewhere fp16
    options+=(--eager-mode --session-len 2048 --max-batch-size 8 --cache-max-entry-count 0.2)
    options+=(--language-model-only)  # its vision part is not trained
fi
if [ "${DRAFTS:-4}" != 0 ]; then
    options+=(--speculative-algorithm qwen3_5_mtp --speculative-num-draft-tokens "${DRAFTS:-4}")
fi
exec lmdeploy serve api_server "$model" "${options[@]}" "$@"

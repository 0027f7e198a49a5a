#!/usr/bin/env bash
# Serve GLM-5.3-Flash with multi-token prediction and the parsers of its reasoning and its tool calls.
#
#   DLINFER_EXT_VENDOR=cpu examples/serve_glm5_next.sh                   the trained tiny one, on this CPU
#   examples/serve_glm5_next.sh zai-org/GLM-5.3-Flash --tp 16            on Ascend (not run on NPU)
#
# What follows the model is handed on to LMDeploy and overrides what stands here. PORT (23333), DRAFTS (3; 0: none).
# Whether it fits: python -m dlinfer_ext plan --config CONFIG.json --tp 16 --drafts 3.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
model="${1:-$here/checkpoints/tiny_glm5_next}"
shift || true
options=(--backend pytorch --device ascend --server-name 127.0.0.1 --server-port "${PORT:-23333}")
options+=(--reasoning-parser glm45 --tool-call-parser glm47)  # LMDeploy chooses none by itself
options+=(--enable-prefix-caching --prefix-cache-state-budget 16)
if [ "${DLINFER_EXT_VENDOR:-}" = cpu ]; then
    export DLINFER_EXT_CPU_DTYPE="${DLINFER_EXT_CPU_DTYPE:-float32}"  # as the tiny checkpoint; elsewhere fp16
    options+=(--eager-mode --session-len 2048 --max-batch-size 8 --cache-max-entry-count 0.2)
fi
if [ "${DRAFTS:-3}" != 0 ]; then
    options+=(--speculative-algorithm deepseek_mtp --speculative-num-draft-tokens "${DRAFTS:-3}")
fi
exec lmdeploy serve api_server "$model" "${options[@]}" "$@"

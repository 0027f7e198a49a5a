"""GLM-5.3-Flash (`glm5_next`) for LMDeploy's PyTorch engine: text only.

One file per block. Maths: the released model's, as transformers 5.24.0 implements it in `models/glm5_next`; Kimi Delta
Attention https://arxiv.org/abs/2510.26692, latent attention https://arxiv.org/abs/2405.04434, sparse attention of
DeepSeek-V3.2 https://arxiv.org/abs/2512.02556, manifold-constrained hyper-connections https://arxiv.org/abs/2512.24880.
"""

from typing import Final

MODEL_TYPE: Final = "glm5_next"
ARCHITECTURE: Final = "Glm5NextForConditionalGeneration"
DRAFT_ARCHITECTURE: Final = "Glm5NextMTPModel"
METHOD: Final = "deepseek_mtp"  # LMDeploy's proposer that serves the MTP layer

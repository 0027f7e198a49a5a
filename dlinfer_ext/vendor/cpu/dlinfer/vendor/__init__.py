"""The vendor's name: LMDeploy packs MoE weights for "ascend" only."""

vendor_name = "cpu"

"""Models that LMDeploy does not have, one folder each."""

"""LMDeploy imports this in every process; the adapter is installed by its own hook, so nothing is left to do."""

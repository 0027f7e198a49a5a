"""On a card this module patches LMDeploy; on a CPU there is nothing to patch here."""

"""End-to-end checks of the whole engine: scenarios as data, run through stock LMDeploy on a CPU or on a card."""

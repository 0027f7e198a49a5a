"""Stand-in for the `dlinfer` package on a CPU: the names that LMDeploy imports, with plain PyTorch behind them."""

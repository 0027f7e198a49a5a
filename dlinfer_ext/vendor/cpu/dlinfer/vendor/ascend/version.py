"""Runtime check that LMDeploy calls at start."""


def ensure_ascend_runtime() -> None:
    """There is no CANN to check on a CPU."""

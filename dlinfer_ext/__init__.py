"""Gated DeltaNet for LMDeploy on Huawei Ascend, checkable on a CPU.

Importing this package changes nothing: `dlinfer_ext.framework.lmdeploy.install()` does, once and visibly.
"""

from .version import __version__ as __version__

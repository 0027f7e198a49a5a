"""Package metadata. No probing and no file writing: what a machine has is found at run time."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
VERSION: dict[str, str] = {}
exec((HERE / "dlinfer_ext" / "version.py").read_text(encoding="utf-8"), VERSION)

setup(
    name="dlinfer-ext",
    version=VERSION["__version__"],
    description="Gated DeltaNet operators for LMDeploy on Huawei Ascend, checkable on a CPU",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # `kernels` and `configs` are mounted by two relative symlinks and have no __init__.py, so that the top-level name
    # `kernels` of another distribution still wins over this folder: namespace packages are what finds them.
    packages=find_namespace_packages(include=["dlinfer_ext", "dlinfer_ext.*"]),
    package_data={
        "dlinfer_ext": ["py.typed"],
        "dlinfer_ext.configs": ["**/*.json", "**/*.yaml", "**/*.txt"],
        "dlinfer_ext.toolchain": ["*.c", "requirements.txt"],
    },
    install_requires=[
        "torch>=2.5",  # entry-point group `torch.backends` exists since 2.5
        "wrapt>=1.15",  # post-import hook on the host's backend module, kept by others
    ],
    extras_require={
        # tables and progress; the client of the demo; makes the script of `completion`
        "cli": ["rich>=13", "openai>=1", "shtab>=1.13"],
    },
    entry_points={
        "torch.backends": ["dlinfer_ext = dlinfer_ext.framework.lmdeploy.autoload:register"],
        "console_scripts": ["dlinfer-ext = dlinfer_ext.cli.main:main"],
    },
    classifiers=["License :: OSI Approved :: Apache Software License", "Operating System :: POSIX :: Linux"],
)

"""Packaging: what pyproject.toml cannot say.

``patches/`` stands at the top level, in sight of whoever wants to know what is changed
in vLLM, and is installed as ``vllm_tokenswift.patches``. The supported vLLM versions
come from ``vllm_tokenswift/versions.py``, their one source. The heads on a CPU are
compiled where there is a C compiler, and run by torch where there is none.
"""

import runpy

from setuptools import Extension, find_packages, setup

_versions = runpy.run_path("vllm_tokenswift/versions.py")
_minors = sorted(_versions["SUPPORTED_VLLM"], key=lambda minor: int(minor.split(".")[1]))
_next_minor = f"0.{int(_minors[-1].split('.')[1]) + 1}"

setup(
    packages=[*find_packages(include=["vllm_tokenswift*"]), "vllm_tokenswift.patches"],
    ext_modules=[
        Extension(
            "vllm_tokenswift.cpu._head_chain",
            ["vllm_tokenswift/cpu/head_chain.c"],
            extra_compile_args=["-std=c11", "-O3", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,
        )
    ],
    package_dir={"vllm_tokenswift.patches": "patches"},
    package_data={
        "vllm_tokenswift": ["py.typed"],
        "vllm_tokenswift.heads": ["data/*/*"],
        "vllm_tokenswift.patches": ["*.toml"],
    },
    # A machine has vLLM or its CPU build, so neither is a dependency of its own;
    # the version is checked when vLLM loads the plugin.
    extras_require={
        "gpu": [f"vllm>={_minors[0]},<{_next_minor}"],
        "cpu": [_versions["CPU_BUILD"]],
        "dev": [
            "mypy>=1.18",
            "pyarrow>=21",
            "pytest>=8.4",
            "pytest-xdist>=3.8,<4",
            "ruff>=0.14",
            "scipy>=1.15",
        ],
    },
)

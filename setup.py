"""What is installed: each folder at the top, and every package in it, as a part of the namespace `pagewire`.

The folders sit side by side and get their dotted names here, so that no bare `kernels` or `workers` can ever be
imported (transformers looks for a module called `kernels`). Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("cli", "engine_core", "frontend", "ipc", "kernels", "workers")

setup(
    packages=[
        *("pagewire", *(f"pagewire.{name}" for name in find_packages("pagewire"))),
        *(f"pagewire.{folder}" for folder in FOLDERS),
        *(f"pagewire.{folder}.{name}" for folder in FOLDERS for name in find_packages(folder)),
    ],
    package_dir={"pagewire": "pagewire", **{f"pagewire.{folder}": folder for folder in FOLDERS}},
    package_data={
        "": [
            *("py.typed", "*.md", "*.json", "*.jinja", "*.safetensors"),
            *("*.html", "*.js", "*.css", "*.svg"),
            *("*.cpp", "*.h", "*.cu", "*.cuh"),
        ],
        "pagewire.frontend.server.page": ["*/*.js", "*/*.css", "vendor/*"],
    },
)

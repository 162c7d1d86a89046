"""What `pagewire-client` installs: the folders of the repository that need no engine. See setup.py at the root."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path("..", "..")
FOLDERS = ("cli", "frontend", "ipc")

setup(
    packages=[
        "pagewire",
        *(f"pagewire.{name}" for name in find_packages(str(ROOT / "pagewire"), exclude=["demo*"])),
        *(f"pagewire.{folder}" for folder in FOLDERS),
        *(f"pagewire.{folder}.{name}" for folder in FOLDERS for name in find_packages(str(ROOT / folder))),
    ],
    package_dir={
        "pagewire": str(ROOT / "pagewire"),
        **{f"pagewire.{folder}": str(ROOT / folder) for folder in FOLDERS},
    },
    package_data={
        "": ["py.typed", "*.json", "*.jinja", "*.html", "*.js", "*.css", "*.svg"],
        "pagewire.frontend.server.page": ["*/*.js", "*/*.css", "vendor/*"],
    },
)

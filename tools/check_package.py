"""Checks that a wheel or a source archive holds every file of the package in the repository.

Run as `python tools/check_package.py dist/*`. Names each missing file, and then exits with
status 1.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def package_files() -> set[str]:
    """Returns the files of the package, as in quire/config.py, without what Python has compiled."""
    files = (file for file in (ROOT / "src" / "quire").rglob("*") if file.is_file())
    names = (file.relative_to(ROOT / "src").as_posix() for file in files)
    return {name for name in names if "__pycache__" not in name}


def archive_files(archive: Path) -> set[str]:
    """Returns the files of an archive, without a source archive's folders above the package.

    Raises:
        ValueError: the file is neither a wheel nor a source archive.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as source:
            return {name.partition("/src/")[2] for name in source.getnames()}
    raise ValueError(f"{archive} is neither a wheel nor a source archive")


def main() -> int:
    wanted = package_files()
    status = 0
    for argument in sys.argv[1:]:
        missing = sorted(wanted - archive_files(Path(argument)))
        print(f"{argument}: {len(wanted) - len(missing)} of {len(wanted)} files")
        for name in missing:
            print(f"  lacks {name}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

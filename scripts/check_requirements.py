"""Exit with 0 if this interpreter has everything that the given requirements files ask for.

python scripts/check_requirements.py requirements.txt [MORE ...]
"""

import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    sys.exit("it lacks the packages of requirements.txt")


def missing(path: Path) -> list[str]:
    """List the lines of a requirements file that the installed packages do not satisfy."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    unmet = []
    for requirement in map(Requirement, filter(None, lines)):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(str(requirement))
    return unmet


if __name__ == "__main__":
    unmet = [text for name in sys.argv[1:] for text in missing(Path(name))]
    if unmet:
        sys.exit("it lacks " + ", ".join(unmet))

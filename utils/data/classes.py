"""``--classes``: train on some of the class folders.

Interface: `select` takes the option and the names of the folders.
"""

import os
from pathlib import Path

from utils.start.errors import UserError


def select(choice: str | None, folders: list[str]) -> list[str]:
    """Return the classes that ``choice`` selects (number, names or file). Raises: `UserError`."""
    if not choice:
        return folders
    if choice.isdecimal():
        if not 0 < int(choice) <= len(folders):
            raise UserError(
                f"--classes {choice}: there are {len(folders)} classes", on_every_rank=True
            )
        return folders[: int(choice)]
    chosen = choice.split(",")
    if os.path.isfile(choice):
        try:
            chosen = Path(choice).read_text(encoding="utf-8-sig", errors="replace").split("\n")
        except OSError as error:
            text = f"--classes {choice} cannot be read ({error.strerror})"
            raise UserError(text, on_every_rank=True) from None
    chosen = sorted({name.strip() for name in chosen} - {""})
    known = set(folders)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        named = ", ".join(ascii(name[:60]) for name in unknown[:3]) or "nothing"
        raise UserError(f"--classes names {named}, which is not a class folder", on_every_rank=True)
    return chosen

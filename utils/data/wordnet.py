"""Names for classes whose folders are WordNet ids, such as n01440764."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

WORDNET = re.compile(r"n\d{8}")
IMAGENET = (1000, "n01440764", "n15075141")  # other sets have 1000 of WordNet's classes, too
TABLES = ("Labels.json", "LOC_synset_mapping.txt", "class_names.csv")


def find(classes: Sequence[str], data: Path) -> dict[str, str]:
    """Return a name for each class: its folder's, or if that is a WordNet id, id and words.

    The words come from a table beside the data set or in it (Kaggle's Labels.json or
    LOC_synset_mapping.txt, or class_names.csv with lines of id and words), else, for ImageNet's
    1000 classes, from torchvision.
    """
    names = {name: name for name in classes}
    if not all(map(WORDNET.fullmatch, classes)):
        return names
    words = {}
    for folder in (data, data.parent):
        for table in TABLES:
            if not words and (folder / table).is_file():
                words = _read(folder / table)
    if not words and (len(classes), min(classes), max(classes)) == IMAGENET:
        from torchvision.models import ResNet50_Weights

        # Sorted by id, as torchvision's list is.
        categories = ResNet50_Weights.IMAGENET1K_V2.meta["categories"]
        words = dict(zip(sorted(classes), categories, strict=True))
    return {name: f"{name} {words[name]}" if name in words else name for name in names}


def words(classes: Sequence[str], data: Path) -> list[str]:
    """Return what `find` does, without the ids: for pictures, where there is little room."""
    return [name.removeprefix(f"{own} ") for own, name in find(classes, data).items()]


def _read(file: Path) -> dict[str, str]:
    """Read a table of ids and words; one that cannot be read has none."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".json":
            return {str(key): str(value) for key, value in json.loads(text).items()}
        if file.suffix == ".csv":
            return {row[0]: row[1] for row in csv.reader(text.splitlines()) if len(row) > 1}
    except (OSError, ValueError, AttributeError, csv.Error):
        return {}
    pairs = (line.partition(" ") for line in text.splitlines())
    return {key: words.strip() for key, _, words in pairs}

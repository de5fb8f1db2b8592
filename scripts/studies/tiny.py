"""--try: the same study, so small that it takes a minute or two on this machine's CPU."""

import os
from pathlib import Path

from prepare import sources
from studies.plan import Study, script_options

from utils.data import opening
from utils.data.classes import select

CLASSES, BATCH, IMAGES = 8, 2, 8  # at most so many classes; at least so many images of each part
PARTS = ("train", "val", "test")
WHAT = (
    f"the same study on this CPU, with 1 and 2 processes, one epoch of {IMAGES} images and one "
    "seed. It takes a minute or two, longer for a large model, and keeps no run"
)


def shrink(study: Study, training: list[str], place: Path) -> list[str]:
    """Change the ``study``'s options, and put images and later the runs into the folder ``place``.

    Returns: the training command, on these images. Raises: `UserError`, OSError.
    """
    script, *words = training
    options = script_options(script, words, local=bool(study.simulate))
    data, number = place / "data", CLASSES
    if Path(options.data).is_dir():
        number = copy_images(Path(options.data), options.classes, data)
    else:
        print(f"{options.data} is not on this machine: the try uses drawn images", flush=True)
        draw_images(data)
    study.nodes = sorted({min(nodes, 2) for nodes in study.nodes})
    study.simulate, study.machines, study.hosts, study.slurm = study.nodes[-1], [], None, None
    study.seeds = study.seeds and study.seeds[:1]
    study.hours = study.store = study.global_batch = study.batch_size = None
    logbook = Path(os.path.abspath(study.logbook))  # "." has no name
    study.logbook = logbook.with_name(f"{logbook.name}_try")
    own = {"--epochs": 1, "-b": BATCH, "-j": 1, "-p": 1, "--output-dir": place / "runs"}
    own["--warmup-epochs"] = min(options.warmup_epochs, 1)
    own |= {"--classes": number} if options.classes else {}
    own |= {"--accum-steps": 2} if options.accum_steps > 1 else {}
    own |= {"--global-batch": 2 * BATCH} if options.global_batch else {}
    study.overrides = [str(word) for pair in own.items() for word in pair]
    if options.data in words:
        words[len(words) - 1 - words[::-1].index(options.data)] = str(data)
    else:  # the default
        words.append(str(data))
    return [script, *words]


def copy_images(data: Path, choice: str | None, out: Path) -> int:
    """Copy the first images of the first classes that --classes (``choice``) selects from any data
    set that training can read. Returns: the number of classes. Raises: `UserError`, OSError."""
    names = select(choice, opening.class_folders(data / "train"))[:CLASSES]
    number = -(-IMAGES // len(names))
    for part in PARTS:
        if part == "test" and not opening.has_classes(data / part):
            continue
        source = opening.open_source(data / part, names)
        for label, name in enumerate(names):
            folder = out / part / name
            folder.mkdir(parents=True)
            for image in (source.targets == label).nonzero()[0][:number].tolist():
                suffix = Path(source.name(image)).suffix
                (folder / f"{image}{suffix}").write_bytes(source.read(image))
    return len(names)


def draw_images(out: Path) -> None:
    """Draw as many images as `copy_images` copies."""
    for part in PARTS:
        for name in list(sources.TEXTURES)[:CLASSES]:
            folder = out / part / name
            folder.mkdir(parents=True)
            for i in range(IMAGES // CLASSES):
                (folder / f"{i}.jpg").write_bytes(sources.draw(0, part, name, i))

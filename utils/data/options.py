"""Options of the data set and of augmentation. Without torch, so that --help takes no seconds."""

import os

from utils.data import preprocessing, progressive
from utils.start import option_types as types
from utils.start.cores import usable_cores

# On a slow disk, eight workers keep a core busy; thousands would take minutes to start.
CORES = usable_cores()
MOST_WORKERS = max(64, 8 * CORES)


def add_options(parser: types.Parser) -> None:
    """Add the options that `utils.data` reads."""
    add = parser.group("data").add_argument
    text = "folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG; $IMAGENET_DIR if set, else /data"
    default = types.path(os.environ.get("IMAGENET_DIR") or "/data")
    add("data", nargs="?", type=types.path, default=default, metavar="DATA", help=text)
    text = "train on some of the class folders: the first N, those listed in FILE, or A, B and C"
    add("--classes", type=types.path, metavar="N|FILE|A,B,C", help=text)
    text = "side of the crop in pixels; default: that of the checkpoint or the weights, else 224"
    add("--image-size", type=types.pixels, metavar="PX", help=text)
    text = "stop when more than N image files cannot be read"
    add("--max-bad-files", type=types.count, default=100, metavar="N", help=text)

    add = parser.group("augmentation").add_argument
    text = "smallest area of a training crop, as a fraction of the image"
    smallest = preprocessing.CROP_SCALE
    add("--crop-scale", type=types.fraction, default=smallest, metavar="S", help=text)
    text = "apply RandAugment, TrivialAugment, AutoAugment or AugMix to training crops"
    add("--auto-augment", choices=preprocessing.POLICIES, help=text)
    text = "probability of a grey box in a training crop"
    add("--random-erasing", type=types.fraction, default=0.0, metavar="P", help=text)
    text = "blend pairs of images, with mixing weights from Beta(A, A); 0.2 is common"
    add("--mixup", type=types.beta_shape, default=0.0, metavar="A", help=text)
    text = (
        "paste a box of one image into another, with areas from Beta(A, A); 1 is common. With "
        "--mixup, each pair gets one of the two at random"
    )
    add("--cutmix", type=types.beta_shape, default=0.0, metavar="A", help=text)
    text = (
        "side of the training crops in pixels, by epoch. 160:192 is 160 for the first 70 %% of the "
        "epochs, 192 from 85 %% on, and grows in steps of 32 in between (less if a size is not a "
        "multiple). 96,128,160 gives each an equal part of the epochs. Evaluation uses --image-size"
    )
    add("--progressive", type=progressive.check, metavar="SIZES", help=text)

    add = parser.group("evaluation").add_argument
    text = (
        "short side of a validation image before the centre crop, pixels; default: the crop's side "
        "x 256/224, or as for the checkpoint or the weights. Larger values crop more of the borders"
    )
    add("--val-resize-size", type=types.pixels, metavar="PX", help=text)
    text = (
        "side of the crop in evaluation, pixels; default: --image-size. Somewhat larger crops often"
        " score better (arXiv:1906.06423)"
    )
    add("--val-image-size", type=types.pixels, metavar="PX", help=text)

    text = f"data loading workers per node, shared by its processes; at most {MOST_WORKERS} here"
    workers = types.number(int, 0, MOST_WORKERS)
    add = parser.group("speed").add_argument
    add("-j", "--workers", type=workers, default=CORES, metavar="N", help=text)

"""Options of a run: its directory, snapshots, end, and evaluation. Without torch."""

from utils.start import option_types as types

SPOT_SERVICE = "http://169.254.169.254"  # EC2's, see `utils.run.spot`


def add_options(parser: types.Parser) -> None:
    """Add the options that `utils.run` and the loop read."""
    add = parser.group("training").add_argument
    text = (
        "read options from FILE, or from a recipe in utils/recipes by its name (fast16); options "
        "on the command line take precedence"
    )
    add("--recipe", metavar="NAME|FILE", help=text)

    add = parser.group("evaluation").add_argument
    text = "evaluate the model of --resume or --pretrained on DATA/val and exit"
    add("-e", "--evaluate", action="store_true", help=text)
    text = "with --evaluate, evaluate on DATA/test instead"
    add("--part", choices=("val", "test"), default="val", help=text)
    text = "best.pt has the highest validation top-1, or the lowest validation loss"
    add("--best-by", choices=("top1", "loss"), default="top1", help=text)

    add = parser.group("run").add_argument
    text = "name of the run directory; default: date, host, arch, sizes"
    add("--name", type=types.run_name, help=text)
    text = "parent of run directories"
    add("--output-dir", type=types.path, default="runs", metavar="DIR", help=text)
    text = (
        "resume from this snapshot, a file or URL; auto: from the snapshot of --name, here or in "
        "--store, if there is one. If you omit the value, put the option after DATA"
    )
    add("--resume", nargs="?", type=types.path, const="auto", metavar="FILE|URL|auto", help=text)
    text = "minutes between snapshots within an epoch; one is also taken after each epoch"
    add("--snapshot-minutes", type=types.non_negative, default=10.0, metavar="MIN", help=text)
    text = "stop after this many hours, with a snapshot"
    add("--train-time", type=types.non_negative, metavar="HOURS", help=text)
    text = "stop when this validation top-1 is reached; 0.75 and 75 mean the same"
    add("--target-top1", "--desired-acc", type=types.accuracy, metavar="A", help=text)
    text = "log the images of each step, for scripts/audit_run.py; compare the weights of all ranks"
    add("--audit", action="store_true", help=text)
    text = "steps between printed lines"
    add("-p", "--print-freq", type=types.positive, default=10, metavar="N", help=text)
    text = (
        "copy the best model and the last snapshot to URL/NAME/ in the background; s3://, gs://, "
        "az:// (with s3fs, gcsfs or adlfs installed) or a folder"
    )
    add("--store", type=types.path, metavar="URL|DIR", help=text)
    text = "also send curves, options and the first batch to Weights & Biases (pip install wandb)"
    add("--tracker", choices=("wandb",), help=text)
    url = SPOT_SERVICE
    text = f"stop with a snapshot when EC2 reclaims a node; URL of its metadata, if not {url}"
    add("--spot-notice", nargs="?", const=url, type=types.http, metavar="URL", help=text)

    text = "write a trace of steps 5 to 8 into the run directory (Chrome, Perfetto, TensorBoard)"
    parser.group("speed").add_argument("--profile", action="store_true", help=text)

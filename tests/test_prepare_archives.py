"""Tests of `scripts/prepare_data.py cifar10`.

They run real processes, on miniature archives that they make themselves.
"""

import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image
from preparing import fail, images, succeed, tar_bytes

CIFAR_NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
CIFAR_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]


def python2_pickle(pixels, labels):
    """A CIFAR-10 batch as cPickle of Python 2 wrote the published ones, protocol 2."""

    def text(data):
        return b"T" + struct.pack("<i", len(data)) + data

    numbers = b"".join(b"K" + bytes([n]) for n in labels)
    shape = b"".join(b"M" + struct.pack("<H", n) for n in pixels.shape)
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    kind = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN"
    kind += b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    array += b"(K\x01(" + shape + b"t" + kind + b"\x89" + text(pixels.tobytes()) + b"tb"
    items = text(b"labels") + b"(l" + b"a".join([b""]) + b"(" + numbers + b"e"
    return b"\x80\x02}(" + text(b"data") + array + items + b"u."


def python3_pickle(pixels, labels):
    return pickle.dumps({"data": pixels, "labels": list(labels)}, protocol=4)


def cifar_batches(dump):
    """The files of a miniature CIFAR-10, 10 images each, and their pixels, N x 3 x 32 x 32."""
    numbers = np.random.default_rng(0)
    pixels = {name: numbers.integers(0, 256, (10, 3072), dtype=np.uint8) for name in CIFAR_NAMES}
    files = {name: dump(array, range(10)) for name, array in pixels.items()}
    return files, {name: array.reshape(-1, 3, 32, 32) for name, array in pixels.items()}


def write_cifar(path, files):
    members = [(f"cifar-10-batches-py/{name}", data) for name, data in files.items()]
    path.write_bytes(tar_bytes(members, "w:gz"))
    return path


@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle])
def test_cifar10_archive_and_folder(tmp_path, dump):
    files, pixels = cifar_batches(dump)
    archive = write_cifar(tmp_path / "cifar-10-python.tar.gz", files)
    said = succeed("cifar10", tmp_path / "out", "--source", archive)
    assert "train 50 images in 10 classes, val 10 images in 10 classes" in said
    for split, names in (("train", CIFAR_NAMES[:5]), ("val", CIFAR_NAMES[5:])):
        for number, expected in enumerate(np.concatenate([pixels[name] for name in names])):
            label = CIFAR_CLASSES[number % 10]
            with Image.open(tmp_path / "out" / split / label / f"{number:05d}.png") as image:
                assert image.mode == "RGB"
                assert np.array_equal(np.asarray(image), expected.transpose(1, 2, 0))
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "extracted", filter="data")
    archive.unlink()
    for number, source in enumerate(("extracted", "extracted/cifar-10-batches-py")):
        succeed("cifar10", tmp_path / f"out{number}", "--source", tmp_path / source)
        assert images(tmp_path / f"out{number}") == images(tmp_path / "out")
    # Finished is finished, though the source is gone.
    assert "nothing to do" in succeed("cifar10", tmp_path / "out", "--source", archive)


class Attack:
    """Pickles as a call of a function with one argument."""

    def __init__(self, function, argument):
        self.call = function, (argument,)

    def __reduce__(self):
        return self.call


def test_hostile_and_damaged_cifar10_is_refused(tmp_path):
    files, _ = cifar_batches(python3_pickle)
    archive, out = tmp_path / "cifar.tar.gz", tmp_path / "out"
    trap = tmp_path / "trap"
    pixels = np.zeros((1, 3072), np.uint8)
    for damaged, message in (
        (pickle.dumps(Attack(os.system, f"touch {trap}")), "it names posix.system"),
        (pickle.dumps({"data": Attack(eval, f"open({str(trap)!r}, 'w')")}), "builtins.eval"),
        (pickle.dumps({"data": pixels}), "data_batch_3 in"),
        (python3_pickle(pixels, [10]), "one number from 0 to 9"),
        (python3_pickle(pixels, [1, 2]), "one number from 0 to 9"),
        (python3_pickle(pixels[:, :99], [1]), "rows of 3072 bytes"),
        (files["data_batch_3"][:500], "data_batch_3 in"),
        (b"", "data_batch_3 in"),
    ):
        write_cifar(archive, {**files, "data_batch_3": damaged})
        assert message in fail("cifar10", out, "--source", archive)
        assert not trap.exists() and not out.exists()
    write_cifar(archive, files)
    archive.write_bytes(archive.read_bytes()[:-5000])
    assert "is damaged" in fail("cifar10", out, "--source", archive)
    del files["data_batch_3"]
    assert "lacks data_batch_3" in fail("cifar10", out, "--source", write_cifar(archive, files))
    assert "neither cifar-10-python.tar.gz nor" in fail("cifar10", out, "--source", tmp_path)


def test_cifar10_download(tmp_path):
    stub = tmp_path / "stub" / "torchvision"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    (stub / "datasets.py").write_text("def CIFAR10(root, download):\n    raise OSError('no net')\n")
    surroundings = {**os.environ, "PYTHONPATH": str(stub.parent)}
    message = fail("cifar10", tmp_path / "out", env=surroundings)
    assert "cannot download CIFAR10 (no net); give --source" in message
    write_cifar(tmp_path / "archive", cifar_batches(python3_pickle)[0])
    (stub / "datasets.py").write_text(
        "import os, shutil\n"
        "def CIFAR10(root, download):\n"
        "    os.makedirs(root)\n"
        f"    shutil.copy({str(tmp_path / 'archive')!r}, root / 'cifar-10-python.tar.gz')\n"
    )
    assert "train 50 images" in succeed("cifar10", tmp_path / "out", env=surroundings)
    assert sorted(os.listdir(tmp_path / "out")) == [".prepared.json", "train", "val"]

"""Decoding a part of a JPEG file: the very pixels of decoding it whole, or nothing."""

import os
import random
import sys

import build_region_decode
import pytest
import torch
from batches import encode, fetch, noise_index, picture
from conftest import Result, python
from test_images import ODD

from utils.data import images as im
from utils.data import region_decode as part_of
from utils.data.images import ImageBatches
from utils.start.errors import UserError

KINDS = {
    "4:2:0": {"subsampling": "4:2:0"},
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "restart rows": {"restart_marker_rows": 1},
    "grey": {},
}


def of_kind(kind, width=173, height=131) -> bytes:
    image = picture(width, height)
    return encode(image.convert("L") if kind == "grey" else image, **KINDS[kind])


def damaged(number) -> bytes:
    """A file with other, missing or more bytes behind its frame header."""
    draw, kinds = random.Random(number), list(KINDS)
    data = bytearray(of_kind(kinds[number % len(kinds)], 60, 90))
    for _ in range(1 + number % 4):
        at = draw.randrange(len(data) // 3, len(data) - 60)
        # With 0xFF there are markers, or what looks like them, in wrong places.
        codes = (0xFF, draw.randrange(256)) if number % 2 else (draw.randrange(255),)
        some = bytes(draw.choice(codes) for _ in range(draw.randrange(1, 9)))
        data[at : at + draw.choice((0, len(some), 20))] = some
    return bytes(data)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library, built as the script does."""
    library = tmp_path_factory.mktemp("built") / part_of.LIBRARY.name
    headers = ("-include", "stdio.h", "-include", "jpeglib.h")
    try:
        build_region_decode.compile_source("-fsyntax-only", *headers, "-xc", os.devnull)
    except UserError:
        pytest.skip("needs a C compiler and libjpeg's header")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "cc -Wall -Wextra -Werror")
        build_region_decode.build(library)
    return library


@pytest.fixture
def not_built(tmp_path, monkeypatch):
    monkeypatch.setattr(part_of, "LIBRARY", tmp_path / part_of.LIBRARY.name)


@pytest.fixture
def built(library, monkeypatch):
    monkeypatch.setattr(part_of, "LIBRARY", library)


def decode_part(data, box):
    """The pixels of ``box``; None where that is left alone."""
    if part_of.shape_of(data) is None or (part := part_of.decode(data, box)) is None:
        return None
    pixels, (top, left, height, width) = part
    assert pixels.stride(0) == 1, "channels-last, as decode gives it"
    assert pixels.shape[1] == height, "no more rows than needed"
    return pixels[:, top : top + height, left : left + width]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(173, 131), (16, 300), (9, 9)])
def test_pixels_are_those_of_the_whole_image(built, kind, size, capfd):
    data, draw = of_kind(kind, *size), random.Random(0)
    whole = im.decode(data)
    for _ in range(60):
        box = top, left, height, width = im.random_box(draw, *whole.shape[1:], smallest=1e-4)
        expected = whole[:, top : top + height, left : left + width]
        assert torch.equal(decode_part(data, box), expected)
    assert capfd.readouterr().err == "", "no warning of bytes that are not needed"


def test_damaged_files_are_what_they_are_to_whole_decoding(built):
    decoded = 0
    for number in range(250):
        data = damaged(number)
        top, left = number % 3 * 25, number % 4 * 9
        if (part := decode_part(data, (top, left, 20, 25))) is not None:
            whole = im.decode(data)  # raises ValueError where nobody may decode it
            assert torch.equal(part, whole[:, top : top + 20, left : left + 25])
            decoded += 1
    assert 5 < decoded < 250, "some damage is seen, some makes another image of it"


def test_a_node_without_the_library_trains_on_the_same_pixels(library, tmp_path, monkeypatch):
    index, made = noise_index(tmp_path, 6, "jpg", 90, 70), []
    for path in (library, tmp_path / "none"):
        monkeypatch.setattr(part_of, "LIBRARY", path)
        batches = ImageBatches(index, 32, 0, train=True)
        assert bool(batches.regions) == (path == library)
        made.append(fetch(batches, range(6))[0])
    assert torch.equal(*made)


def test_other_files_are_decoded_whole():
    data = of_kind("4:2:0")
    at = data.index(b"\xff\xc0") + 5  # of the height, in the frame header
    others = {
        **{kind: ODD[kind] for kind in ("progressive", "cmyk", "png")},
        "no end": data[:-500],
        "no height": data[:at] + bytes(2) + data[at + 2 :],  # it follows behind the pixels
        "sparse colour": data[: at + 6] + b"\x14" + data[at + 7 :],  # of every fourth row
    }
    assert part_of.shape_of(data) == (131, 173)
    for kind, other in others.items():
        assert part_of.shape_of(other) is None, kind


# ---- the library


def test_it_is_built_where_training_finds_it_and_once(not_built, tmp_path, monkeypatch, capsys):
    (tmp_path / "libregion_decode_0.so").write_bytes(b"of an older source")
    part_of.LIBRARY.write_bytes(b"\x7fELF" + bytes(100))  # of another machine
    assert not part_of.has_library()
    assert part_of.decode_region(of_kind("4:2:0"), (0, 0, 9, 9)) is None
    assert build_region_decode.main(["--if-missing"]) == 0
    assert f"built {part_of.LIBRARY} (400 crops" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [part_of.LIBRARY.name]
    # As in another process, which has not loaded the one of another machine.
    monkeypatch.setattr(part_of, "LIBRARY", part_of.LIBRARY.rename(tmp_path / "built.so"))
    assert part_of.has_library()
    assert build_region_decode.main(["--if-missing"]) == 0
    assert capsys.readouterr() == ("", "")


def test_asking_whether_it_is_built_needs_no_torch(library):
    """Each start of a wrapper asks; torch's import takes seconds."""
    lines = (
        "import sys; from pathlib import Path; sys.modules['torch'] = None",
        "sys.path.insert(0, 'scripts'); import build_region_decode as script",
        f"script.region_decode.LIBRARY = Path({str(library)!r})",
        "sys.exit(script.main(['--if-missing']))",
    )
    assert python("-c", "; ".join(lines)) == Result(0, "", "")


def test_a_library_with_other_pixels_is_rejected(library, not_built, tmp_path, monkeypatch, capsys):
    """As of a libjpeg that upsamples colour in another way."""
    other, text = tmp_path / "other.c", part_of.SOURCE.read_text()
    other.write_text(text.replace("jpeg_start", "jpeg.do_fancy_upsampling = 0;\n    jpeg_start", 1))
    monkeypatch.setattr(part_of, "SOURCE", other)
    part_of.LIBRARY.write_bytes(library.read_bytes())
    assert build_region_decode.main([]) == 2
    assert "differ from torchvision's (colour 4:2:2)" in capsys.readouterr().err
    assert part_of.LIBRARY.read_bytes() == library.read_bytes(), "the good one stays"
    assert {path.name for path in tmp_path.iterdir()} == {part_of.LIBRARY.name, "other.c"}


def test_what_is_missing_is_reported(not_built, monkeypatch, capsys):
    monkeypatch.setenv("CC", f"{sys.executable} -c 1/0")
    assert build_region_decode.main([]) == 2
    assert "it needs libjpeg-turbo's header: apt install gcc" in capsys.readouterr().err
    monkeypatch.setenv("CC", "no-such-cc")
    assert build_region_decode.main(["--if-missing"]) == 0, "the set-up goes on without it"
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("note: ") and "no C compiler no-such-cc: apt install gcc" in note

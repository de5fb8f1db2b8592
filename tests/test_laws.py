"""Promises that are laws: they hold for any sizes, batches, processes, names and words.

hypothesis draws the examples, the same ones in each run.
"""

import io
import shlex
import string
import tarfile
import zlib
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ssh import hosts

from utils.data.opening import open_source
from utils.data.samplers import EvalSampler, TrainSampler, epoch_order
from utils.run import recipes
from utils.start.errors import UserError

law = settings(derandomize=True, max_examples=60, deadline=None, database=None)
SEED, EPOCH = 5, 2
few = st.integers(1, 6)


# ---- samples


def test_order_is_the_one_of_earlier_runs():
    """Golden: a change of NumPy or of the code would spoil the resuming of older runs."""
    order = epoch_order(1_281_167, seed=0, epoch=89)
    assert order.dtype == np.int64
    assert zlib.crc32(order.tobytes()) == 3755318792


def steps_of(images: int, batch: int, ranks: int, accum: int, first: int) -> list[list[list[int]]]:
    """The images of each step, from ``first`` on: a list for each part of its global batch."""
    mine = []
    for rank in range(ranks):
        sampler = TrainSampler(images, batch, (rank, ranks), accum, SEED)
        sampler.start_at(EPOCH, first)
        mine.append([part.indices.tolist() for part in sampler])
        assert len(sampler) == len(mine[-1])
        assert [part.indices.tolist() for part in sampler] == mine[-1], "again"
        assert {(part.epoch, part.size) for part in sampler} <= {(EPOCH, 0)}
        assert max(map(len, mine[-1]), default=0) <= sampler.largest <= batch
    parts = [part for micro in zip(*mine, strict=True) for part in micro]
    return [parts[k : k + ranks * accum] for k in range(0, len(parts), ranks * accum)]


@law
@given(st.integers(1, 300), st.integers(1, 40), few, few, st.floats(0, 1))
def test_a_step_is_the_next_part_of_the_order_on_any_number_of_processes(
    images, batch, ranks, accum, done
):
    size = min(images, batch * ranks * accum)
    first = int(done * (images // size))  # a resumed epoch begins there
    order = epoch_order(images, SEED, EPOCH).tolist()
    expected = [order[k * size : (k + 1) * size] for k in range(first, images // size)]
    steps = steps_of(images, batch, ranks, accum, first)
    assert [[*chain(*step)] for step in steps] == expected
    for step in steps:
        assert max(map(len, step)) - min(map(len, step)) <= 1, "parts are equal, or differ by one"


@law
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9))
def test_evaluation_takes_each_image_once_in_the_same_batches(images, batch, ranks):
    samplers = [EvalSampler(images, batch, (rank, ranks)) for rank in range(ranks)]
    dealt = [[part.indices.tolist() for part in sampler] for sampler in samplers]
    expected = [[*range(images)[k : k + batch]] for k in range(0, images, batch)]
    assert sorted(chain(*dealt)) == expected
    assert [len(sampler) for sampler in samplers] == [len(part) for part in dealt]
    assert {sampler.rounds for sampler in samplers} == {max(map(len, dealt))}
    assert {sampler.largest for sampler in samplers} == {min(images, batch)}


# ---- tar files

# Any name that a file can have, but for "/" and NUL; hidden files are no images.
stems = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=70)
stems = stems.filter(lambda name: not name.startswith(".") and name.strip() == name)
contents = st.dictionaries(
    stems.map(lambda stem: f"{stem}.jpg").filter(lambda name: len(name.encode()) < 250),
    st.binary(min_size=1, max_size=600),
    min_size=1,
    max_size=4,
)


@law
@given(contents, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_a_tar_file_of_a_class_holds_what_was_put_into_it(files, kind):
    with TemporaryDirectory() as place:
        root = Path(place, "train")
        root.mkdir()
        with tarfile.open(root / "a.tar", "w", format=kind) as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        source = open_source(root, ["a"])
        assert [source.read(image) for image in range(len(source))] == [
            files[name] for name in sorted(files, key=lambda name: name.encode())
        ]


# ---- hosts, recipes

names = st.text(string.ascii_lowercase + string.digits + ".", min_size=1, max_size=12)
nodes = st.lists(
    st.tuples(names, st.none() | st.integers(1, 99)),
    min_size=1,
    max_size=5,
    unique_by=lambda node: node[0],
)


@law
@given(nodes, st.sampled_from(["", "\ufeff"]), st.sampled_from(["\n", "\r\n", "\n\n # x\n"]))
def test_a_hosts_file_is_read_as_it_was_written(written, mark, end):
    lines = [name + (f"  slots={n}" if n else "") for name, n in written]
    with TemporaryDirectory() as place:
        file = Path(place, "hosts")
        file.write_bytes((mark + end.join(lines) + end).encode())
        assert [(host.address, host.slots) for host in hosts.read(file)] == written


@law
@given(st.text(max_size=60))
def test_any_hosts_file_is_read_or_is_an_error_line(text):
    with TemporaryDirectory() as place:
        file = Path(place, "hosts")
        file.write_text(text)
        try:
            assert hosts.read(file)
        except UserError as error:
            assert str(file) in str(error)


@law
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))))
def test_a_recipe_is_the_words_that_were_written(words):
    with TemporaryDirectory() as place:
        file = Path(place, "recipe.txt")
        file.write_text(f"# why\n{shlex.join(words)}\n", encoding="utf-8", newline="")
        assert recipes.read(str(file)) == words

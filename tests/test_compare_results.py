"""The section that scripts/compare_runs.py --results writes."""

import re

import pytest
from compare import table as tables
from conftest import python
from event_files import SCRIPT, epochs_of, folder_name, table, write

from utils.errors import UserError


def update(root, title):
    """Write the section on the runs in ``root``/runs into ``root``/R.md; whether it changed."""
    _, _, both = table(root / "runs")
    picture = root / "o" / "top1_val.png"
    section = both.section(root / "R.md", title, "compare `it`", [picture])
    return tables.put(root / "R.md", "compare_runs", title, section)


@pytest.fixture
def root(tmp_path):
    """A folder with two runs of 2020."""
    for gpus in (1, 2):
        write(tmp_path / "runs" / folder_name(gpus, 64), epochs_of(90 * gpus, 64 * gpus))
    return tmp_path


def test_option(root):
    arguments = (root / "runs", "--out", root / "o", "--results", root / "R.md")
    assert "R.md: written" in python(SCRIPT, *arguments, "--title", "One & two").out
    section = (root / "R.md").read_text()
    assert "## One &amp; two\n" in section
    assert "python scripts/compare_runs.py" in section
    assert re.search(r"\| scaling efficiency \| 100 % \| 100 % \|", section)
    assert section.count("| 2020-08-09 |") == 2
    assert section.count("not recorded") >= 4, "commit and machine of old runs"
    links = re.findall(r"!\[.*?\]\((.*?)\)", section)
    assert len(links) == 2
    assert all((root / link).is_file() for link in links)
    assert "R.md: unchanged" in python(SCRIPT, *arguments, "--title", "One & two").out


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_nothing_else_is_touched(root, newline):
    before = newline.join(["# Results", "", "By hand | <b>.  "])
    after = newline.join(["", "<!-- compare_runs begin x -->", "More by hand.  ", ""])
    file = root / "R.md"
    file.write_bytes(before.encode())
    assert update(root, "One")
    file.write_bytes(file.read_bytes() + after.encode())
    first = file.read_bytes().decode()
    assert (first.startswith(before), first.endswith(after)) == (True, True)
    assert "\n" not in first.replace(newline, ""), "lines end as they do in the file"
    # Again: nothing changes. With another run: only the section does. Another title: one more.
    assert not update(root, "One")
    assert file.read_bytes().decode() == first
    write(root / "runs" / folder_name(4, 64), epochs_of(300, 256))
    assert update(root, "One")
    second = file.read_bytes().decode()
    assert (second.startswith(before), second.endswith(after)) == (True, True)
    assert second.count("83 %") == 1 + first.count("83 %")
    assert update(root, "Other")
    assert file.read_bytes().decode().startswith(second)


@pytest.mark.parametrize("harm", ["end is gone", "twice", "wrong order"])
def test_broken_markers_are_left_alone(root, harm):
    update(root, "x")
    file = root / "R.md"
    text = file.read_text()
    end = "<!-- compare_runs end x -->"
    text = {
        "end is gone": text.replace(end, ""),
        "twice": 2 * text,
        "wrong order": end + text.replace(end, ""),
    }[harm]
    file.write_text(text)
    with pytest.raises(UserError, match="correct it by hand"):
        update(root, "x")
    assert file.read_text() == text

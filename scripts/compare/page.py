"""The comparison as one HTML file: table, notes and pictures, on light and dark screens and phones.

It is self-contained: the pictures are embedded, and there is no script.
"""

import re
from html import escape

from compare.comparison import NONE, Comparison
from compare.drawing import COLOURS, GRID, INK, PAPER
from compare.pictures import Picture
from compare.results import origin
from compare.table import shown

# What the pictures' colours become on a dark screen; those not listed stay.
DARK = {
    "#2c66b0": "#7db0f5", "#8c1c28": "#ff7f85", "#15182c": "#f4f5f7", "#b44c90": "#df84c0",
}  # fmt: skip
STYLE = """
:root { color-scheme: light dark; --paper: #fefefe; --ink: #1a1c1e; --faint: #5c6166;
  --grid: #dcdddf; --card: #f5f6f7; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e7e9; --faint: #a3a8ae;
  --grid: #3a3e44; --card: #1f2226; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 16px/1.45 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th:first-child, .origins td { text-align: left; }
th:first-child { position: sticky; left: 0; background: var(--paper); font-weight: 500;
  white-space: normal; min-width: 8rem; max-width: 12rem; overflow-wrap: anywhere; }
.origins td { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
thead th { font-weight: 700; vertical-align: bottom; white-space: normal; min-width: 5rem;
  overflow-wrap: anywhere; }
tr.key td { font-weight: 700; } .none { color: var(--faint); }
.notes li { margin: .25rem 0; overflow-wrap: anywhere; }
.warning { border-left: 4px solid #d9822b; padding-left: .6rem; list-style: none; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%,
  30rem), 1fr)); }
figure { margin: 0; padding: .6rem; background: var(--card); border-radius: 8px; }
figure.large { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, "DejaVu Sans", sans-serif !important; }
input[name=x] { position: absolute; opacity: 0; }
label { display: inline-block; padding: .35rem .9rem; border: 1px solid var(--faint);
  border-radius: 6px; cursor: pointer; margin: 0 .3rem 1rem 0; }
#epochs:checked ~ [for=epochs], #hours:checked ~ [for=hours] { background: var(--ink);
  color: var(--paper); }
input:focus-visible + input + label, input:focus-visible + label { outline: 2px solid #3b82f6; }
#epochs:checked ~ .pictures .hours, #hours:checked ~ .pictures .epochs { display: none; }
pre { overflow-x: auto; background: var(--card); padding: .7rem; border-radius: 8px; }
"""
KEY_ROWS = ("images_per_s", "speed_up", "scaling_efficiency", "best_top1")


def build(both: Comparison, pictures: list[Picture], title: str, command: str) -> str:
    """The page as text."""
    names = {picture.name for picture in pictures}
    light = " ".join(f"--c{i}: {colour};" for i, colour in enumerate(COLOURS))
    dark = " ".join(f"--c{i}: {DARK.get(colour, colour)};" for i, colour in enumerate(COLOURS))
    style = STYLE.replace("LIGHT", light).replace("DARK", dark)
    toggles = ""
    if any(name.endswith("_hours") for name in names):
        toggles = (
            '<input type="radio" name="x" id="epochs" checked><input type="radio" name="x" '
            'id="hours"><label for="epochs">by epochs</label><label for="hours">by hours</label>'
        )
    figures = "\n".join(_figure(picture, names) for picture in pictures)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<div class="wide">{_table(both)}</div>
{_notes(both)}
<h2>Pictures</h2>
{toggles}
<div class="pictures">
{figures}
</div>
<h2>How each run was made</h2>
<div class="wide">{_origins(both)}</div>
<p>This page was made by</p>
<pre>{escape(command)}</pre>
</body>
</html>
"""


def _table(both: Comparison) -> str:
    head = "".join(f"<th>{escape(run.label)}</th>" for run in both.runs)
    lines = [f"<table><thead><tr><th></th>{head}</tr></thead><tbody>"]
    for row in shown(both):
        kind = ' class="key"' if row.key in KEY_ROWS else ""
        faint = {NONE: ' class="none"'}
        cells = "".join(f"<td{faint.get(cell, '')}>{escape(cell)}</td>" for cell in row.cells)
        lines.append(f"<tr{kind}><th>{escape(row.title.strip())}</th>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _notes(both: Comparison) -> str:
    if not both.notes:
        return ""
    warning = ' class="warning"'
    items = [
        f"<li{warning if note.startswith('NOT COMPARABLE') else ''}>{escape(note)}</li>"
        for note in both.notes
    ]
    return '<ul class="notes">\n' + "\n".join(items) + "\n</ul>"


def _figure(picture: Picture, names: set[str]) -> str:
    kind = "large" if picture.name in ("overlay", "IO", "gpu") else ""
    if picture.name.endswith("_hours"):
        kind += " hours"
    elif f"{picture.name}_hours" in names:
        kind += " epochs"
    return f'<figure class="{kind.strip()}" id="{picture.name}">{_inline(picture)}</figure>'


def _inline(picture: Picture) -> str:
    """The picture as part of the page: with ids of its own and the page's colours."""
    svg = picture.svg[picture.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    # Ids (of marks, of clipping paths) are unique in a picture, not in a page of many.
    for pattern in (r'(\bid=")', r'(href="#)', r"(url\(#)"):
        svg = re.sub(pattern, rf"\g<1>{picture.name}-", svg)
    colours = {INK: "var(--ink)", GRID: "var(--grid)", PAPER: "var(--card)"}
    colours |= {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}
    for colour, variable in colours.items():
        svg = svg.replace(colour, variable)
    title = f'<svg role="img" aria-label="{escape(picture.title)}"'
    return svg.replace("<svg", title, 1)


def _origins(both: Comparison) -> str:
    lines = ["<table class='origins'><thead><tr><th>run</th>"]
    lines += [f"<th>{escape(key)}</th>" for key in [*origin(both.runs[0]), "command"]]
    lines.append("</tr></thead><tbody>")
    for run in both.runs:
        cells = [*origin(run).values(), str(run.known("command") or "not recorded")]
        texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{escape(run.label)}</th>{texts}</tr>")
    return "\n".join([*lines, "</tbody></table>"])

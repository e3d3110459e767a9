"""Findings about a data set as one HTML file that needs nothing else: pictures are in it."""

from __future__ import annotations

import base64
import io
from typing import Any

import jinja2
from PIL import Image

from planaria.data.inspect import SPREAD, Findings, quantiles
from planaria.data.sample import Pixels, Sample

SIDE = 160
"""Pixels along the longer side of a thumbnail."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ found.path }}</title>
<style>
:root { --paper: #fff; --ink: #1b1f24; --quiet: #57606a; --rule: #d0d7de; --card: #f6f8fa; --fault: #b3261e;
  --good: #1a7f37; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --quiet: #9aa4af; --rule: #30363d;
  --card: #161b22; --fault: #ff7b72; --good: #56d364; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .4rem; border-top: 1px solid var(--rule); }
.quiet, th { color: var(--quiet); font-weight: 400; }
.verdict { font-weight: 600; color: var(--good); }
.verdict.bad, .count { color: var(--fault); }
.headline { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; }
.headline div { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .4rem .8rem; }
.headline dt { font-size: .85rem; color: var(--quiet); }
.headline dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.scroll { overflow-x: auto; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .8rem; padding: 0; }
.samples > li { list-style: none; background: var(--card); border: 1px solid var(--rule); border-radius: .5rem;
  padding: .6rem; font-size: .9rem; }
.pictures { display: flex; flex-wrap: wrap; gap: .3rem; margin-bottom: .4rem; }
.pictures img { max-width: 100%; border: 1px solid var(--rule); background: #fff; }
.text { max-height: 14rem; overflow-y: auto; }
.text p { margin: .2rem 0; white-space: pre-wrap; }
.answer { border-left: 3px solid var(--good); padding-left: .5rem; }
.key { font-size: .8rem; color: var(--quiet); margin: .4rem 0 0; }
</style>
<h1>{{ found.path }}</h1>
<p class="verdict {{ '' if usable else 'bad' }}">{{ verdict }}</p>
<dl class="headline">
{% for name, value in headline %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% if found.errors or found.skipped %}
<h2>Problems</h2>
<div class="scroll"><table>
<tr><th class="right">how often</th><th>what</th><th>where (first)</th></tr>
{% for problem in found.errors %}
<tr><td class="right count">file</td><td>{{ problem.what }}</td><td>{{ problem.where }}</td></tr>
{% endfor %}
{% for problem in found.skipped %}
<tr><td class="right count">{{ "{:,}".format(problem.count) }}</td><td>{{ problem.what }}</td>
<td>{{ problem.where }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
{% if found.columns %}
<h2>Columns</h2>
<div class="scroll"><table>
<tr><th>name</th><th>holds</th><th>used as</th></tr>
{% for name, kind, role in found.columns %}
<tr><td>{{ name }}</td><td>{{ kind }}</td><td>{{ role or "not used" }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
{% if spreads %}
<h2>Sizes</h2>
<div class="scroll"><table>
<tr><th></th>{% for head in heads %}<th class="right">{{ head }}</th>{% endfor %}</tr>
{% for name, values in spreads %}
<tr><td>{{ name }}</td>{% for value in values %}<td class="right">{{ "{:,}".format(value) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}
{% if samples %}
<h2>Samples</h2>
<ul class="samples">
{% for sample in samples %}
<li>
{% if sample.pictures %}<div class="pictures">
{% for picture in sample.pictures %}<img src="{{ picture.data }}" width="{{ picture.width }}"
 height="{{ picture.height }}" alt="picture {{ loop.index }} of sample {{ sample.key }}" title="{{ picture.size }}">
{% endfor %}</div>{% endif %}
<div class="text" tabindex="0">
{% for question, answer in sample.turns %}<p class="quiet">{{ question }}</p><p class="answer">{{ answer }}</p>
{% endfor %}</div>
<p class="key">{{ sample.key }}{% if sample.pictures %}, {{ sample.sizes }}{% endif %}</p>
</li>
{% endfor %}
</ul>
{% endif %}
{% if found.files %}
<h2>Files</h2>
<div class="scroll"><table>
<tr><th>path</th><th class="right">bytes</th><th class="right">samples</th></tr>
{% for file, samples in found.files[:most] %}
<tr><td>{{ file.path }}</td><td class="right">{{ "{:,}".format(file.size) }}</td>
<td class="right">{{ "{:,}".format(samples) }}</td></tr>
{% endfor %}
</table></div>
{% if found.files|length > most %}<p class="quiet">and {{ found.files|length - most }} more</p>{% endif %}
{% endif %}
</html>
"""
_MOST_FILES = 200
HEADS = tuple({0.0: "least", 0.5: "median", 1.0: "most"}.get(share, f"{share:.0%}") for share in SPREAD)
"""Headings over :func:`planaria.data.inspect.quantiles`."""


def page(found: Findings, headline: list[tuple[str, str]], verdict: str, usable: bool) -> str:
    """The page as HTML text.

    Args:
        found: what it shows.
        headline: names and values of the first figures.
        verdict: one sentence.
        usable: whether that is good news.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_PAGE).render(
        found=found,
        headline=headline,
        verdict=verdict,
        usable=usable,
        heads=HEADS,
        spreads=[(name, quantiles(values)) for name, values in found.spreads.items()],
        samples=[_shown(sample) for sample in found.first],
        most=_MOST_FILES,
    )


def _shown(sample: Sample) -> dict[str, Any]:
    pictures = [_thumbnail(image) for image in sample.images]
    return {
        "key": sample.key,
        "pictures": pictures,
        "sizes": ", ".join(picture["size"] for picture in pictures),
        "turns": [("[picture]".join(turn.prompt).strip(), turn.answer) for turn in sample.conversation],
    }


def _thumbnail(image: Pixels) -> dict[str, Any]:
    height, width = image.shape[:2]
    picture = Image.fromarray(image)
    picture.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    picture.save(out, "WEBP", quality=85)
    # A tiny picture is shown larger, by whole factors.
    factor = max(1, SIDE // 2 // max(picture.size))
    return {
        "data": f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}",
        "width": picture.width * factor,
        "height": picture.height * factor,
        "size": f"{width} x {height}",
    }

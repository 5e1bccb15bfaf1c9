"""Hooks of the documentation site (mkdocs.yml): files of the repository outside docs/ become pages, too.

Links in the Markdown files are those that a reader of the repository follows, as `../benchmarks/peers`.
What they lead to is added to the site, with all that it links to in turn; a link to nothing fails the build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOMES = {"README.md": "index.md", "README.zh.md": "zh/index.md"}
ROOTS = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)((?:#[^)\s]*)?\))")
CHINESE_BREAK = re.compile(r"(?<=[\u3001-\u9fff\uff00-\uffef])\n {0,2}(?=[\u3001-\u9fff\uff00-\uffef])")
FENCE = re.compile(r"(^(`{3,}).*?^\2$)", re.MULTILINE | re.DOTALL)
CODE = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml"}

sources: dict[str, str] = {}
"""The file or folder of the repository that a page is made from, by the page's path in the site."""


def place(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if path in HOMES:
        return HOMES[path]
    file, uri = PurePosixPath(path), path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{uri}/README.md" if (ROOT / path / "README.md").exists() else f"{uri}/index.md"
    if file.suffix == ".ipynb":
        return str(PurePosixPath(uri).with_suffix(".md"))
    return uri + ".md" * (file.suffix in CODE)


def content(path: str) -> str | bytes:
    """What the site shows for it: Markdown, or the file itself."""
    file = ROOT / path
    if file.is_dir() and (file / "README.md").exists():
        file /= "README.md"
    if file.is_dir():
        entries = sorted(
            entry for entry in file.iterdir() if entry.suffix == ".md" or not path.startswith("docs")
        )
        return f"# {file.name}\n\n" + "".join(f"- [{title(entry)}]({entry.name})\n" for entry in entries)
    if file.suffix == ".ipynb":
        return "\n\n".join(cells(json.loads(file.read_text(encoding="utf-8"))))
    if file.suffix in CODE:
        return f"# {path}\n\n````{CODE[file.suffix]}\n{file.read_text(encoding='utf-8')}````\n"
    return file.read_text(encoding="utf-8") if file.suffix == ".md" else file.read_bytes()


def cells(notebook: dict[str, Any]) -> Iterator[str]:
    """The text and code of a notebook, formulas as code; `make labs` writes pages with outputs."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield (
            re.sub(r"\$([^$\n]+)\$", r"`\1`", text)
            if cell["cell_type"] == "markdown"
            else f"```python\n{text}\n```"
        )


def title(file: Path) -> str:
    """The heading of a page, the name of another file."""
    first = file.read_text(encoding="utf-8").split("\n", 1)[0] if file.suffix == ".md" else ""
    return first.removeprefix("# ") if first.startswith("# ") else file.name


def links(text: str, change: Callable[[str], str]) -> str:
    """The text with every relative link outside code changed."""
    pieces = FENCE.split(text)
    for number in range(0, len(pieces), 3):
        pieces[number] = LINK.sub(lambda match: match[1] + change(match[2]) + match[3], pieces[number])
    del pieces[2::3]  # the fences' own marks
    return "".join(pieces)


def linked(text: str) -> list[str]:
    """What `links` would change."""
    found: list[str] = []
    links(text, lambda link: found.append(link) or link)  # type: ignore[func-returns-value]
    return found


def target(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    source = sources[page]
    folder = source if (ROOT / source).is_dir() else dirname(source)
    path = normpath(f"./{folder}/{link}" if folder else link)
    if path.startswith("..") or not (ROOT / path).exists():
        raise PluginError(f"{source}: a link leads to {link}, and there is no {path}")
    return path


def on_config(config: Any) -> Any:
    """Leave out what is not there yet (labs), and list the pages that mkdocs.yml does not name."""
    config.nav = [entry for entry in config.nav if (ROOT / "labs").is_dir() or "Labs" not in entry]
    named = set(re.findall(r"[\w/.-]+\.md", json.dumps(config.nav)))
    rest = [file.name for file in sorted((ROOT / "docs").glob("*.md")) if file.name not in named]
    guides = next(entry["Guides"] for entry in config.nav if "Guides" in entry)
    guides += [{"More": rest}] if rest else []
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add everything that pages link to."""
    sources.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    new = [*HOMES, *ROOTS, "docs/decisions", "docs/extend", *(["labs"] if (ROOT / "labs").is_dir() else [])]
    texts = [
        (uri, (ROOT / source).read_text(encoding="utf-8"))
        for uri, source in sources.items()
        if uri.endswith(".md")
    ]
    while new or texts:
        for path in dict.fromkeys(new):
            uri = place(path)
            if uri in sources:
                continue
            made = content(path)
            sources[uri] = path
            files.append(File.generated(config, uri, content=made))
            if isinstance(made, str):
                texts.append((uri, made))
        new = [target(uri, link) for uri, text in texts for link in linked(text)]
        texts = []
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links between files become links between pages; a line break between Chinese characters is no space."""
    here = page.file.src_uri
    markdown = CHINESE_BREAK.sub("", markdown)
    return links(markdown, lambda link: relpath(place(target(here, link)), dirname(here) or "."))

"""Pages for the files outside docs/ that pages link to.

A link such as `../src/weft/errors.py` leads to the file in a clone. In the site, which has only
what is in docs/, it leads to a page that shows the file, below `source/`. MkDocs calls the
functions without an underscore; mkdocs.yml names this file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

#: the end of a link to something outside the folder, up to where its target ends
_LINK = re.compile(r"\]\((\.\.?/[^)#\s]+)")
_LANGUAGES = {".py": "python", ".md": "markdown", ".sh": "sh", ".toml": "toml", ".yml": "yaml"}
_PICTURES = (".svg", ".png")


def on_files(files: Any, *, config: Any) -> None:
    """Add a page, or a picture, for each file that is linked to."""
    found = {
        _outside(page.src_uri, target, config)
        for page in files.documentation_pages()
        for target in _LINK.findall(page.content_string)
    }
    for path in sorted(found - {None}):
        source = Path(config.docs_dir).parent / path
        if source.suffix in _PICTURES:
            files.append(File.generated(config, _place(path), abs_src_path=str(source)))
        else:
            files.append(File.generated(config, _place(path), content=_shown(path, source)))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Have links to such files lead to their pages."""

    def moved(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match[1], config)
        if path is None:
            return match[0]
        folder = posixpath.dirname(page.file.src_uri) or "."
        return "](" + posixpath.relpath(_place(path), folder)

    return markdown if page.file.src_uri.startswith("source/") else _LINK.sub(moved, markdown)


def _outside(page: str, target: str, config: Any) -> str | None:
    """A link's target, seen from the root of the repository; None for one in docs/, or nowhere."""
    root, folder = Path(config.docs_dir).parent, Path(config.docs_dir).name
    path = posixpath.normpath(posixpath.join(folder, posixpath.dirname(page), target))
    inside = path == folder or path.startswith((f"{folder}/", ".."))
    return None if inside or not (root / path).exists() else path


def _place(path: str) -> str:
    """Where the site has a file."""
    return f"source/{path}" if path.endswith(_PICTURES) else f"source/{path}.md"


def _shown(path: str, source: Path) -> str:
    """A page with a file's text, or with the names of a folder's files."""
    if source.is_dir():
        text, language = "\n".join(sorted(one.name for one in source.iterdir())), "text"
    else:
        text, language = source.read_text(), _LANGUAGES.get(source.suffix, "text")
    fence = "`" * 6  # a file may have fences of its own
    return (
        f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n# {path}\n\n"
        f"{fence}{language}\n{text}\n{fence}\n"
    )

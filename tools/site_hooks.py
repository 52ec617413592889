"""Hooks of mkdocs, which make a site of files that lie all over the repository.

Pages are the documents at the root, in docs/ and of the lessons, and whatever Markdown these link
to. Python files that they link to become pages too, folders become lists, and other files are
copied. So every link works without a network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
INTERNALS = ("rooms", "scheduling", "cache", "step", "models", "kernels", "server")
"""Pages of docs/internals, in reading order."""
PROJECT = ("WRITEUP.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
USE = (
    "deploy", "operations", "api", "models", "adapters", "quantization", "speculation", "kv-cache",
    "structured-output", "tools-and-reasoning", "agents", "parallel",
)  # fmt: skip
"""Documents that come first among those for users, in this order."""
INSIDE = ("adding-a-model", "adding-a-sampling-parameter", "design-decisions", "roofline")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    lessons = sorted(path.parent.name for path in ROOT.glob("lessons/[0-9][0-9]_*/README.md"))
    numbered = [{f"{int(name[:2])} {_title(f'lessons/{name}/README.md')}":
                 f"lessons/{name}/README.md"} for name in lessons]  # fmt: skip
    docs = sorted(path.stem for path in ROOT.glob("docs/*.md"))
    inside = [name for name in INSIDE if name in docs]
    internals = [f"internals/{name}" for name in INTERNALS]
    use = [name for name in USE if name in docs]
    use += [name for name in docs if name not in (*use, *inside, "performance", "start")]
    first = (ROOT / "docs" / "performance.md").read_text("utf-8")
    figures = list(dict.fromkeys(re.findall(r"\((performance/[^)#]+)", first)))
    config.nav = [
        {"Quire": "README.md"},
        {_title("docs/start.md"): "docs/start.md"},
        {"Lessons": ["lessons/README.md", *numbered]},
        {"Use": [f"docs/{name}.md" for name in use]},
        {"Inside": [f"docs/{name}.md" for name in (*internals, *inside)]},
        {"Figures": ["docs/performance.md", *(f"docs/{name}" for name in figures)]},
        {"Project": [name for name in PROJECT if (ROOT / name).exists()]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by those of the whole repository that belong to the site."""
    docs = str(Path(config.docs_dir))
    kept = Files([file for file in files if file.src_dir != docs])
    found: dict[str, File] = {}
    pages = [ROOT / name for name in ("README.md", *PROJECT) if (ROOT / name).exists()]
    pages += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("lessons/**/README.md")]
    waiting = sorted(set(pages))
    while waiting:
        path = waiting.pop()
        name = _name(path)
        if name in found:
            continue
        if path.is_dir():
            found[name] = File.generated(config, name, content=_listing(path))
            waiting += _shown(path)
        elif path.suffix == ".py":
            code = path.read_text("utf-8")
            title = path.relative_to(ROOT)
            found[name] = File.generated(
                config, name, content=f"# {title}\n\n````python\n{code}````\n"
            )
        else:
            found[name] = File.generated(config, name, abs_src_path=str(path))
        if path.suffix == ".md":
            waiting += [target for target in _targets(path) if target.exists()]
    for name in sorted(found):
        kept.append(found[name])
    return kept


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at what stands for their files on the site, and shows a lesson's script."""
    here = ROOT / page.file.src_uri
    if here.name == "README.md" and (here.parent / "lesson.py").exists():
        markdown += "\n## The script\n\n````python\n"
        markdown += (here.parent / "lesson.py").read_text("utf-8") + "````\n"

    def moved(link: re.Match[str]) -> str:
        target = (here.parent / link[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]
        return os.path.relpath(ROOT / _name(target), here.parent) + (link[2] or "")

    return LINK.sub(moved, markdown)


def _title(name: str) -> str:
    return (ROOT / name).read_text("utf-8").partition("\n")[0].lstrip("# ")


def _name(path: Path) -> str:
    """Returns the path on the site of what stands for a file or folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{name}/README.md"
    return f"{name}.md" if path.suffix == ".py" else name


def _shown(folder: Path) -> list[Path]:
    hidden = ("__pycache__", "__init__.py")
    return [p for p in sorted(folder.iterdir()) if p.name not in hidden and p.name[0] != "."]


def _listing(folder: Path) -> str:
    lines = [f"- [{path.name}]({path.name})" for path in _shown(folder)]
    return f"# {folder.relative_to(ROOT)}\n\n" + "\n".join(lines) + "\n"


def _targets(path: Path) -> list[Path]:
    """Returns the files and folders of the repository that a page links to."""
    links = LINK.finditer(path.read_text("utf-8"))
    targets = [(path.parent / link[1]).resolve() for link in links]
    return [target for target in targets if target.is_relative_to(ROOT)]

"""Every Python example of README and docs runs, and shows what it says."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line number, language and text of every fenced block."""
    found, language, lines = [], None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines, start = line[3:].strip(), [], number
        else:
            found.append((start, language, "\n".join(lines) + "\n"))
            language = None
    assert language is None, f"{page.name}: a block is not closed"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, language, text in blocks(page):
        if language != "python":
            continue
        if ">>>" not in text:
            exec(compile("\n" * line + text, str(page), "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), line)
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        out: list[str] = []
        runner.run(test, out=out.append, clear_globs=False)
        names.update(test.globs)
        assert runner.failures == 0, "".join(out)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    import re

    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

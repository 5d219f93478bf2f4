"""Check the language of README, pages, docstrings, help texts and messages; part of `make lint`.

    python .ci/words.py             # findings, and exit code 1 if there are any
    python .ci/words.py --table     # words and long sentences of every page as well
    python .ci/words.py --long      # the long sentences themselves

Four rules, explained in CONTRIBUTING.md under "Style of the documentation":

1. words that the project has a better one for do not occur (`BANNED`);
2. less than 3 % of the sentences of each kind of text have more than 30 words;
3. a teaching page (tutorial, how-to, explanation) has at most 1200 words, code aside;
4. code on a page has at most 88 columns, and no line of prose begins with a percent sign, which
   MyST takes for a comment.

It needs nothing but the standard library.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = 30
"""Words beyond which a sentence is long."""
LONG_SHARE = 0.03
PAGE_WORDS = 1200
CODE_COLUMNS = 88
TEACHING = ("docs/tutorials", "docs/howto", "docs/explanation")

# a full stop, and then a capital, a number, or a word in quotes or backticks
SENTENCE_END = re.compile(r"""(?<=[.!?])["')\]*]*\s+(?=["'(\[*]*[A-Z0-9]|["`])""")

# a pattern, and what to write instead. Word boundaries are added; case does not matter.
BANNED = {
    r"laws?(?! of large numbers)": "head distribution, or property",
    r"(several|two|three|inner|earlier|last) looks": "hops",
    r"siblings?": "samples of one group",
    r"left-out": "leave-one-out, or held-out",
    r"columns of y": "outputs",
    r"rivals?": "baselines",
    r"per cent right|% right": "accuracy",
    r"no settings": "default settings",
    r"gaps? in the (data|table|column)": "missing values",
    r"rooms? of (torch|triton|keyhole)|houses": "module, subpackage",
    r"dear(er|est)?": "expensive",
    r"beyond doubt": "by more than two standard errors",
    r"columns of the sample itself": "sample-level features",
    # a private language: each of these was once on a page
    r"shrugs? at|certified, not hoped|to please it|learned by heart": "plain words",
    r"(does|do|did) the same as it says|do what they say": "plain words",
    r"wild (label|one)s?|labels? (is|are) wild": "outlier",
    r"has one say|have a say": "counts once",
    r"hardly speaks? of|flatters?": "plain words",
    r"(more|less) at home with": "probability",
    r"in the place of": "instead of",
    r"is dear|speaks? for itself": "plain words",
    r"no longer|formerly|used to be": "history belongs into CHANGELOG.md",
    r"simply|obviously|of course|just works": "leave it out",
}
# ordinary uses of a banned word
ALLOWED = (
    r"law of large numbers",
    r"power law",
    r"Moore's law",
    # files, options and methods of benchmarks that are called so
    r"law of the query-key matrix",
)


@dataclass(frozen=True)
class Text:
    """A piece of prose: where it is, its kind, and its sentences."""

    place: str
    kind: str
    prose: str

    def sentences(self) -> list[str]:
        """Sentences of all paragraphs and list items."""
        found = []
        for paragraph in self.prose.split("\n\n"):
            joined = " ".join(paragraph.split())
            for sentence in SENTENCE_END.split(joined):
                if len(words(sentence)) > 2:
                    found.append(sentence)
        return found


def words(text: str) -> list[str]:
    """Words and numbers of a text; formulas and punctuation do not count."""
    return [word for word in text.split() if re.search(r"[A-Za-zÀ-ÿ0-9]", word)]


# --------------------------------------------------------------------------------------------------
# pages


def page_prose(text: str) -> str:
    """A page without code, tables, directives, formulas and addresses.

    List items are paragraphs.
    """
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1\s*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\$\$.*?^\$\$\s*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    lines = []
    for line in text.splitlines():
        is_other = re.match(r"\s*(\||:::|>>>|\.\.\. |!\[|\(.*\)=$|:\w+:)", line)
        if is_other or line.startswith(("    ", "\t")):
            lines.append("")
        elif re.match(r"\s*(#|[-*] |\d+\. |>|:)", line) or line.startswith("  "):
            item = re.match(r"\s*(#+|[-*]|\d+\.|>|:) ", line)
            lines += ["", line[item.end() :]] if item else [line.strip()]
        else:
            lines.append(line)
        if line.startswith("#"):
            lines.append("")
    prose = "\n".join(lines)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"<[^>]+>", "", prose)
    return re.sub(r"\$[^$]+\$", "x", prose)


def word_count(text: str) -> int:
    """Words of a page with its tables, code aside."""
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1\s*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    code = (">>>", "...", ":::", "    ")
    lines = [line for line in text.splitlines() if not line.startswith(code)]
    return len(words("\n".join(lines).replace("|", " ")))


def pages() -> Iterator[Text]:
    """README, CONTRIBUTING and all pages."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        yield Text(name, "pages", page_prose((ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(("docs/gallery/", "docs/figures/")):
            continue
        yield Text(place, "pages", page_prose(path.read_text(encoding="utf-8")))


# --------------------------------------------------------------------------------------------------
# source


def docstring_prose(text: str) -> str:
    """A docstring without examples, tables of parameters' names, and formulas."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = []
        for line in block.splitlines():
            is_entry = re.match(r"\s*[\w*, ]+ : ", line) or re.match(r"\s*-{3,}\s*$", line)
            is_code = re.match(r"\s*(>>>|\.\.\. )", line)
            if is_code:
                break
            lines.append("\n" if is_entry else line)
        kept.append("\n".join(lines))
    return "\n\n".join(kept)


def message_of(node: ast.expr) -> str:
    """The text of a message; what is filled in counts as one word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else "X" for v in node.values]
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message_of(node.left) + message_of(node.right)
    return ""


def source_texts(path: Path) -> Iterator[Text]:
    """Docstrings and messages of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(ROOT).as_posix()
    for node in ast.walk(tree):
        where = f"{place}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text(where, "docstrings", docstring_prose(docstring))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield Text(where, "messages", message_of(argument))
        elif isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in ("warn", "refuse", "echo", "say"):
                for argument in node.args:
                    yield Text(where, "messages", message_of(argument))
            if name in ("Option", "Argument", "command"):
                for keyword in node.keywords:
                    if keyword.arg in ("help", "short_help"):
                        yield Text(where, "messages", message_of(keyword.value))


def all_texts() -> list[Text]:
    """Everything that people read."""
    texts = list(pages())
    for path in sorted((ROOT / "src" / "keyhole").rglob("*.py")):
        texts += source_texts(path)
    for path in sorted((ROOT / "examples").glob("*.py")):
        texts += source_texts(path)
    return texts


# --------------------------------------------------------------------------------------------------
# rules


def banned_words(texts: list[Text]) -> list[str]:
    """Rule 1."""
    findings = []
    for text in texts:
        prose = re.sub("|".join(ALLOWED), "", " ".join(text.prose.split()))
        prose = re.sub(r"`[^`]*`", "`code`", prose)
        for pattern, better in BANNED.items():
            for match in re.finditer(rf"\b(?:{pattern})\b", prose, flags=re.IGNORECASE):
                findings.append(f"{text.place}: “{match[0]}”: write {better}")
    return findings


def long_sentences(texts: list[Text]) -> dict[str, tuple[int, int]]:
    """Rule 2: long sentences and all sentences, by kind of text."""
    counts: dict[str, tuple[int, int]] = {}
    for text in texts:
        sentences = text.sentences()
        n_long = sum(len(words(sentence)) > LONG for sentence in sentences)
        before = counts.get(text.kind, (0, 0))
        counts[text.kind] = (before[0] + n_long, before[1] + len(sentences))
    return counts


def page_sizes() -> dict[str, int]:
    """Words of every page, code aside."""
    sizes = {"README.md": word_count((ROOT / "README.md").read_text(encoding="utf-8"))}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(("docs/gallery/", "docs/figures/")):
            sizes[place] = word_count(path.read_text(encoding="utf-8"))
    return sizes


def bad_lines(place: str, text: str) -> list[str]:
    """Rule 4, for one page."""
    findings = []
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif fence and line.strip() == fence:
            fence = ""
        elif fence and len(line) > CODE_COLUMNS:
            findings.append(f"{place}:{number}: code of {len(line)} columns")
        elif not fence and line.lstrip().startswith("%"):
            findings.append(f"{place}:{number}: a line that begins with % is not shown")
    return findings


def all_bad_lines() -> list[str]:
    """Rule 4, for README, CONTRIBUTING and all pages."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    findings = []
    for path in paths:
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(("docs/gallery/", "docs/figures/")):
            findings += bad_lines(place, path.read_text(encoding="utf-8"))
    return findings


def main(arguments: list[str]) -> int:
    """Print what was found; 1 if there is anything."""
    texts = all_texts()
    findings = banned_words(texts) + all_bad_lines()
    for kind, (n_long, n) in long_sentences(texts).items():
        print(f"{kind}: {n_long} of {n} sentences have more than {LONG} words ({n_long / n:.1%})")
        if n_long / n >= LONG_SHARE:
            findings.append(f"{kind}: {n_long / n:.1%} long sentences, {LONG_SHARE:.0%} allowed")
    for page, size in page_sizes().items():
        if "--table" in arguments:
            own = [text for text in texts if text.place == page]
            [(n_long, n)] = long_sentences(own).values()
            print(f"{size:6} words, {n_long:3} of {n:4} sentences long  {page}")
        if page.startswith(TEACHING) and size > PAGE_WORDS:
            findings.append(f"{page}: {size} words, {PAGE_WORDS} allowed on a teaching page")
    if "--long" in arguments:
        for text in texts:
            for sentence in text.sentences():
                if len(words(sentence)) > LONG:
                    print(f"{text.place} ({len(words(sentence))}): {sentence}")
    for finding in findings:
        print(finding)
    print(f"{len(banned_words(texts))} banned words or phrases in {len(texts)} texts")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

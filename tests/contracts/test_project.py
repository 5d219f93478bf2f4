"""Files about the project agree with each other: versions, make targets, Pythons, requirements."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import keyhole as kh

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_names_this_version_and_the_paper():
    citation = text_of("CITATION.cff")
    assert f"\nversion: {kh.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation
    paper = PROJECT["urls"]["Paper"]
    assert paper in citation
    assert paper.removeprefix("https://arxiv.org/abs/") in kh.textbook.__doc__


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.MULTILINE))
    for name in (
        "CONTRIBUTING.md",
        "README.md",
        "SECURITY.md",
        ".github/workflows/ci.yml",
        ".ci/run",
    ):
        named = re.findall(r"(?:`|run: |^)make ([a-z-]+)", text_of(name), flags=re.MULTILINE)
        assert named, name
        assert set(named) <= targets, name


def test_ci_tries_every_python_that_is_promised():
    classifiers = "\n".join(PROJECT["classifiers"])
    promised = re.findall(r":: (3\.\d+)$", classifiers, flags=re.MULTILINE)
    listed = re.search(r"python: \[(.*)\]", text_of(".github/workflows/ci.yml")).group(1)
    assert re.findall(r'"(.*?)"', listed) == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_the_lowest_versions_are_those_of_the_requirements():
    script = ROOT / ".ci" / "lowest.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    pins = result.stdout.split()
    assert [pin.replace("==", ">=") for pin in pins] == PROJECT["dependencies"]


def test_every_requirement_is_pinned():
    """`make` installs what the figures of the documentation were measured with."""
    pinned = {line.partition("==")[0].lower() for line in text_of("constraints.txt").split()}
    groups = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *groups["lab"], *groups["test"], *groups["lint"]]
    names = {re.match(r"[\w-]+", requirement).group().lower() for requirement in required}
    assert names - pinned == {PROJECT["name"]}


def old_installs(text):
    """Instructions that would install `keyhole` of the package index, which is not ours."""
    return re.findall(r"pip install (?:-\S+ )*[\"']?keyhole(?![\w./-])|keyhole\[[a-z{]", text)


def test_every_instruction_installs_our_distribution():
    """The import is `keyhole`, the distribution `keyhole-ml`."""
    assert PROJECT["name"] == "keyhole-ml"
    for name in ("pip install keyhole", 'pip install "keyhole"', "pip install 'keyhole[lab]'"):
        assert old_installs(name), name
    for name in ("pip install keyhole-ml", "pip install 'keyhole-ml[lab]'", "pip install ."):
        assert not old_installs(name), name
    folders = ("src", "docs", "tests", "benchmarks", "examples", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    suffixes = {".py", ".md", ".rst", ".html", ".js"}
    texts = [path for path in paths if path.suffix in suffixes and path != Path(__file__)]
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml")
    for path in [*texts, *(ROOT / name for name in (*names, "Makefile", ".ci/run"))]:
        found = old_installs(path.read_text(encoding="utf-8"))
        assert found == [], f"{path.relative_to(ROOT)}: {found}"


def test_the_documentation_can_be_built_from_its_own_extra():
    """What scripts of the gallery import, `make docs` installs; the lab brings its own packages."""
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *extras["lab"], *extras["docs"]]
    installed = {re.match(r"[\w-]+", name).group() for name in required}
    for script in sorted((ROOT / "examples").glob("plot_*.py")):
        text = script.read_text(encoding="utf-8")
        for package in re.findall(r"^(?:import|from) (\w+)", text, flags=re.MULTILINE):
            known = package in sys.stdlib_module_names or package in {"keyhole", "sklearn"}
            assert known or package in installed, f"{script.name}: {package}"


def test_pages_say_which_packages_they_need():
    """What the code of a page imports comes with `pip install .`, or the page says so before."""
    installed = {re.match(r"[\w-]+", name).group() for name in PROJECT["dependencies"]}
    installed |= {"keyhole", "sklearn"}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^>>> (?:import|from) (\w+)", text, flags=re.MULTILINE):
            package = match.group(1)
            if package not in installed and package not in sys.stdlib_module_names:
                before = text[: match.start()]
                says_so = re.search(rf"pip install [^`\n]*\b{package}\b", before)
                assert says_so, f"{page.relative_to(ROOT)}: {package}"

"""Man pages, completion, --help and package metadata say what the code says."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import hostd
from hostd.cli.main import VERBS
from hostd.configkeys import default_yaml, reference_rows
from hostd.verdicts import REASONS
from tests.package.chroot import REPOSITORY

PACKAGING = REPOSITORY / "packaging"
DEBIAN_NAMES = {"yaml": "python3-yaml", "pynvml": "python3-pynvml", "systemd": "python3-systemd",
                "proxmoxer": "python3-proxmoxer", "psutil": "python3-psutil"}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", PACKAGING / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made")
    generate.write(output, "2026-11-30")
    return output


def plain(page: Path) -> str:
    """The words of a page without markup."""
    return plain_words(page.read_text())


def plain_words(text: str) -> str:
    text = re.sub(r"\\f[BIR]", "", text).replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")
    return re.sub(r"^\.(SS|SH|B|I|BR|TP)\s*", "", text, flags=re.MULTILINE)


def test_every_placeholder_is_filled(made: Path) -> None:
    for file in (*made.glob("man/*"), *made.glob("completion/*")):
        assert not re.search(r"@[A-Z_]+@", file.read_text()), file.name


def sections(page: Path) -> dict[str, str]:
    """Title -> words, of the sections of a page and of their parts."""
    parts = re.split(r"^\.S[SH] (.*)$", page.read_text(), flags=re.MULTILINE)
    return {plain_words(title).strip('"'): plain_words(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_man_page_names_every_option_in_the_section_of_its_verb(made: Path) -> None:
    """In whole where the verb has it for its own; by its last name where it is one of `release`."""
    found = sections(made / "man/pve-gpu-release.8")
    parsers = generate.parsers()
    shared = {(*action.option_strings, action.help) for action in generate.every_option(parsers["release"])}
    for verb, parser in parsers.items():
        text = found["OPTIONS" if verb == "release" else verb]
        assert f"pve-gpu-release {verb}" in text or verb == "release"
        for action in generate.every_option(parser):
            names = action.option_strings
            if verb != "release" and (*names, action.help) in shared:
                names = names[-1:]
            assert [name for name in names if not mentions(text, name)] == [], verb


def mentions(text: str, option: str) -> bool:
    """Not as the beginning of another option."""
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


def test_every_option_says_what_it_does() -> None:
    for verb, parser in generate.parsers().items():
        assert [action.option_strings for action in generate.every_option(parser) if not action.help] == [], verb


def test_man_page_of_the_daemon_names_every_option(made: Path) -> None:
    text = plain(made / "man/pve-gpu-hostd.8")
    assert [name for a in generate.actions(generate.daemon_parser()) for name in a.option_strings if name not in text] == []


def test_man_page_names_every_exit_status_and_reason(made: Path) -> None:
    text = plain(made / "man/pve-gpu-release.8")
    assert {reason.exit_status for reason in REASONS.values()} <= set(generate.STATUSES)
    assert [code for code in REASONS if code not in text] == []


def test_man_page_of_the_configuration_has_every_setting_with_its_default(made: Path) -> None:
    text = plain(made / "man/pve-gpu-release.yaml.5")
    for row in reference_rows():
        assert f"{row.path.rpartition('.')[2]}: {row.default}\n{row.meaning}" in text, row.path


def test_what_is_shipped_as_configuration_is_the_default() -> None:
    assert (REPOSITORY / "etc/config.yaml").read_text() == default_yaml()


def test_help_lists_every_verb_and_every_verb_has_help() -> None:
    def help_of(*words: str) -> str:
        command = [sys.executable, "-m", "hostd.cli", *words, "--help"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), words
        return done.stdout

    listed = help_of()
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", listed, re.MULTILINE), verb
        text = help_of(verb)
        for action in generate.every_option(generate.verb_parser(verb)):
            assert all(mentions(text, name) for name in action.option_strings), (verb, action.option_strings)


def test_completion_offers_every_verb_and_every_option(made: Path) -> None:
    for file in made.glob("completion/*"):
        text = file.read_text()
        for verb, parser in generate.parsers().items():
            assert verb in text, (file.name, verb)
            branch = next(line for line in text.splitlines() if line.startswith(f"    {verb}) "))
            for action in generate.every_option(parser):
                assert all(mentions(branch, name) for name in action.option_strings), (file.name, verb, action.option_strings)


@pytest.mark.parametrize("shell, name", [("bash", "pve-gpu-release.bash"), ("zsh", "_pve-gpu-release")])
def test_completion_is_valid_shell(made: Path, shell: str, name: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine; test_node.py has it complete in the node")
    done = subprocess.run([shell, "-n", str(made / "completion" / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_hostile_text_cannot_become_a_request_of_troff() -> None:
    assert generate.roff(".so /etc/passwd").startswith("\\&")
    assert generate.roff("a\\fBb\n.so x") == "a\\efBb .so x"


def test_versions_agree() -> None:
    changelog = (PACKAGING / "debian/changelog").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert re.match(r"pve-gpu-release \((\S+)\)", changelog)[1] == hostd.__version__ == project["version"]  # type: ignore[index]


# --- dependencies ----------------------------------------------------------------------------------------------------


def field(name: str) -> str:
    match = re.search(rf"^{name}: (.*)$", (PACKAGING / "debian/control").read_text(), re.MULTILINE)
    return match[1] if match else ""


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules that importing this file imports, and those that only some call of it imports."""
    tree = ast.parse(path.read_text())
    inner = {
        id(node)
        for part in ast.walk(tree)
        if isinstance(part, ast.FunctionDef | ast.Try)
        for node in ast.walk(part)
    }
    found: tuple[set[str], set[str]] = (set(), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module}
        else:
            continue
        found[id(node) in inner].update(name.partition(".")[0] for name in names)
    return found


def third_party(names: set[str]) -> set[str]:
    return names - set(sys.stdlib_module_names) - {"hostd"}


def test_every_foreign_module_is_a_recommended_package_but_for_the_driver_s() -> None:
    used: set[str] = set()
    for path in (REPOSITORY / "hostd").rglob("*.py"):
        used |= third_party(set().union(*imports(path)))
    assert {DEBIAN_NAMES[name] for name in used} - {"python3-pynvml"} <= set(field("Recommends").split(", "))
    assert "python3-pynvml" in field("Suggests").split(", "), "its dependencies would uninstall a .run driver"
    assert not any("pynvml" in field(name) or "nvidia" in field(name) for name in ("Depends", "Recommends"))


def test_a_release_needs_nothing_but_the_interpreter() -> None:
    """Depends has python3 alone: no module imports anything foreign at its top, but for the reader of YAML itself."""
    assert field("Depends") == "python3 (>= 3.11), ${misc:Depends}, ${python3:Depends}"
    needy = {p.name for p in (REPOSITORY / "hostd").rglob("*.py") if third_party(imports(p)[0])}
    assert needy <= {"configreader.py"}

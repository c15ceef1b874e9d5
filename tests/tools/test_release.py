"""A release is built only when it is ready, and its README leads to the repository."""

import importlib.util
import re
import shutil
import subprocess
import tarfile
import tomllib

import pytest

from tests.conftest import REPO


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


release = module(REPO / "tools" / "release.py")
hatch_build = module(REPO / "hatch_build.py")
VERSION = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def repo(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(REPO / name, tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *arguments):
    identity = ("-c", "user.name=N", "-c", "user.email=n@example.org")
    subprocess.run(["git", *identity, "-C", folder, *arguments], check=True)


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "-qm", "All")


def rewrite(file, pattern, text):
    content, count = re.subn(pattern, text, file.read_text(), flags=re.MULTILINE)
    assert count == 1
    file.write_text(content)


def test_each_obstacle_of_a_release_is_named_and_what_is_advised_removes_it(repo):
    address, date, tag = release.obstacles(repo)
    assert "is a placeholder" in address
    rewrite(repo / "pyproject.toml", "github.com/OWNER/", "github.com/someone/")
    assert release.obstacles(repo) == [date, "there are changes that are not committed", tag]
    heading = re.search("'(.*)'", date)[1].replace("YEAR-MONTH-DAY", "2027-01-31")
    rewrite(repo / "CHANGELOG.md", rf"^## {re.escape(VERSION)}.*", heading)
    commit(repo)
    assert release.obstacles(repo) == [tag]
    git(repo, *tag.split(": git ")[1].split())
    assert release.obstacles(repo) == []


def test_the_address_stands_in_one_place():
    listed = subprocess.run(
        ["git", "-C", REPO, "grep", "-l", "github.com/OWNER"], capture_output=True, text=True
    )
    assert set(listed.stdout.split()) <= {"pyproject.toml", "tests/tools/test_release.py"}


def test_links_and_pictures_of_the_readme_lead_to_the_files_of_the_release():
    readme = "[a](docs/a.md#part) ![b](docs/b.png) [c](https://example.org) [d](#cite) [e](LICENSE)"
    assert hatch_build.with_addresses(readme, "https://x.org/p", "v1") == (
        "[a](https://x.org/p/blob/v1/docs/a.md#part) ![b](https://x.org/p/raw/v1/docs/b.png) "
        "[c](https://example.org) [d](#cite) [e](https://x.org/p/blob/v1/LICENSE)"
    )


def test_relative_links_of_the_readme_name_files_that_are_there():
    for path in re.findall(r"\]\((?!\w+:|#)([^)#]+)", (REPO / "README.md").read_text()):
        assert (REPO / path).is_file(), path


@pytest.mark.slow
def test_the_source_distribution_builds_and_has_what_the_licence_covers_alone(tmp_path):
    command = ("-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path, REPO)
    subprocess.run([release.sys.executable, *command], check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
        metadata = opened.extractfile(f"fusion_bench_nufilt-{VERSION}/PKG-INFO").read().decode()
    assert not [name for name in names if name.startswith(("tools/patches", "tools/contribution"))]
    for name in ("README.md", "LICENSE", "hatch_build.py", "config/method/nufilt.yaml"):
        assert name in names
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert links
    assert all(link.startswith("https://") for link in links)

"""Finished work on disk: it is whole or not there, whenever a process is killed, and is used again
only for the description that it was done for.

Runs, comparisons, analyses and the demo go on by it. A merge of folders, whose pieces are tensors
inside of files, has a journal (:mod:`fusion_bench_nufilt.merge.output`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from .files import read_json, restore_folder, write_json
from .manifest import Difference, described_folder, in_one_line, verify_files

_T = TypeVar("_T")


class OtherWorkError(ValueError):
    """Finished work is of another description; the message says what differs."""


def nothing_differs(content: Any, description: Any) -> list[Difference]:
    """Return no differences, as where the name of a folder tells one description from another."""
    return []


@dataclass(frozen=True)
class FinishedWork(Generic[_T]):
    """Work that is finished once a JSON file says what it depends on, and what came of it.

    Each method raises a ValueError for damage, which names the file and gives the advice.
    """

    file: Path
    kind: type[_T]  # the schema of the file
    advice: str  # what to do about damage
    #: Returns what differs between the content of the file and a description.
    differences: Callable[[_T, Any], list[Difference]] = nothing_differs

    def content(self) -> _T | None:
        """Return the content of the file; None if the work is not finished."""
        return read_json(self.file, self.kind, self.advice)

    def check_files(self, content: _T) -> None:
        """Refuse files that are not what was written, given the content of the first one."""

    def whole(self) -> _T | None:
        """Return the content, if the work is finished and all its files are what was written."""
        content = self.content()
        if content is not None:
            self.check_files(content)
        return content

    def refuse_other(self, description: Any) -> None:
        """Raise an :class:`OtherWorkError` if the work is of another description."""
        content = self.content()
        if content is not None:
            self._refuse_differences(content, description)

    def _refuse_differences(self, content: _T, description: Any) -> None:
        differing = self.differences(content, description)
        if differing:
            raise OtherWorkError(in_one_line(differing))

    def take(self, description: Any) -> _T | None:
        """Return the same as :meth:`whole`; refuse work of another description."""
        content = self.content()
        if content is not None:
            self._refuse_differences(content, description)
            self.check_files(content)
        return content


class FinishedFile(FinishedWork[_T]):
    """Work that is all in its file."""

    def keep(self, content: Mapping[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, content)


class FinishedFolder(FinishedWork[_T]):
    """Work with further files, which lie beside the first one; it has their digests."""

    @property
    def folder(self) -> Path:
        return self.file.parent

    def is_there(self) -> bool:
        """Tell whether there is the folder, whatever it holds."""
        # A killed process may have moved an old folder aside before the new one had its name.
        restore_folder(self.folder)
        return self.folder.is_dir()

    def content(self) -> _T | None:
        if not self.is_there():
            return None
        return super().content()

    def check_files(self, content: _T) -> None:
        manifest = cast("Mapping[str, Any]", content)
        verify_files(self.folder, manifest, self.advice, manifest_name=self.file.name)

    @contextmanager
    def keep(self, content: Mapping[str, Any]) -> Iterator[Path]:
        """Yield a folder for the further files; it takes its place at the end of the block, which
        may complete ``content``.
        """
        with described_folder(self.folder, content, self.file.name) as draft:
            yield draft
